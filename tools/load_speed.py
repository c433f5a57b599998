"""How fast a safetensors checkpoint loads from the page cache, beside what the machine could do; recorded in bench/results/load.jsonl.

    python -m tools.load_speed [--gib 4] [--rounds 5] [--dir FOLDER] [--ways read,host,gpu,copy] [--record]

A checkpoint of layers of an 8B Llama in two shards is written and so is in the page cache. Then, in turn, each
the best of the rounds (another process can only slow a copy down):
  read       the files' bytes into a pinned buffer of the largest tensor's size, by as many threads as the loader has: the host's ceiling
  host       the loader: every tensor by its name into that buffer
  gpu        the loader onto the GPU, through its ring of pinned buffers
  copy       that many bytes from pinned memory to the GPU: the other ceiling of `gpu`
  mapped     every tensor of the mapped file moved to the GPU, as torch does it
  library    safetensors' own load_file
Without a GPU buffers are plain memory and the last four are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from pyllm.load.mapped import MappedFile
from pyllm.load.safetensors_file import INDEX_NAME, open_safetensors
from pyllm.load.staging import THREADS, OnDevice, Stager
from pyllm.load.tensors import TensorMap
from tools.digest import ROOT

RESULTS = ROOT / "bench" / "results" / "load.jsonl"
LAYER = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "gate": (14336, 4096), "up": (14336, 4096),
         "down": (4096, 14336), "norm1": (4096,), "norm2": (4096,)}  # fmt: skip
GOAL = 0.7
PAGE = 4096
CUDA = torch.cuda.is_available()


def write_checkpoint(folder: Path, gib: float) -> int:
    """Bytes of tensors written."""
    from safetensors.torch import save_file

    each = 2 * sum(torch.Size(s).numel() for s in LAYER.values())
    layers = max(int(gib * 2**30) // each, 2)
    where: dict[str, str] = {}
    one = {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in LAYER.items()}
    for shard in range(2):
        tensors = {f"layers.{i}.{name}": t.clone() for i in range(shard, layers, 2) for name, t in one.items()}
        save_file(tensors, folder / f"model-{shard}.safetensors")
        where |= dict.fromkeys(tensors, f"model-{shard}.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": where}))
    return layers * each


def buffer(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=CUDA).fill_(1)


class Pinned(Stager):
    """Every tensor into the same pinned buffer."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.buffer = buffer(size)

    def bytes(self, file: MappedFile, begin: int, size: int) -> torch.Tensor:
        self.into(file, begin, self.buffer[:size])
        return self.buffer[:size]


def raw_reader(folder: Path, out: torch.Tensor, threads: int) -> Callable[[], None]:
    """Nothing but pread: each thread its own part of each file, one buffer after the other; threads start once and never wait."""
    files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in sorted(folder.glob("*.safetensors"))]
    pool, view = ThreadPoolExecutor(threads), out.numpy().data
    part = len(view) // threads // PAGE * PAGE
    slots = [view[i * part : (i + 1) * part] for i in range(threads)]

    def work(i: int) -> None:
        for fd, size in files:
            each = -(-size // threads)
            for at in range(i * each, min((i + 1) * each, size), part):
                os.preadv(fd, [slots[i][: min(part, (i + 1) * each - at)]], at)

    return lambda: list(pool.map(work, range(threads))) and None


def take(tensors: TensorMap, stager: Stager | None = None) -> None:
    for name in tensors:
        tensors.read(name, stager)


def ways(folder: Path, size: int) -> dict[str, Callable[[], Any]]:
    tensors = open_safetensors(folder)
    pinned = Pinned(max(2 * torch.Size(s).numel() for s in LAYER.values()))
    out: dict[str, Callable[[], Any]] = {"read": raw_reader(folder, pinned.buffer, pinned.threads), "host": lambda: take(tensors, pinned)}
    if not CUDA:
        return out
    from safetensors.torch import load_file

    staged = OnDevice(tensors, "cuda")
    source, target = buffer(64 << 20), torch.empty(64 << 20, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        for _ in range(-(-size // len(source))):
            target.copy_(source, non_blocking=True)

    return out | {
        "gpu": lambda: [staged[name] for name in tensors] and None,
        "copy": copy,
        "mapped": lambda: [tensors[name].to("cuda") for name in tensors] and None,
        "library": lambda: [load_file(path, device="cuda") for path in sorted(folder.glob("*.safetensors"))] and None,
    }


def measure(folder: Path, size: int, rounds: int, wanted: str | None) -> dict[str, float]:
    """Way -> GB/s."""
    contenders = {name: run for name, run in ways(folder, size).items() if wanted is None or name in wanted.split(",")}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for round_number in range(rounds + 1):  # the first one warms up
        for name in sorted(contenders, reverse=bool(round_number % 2)):
            started = time.perf_counter()
            contenders[name]()
            if CUDA:
                torch.cuda.synchronize()
            if round_number:
                times[name].append(time.perf_counter() - started)
    return {name: round(size / min(t) / 1e9, 2) for name, t in times.items()}


def record(line: dict[str, Any]) -> None:
    """One line for each machine, the newest."""
    old = [json.loads(text) for text in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    kept = [entry for entry in old if entry["machine"] != line["machine"]]
    RESULTS.write_text("".join(json.dumps(entry) + "\n" for entry in sorted([*kept, line], key=lambda entry: entry["machine"])))


def main() -> int:
    parser = argparse.ArgumentParser(description="measure how fast a checkpoint loads")
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where the checkpoint is written (default: the system's folder for temporary files)")
    parser.add_argument("--ways", help="these alone, with commas between them (default: all that this machine can)")
    parser.add_argument("--record", action="store_true", help="write bench/results/load.jsonl")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="pyllm-load-") as name:
        folder = Path(name)
        size = write_checkpoint(folder, options.gib)
        speeds = measure(folder, size, options.rounds, options.ways)
    shares = {"host": round(speeds["host"] / speeds["read"], 3)} if {"host", "read"} <= speeds.keys() else {}
    if {"gpu", "read", "copy"} <= speeds.keys():
        shares["gpu"] = round(speeds["gpu"] / min(speeds["read"], speeds["copy"]), 3)
    threads = min(THREADS, len(os.sched_getaffinity(0)))
    machine = torch.cuda.get_device_name() if CUDA else f"CPU, {len(os.sched_getaffinity(0))} cores ({platform.machine()})"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or None
    line = {"machine": machine, "bytes": size, "threads": threads, "rounds": options.rounds, "gb_per_s": speeds, "share_of_ceiling": shares,
            "goal": GOAL, "torch": torch.__version__, "python": sys.version.split()[0], "commit": commit,
            "time": time.strftime("%Y-%m-%d %H:%M"), "command": f"python -m tools.load_speed --gib {options.gib:g}"}  # fmt: skip
    print(f"{machine}: {size / 1e9:.1f} GB of bf16 in 2 shards, {threads} threads, GB/s (best of {options.rounds})")
    for way, speed in speeds.items():
        print(f"  {way:<8} {speed:>7.2f}" + (f"   {shares[way]:.0%} of its ceiling" if way in shares else ""))
    if options.record:
        record(line)
    return int(min(shares.values(), default=1.0) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
