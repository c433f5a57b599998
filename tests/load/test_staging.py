"""Tensors through the ring of pinned buffers: the same bytes on a CPU and a GPU, host memory of one shard, errors that name the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pyllm.load import CheckpointError, on_device, open_checkpoint
from pyllm.load.gguf_file import GgufFile
from pyllm.load.gguf_types import TYPES
from pyllm.load.reader import MOST, SMALL, FileReader, PythonFileReader
from pyllm.load.safetensors_file import SafetensorsFile, open_safetensors
from pyllm.load.staging import OnDevice

from .builders import entry, gguf, info, safetensors, write

ROOT = Path(__file__).parents[2]
SIZES = (0, 1, 2, 511, SMALL // 2 - 1, SMALL // 2, SMALL // 2 + 1, 3 * SMALL + 7)
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
READERS = [FileReader, PythonFileReader] if FileReader is not PythonFileReader else [PythonFileReader]


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_the_same_bytes(tmp_path: Path, device: str) -> None:
    """Sizes around where one read becomes several, every type, tensors at odd offsets."""
    torch.manual_seed(0)
    types = (torch.bfloat16, torch.float32, torch.uint8, torch.int64, torch.float16)
    tensors = {f"t{i}-{n}": torch.randint(0, 255, (n,)).to(t) for i, t in enumerate(types) for n in SIZES}
    tensors |= {"flags": torch.rand(1000) > 0.5, "m": torch.randn(64, 3, 5), "fp8": torch.randn(77).to(torch.float8_e4m3fn)}
    save_file(tensors, tmp_path / "model.safetensors")
    staged = OnDevice(open_safetensors(tmp_path), device, threads=3)
    for name, want in tensors.items():
        got = staged[name]
        assert (got.device.type, got.dtype, got.shape) == (device, want.dtype, want.shape)
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), name
    assert set(staged) == set(tensors) and staged.shape("m") == (64, 3, 5) and staged.dtype("m") == torch.float32


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", [kind for kind, block in TYPES.items() if block.decode is not None], ids=lambda k: TYPES[k].name)
def test_blocks_decode_to_the_same_bits_on_the_device(tmp_path: Path, device: str, kind: int) -> None:
    block, rows = TYPES[kind], 3000
    raw = torch.randint(0, 256, (rows * 1024 // block.values * block.nbytes,), generator=torch.Generator().manual_seed(kind))
    data = raw.to(torch.uint8).numpy().tobytes()
    file = GgufFile(write(tmp_path / "m.gguf", gguf([], [info("t", (1024, rows), kind, 0)], data)))
    want, got = file["t"], OnDevice(file, device)["t"]
    assert got.device.type == device
    nan = want.isnan()
    assert torch.equal(got.cpu().isnan(), nan) and not nan.all()
    assert torch.equal(got.cpu().view(torch.int32)[~nan], want.view(torch.int32)[~nan])


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("threads", [1, 3])
def test_readers_fill_what_they_are_given(tmp_path: Path, reader: type[FileReader], threads: int) -> None:
    """Sizes around a small read and around a piece of each thread, at odd offsets; nothing past the end is touched."""
    data = os.urandom(3 * MOST * 2 + 77)
    (tmp_path / "f").write_bytes(data)
    one = reader(threads)
    with (tmp_path / "f").open("rb") as file:
        for size in (0, 1, SMALL, SMALL + 1, 3 * SMALL - 1, 3 * MOST, 3 * MOST + 1, len(data) - 5):
            out = bytearray(b"\xaa") * (size + 8)
            assert one.read(file.fileno(), 5, memoryview(out)[:size]) == size
            assert out == data[5 : 5 + size] + b"\xaa" * 8


@pytest.mark.parametrize("reader", READERS)
def test_readers_say_where_a_file_ends(tmp_path: Path, reader: type[FileReader]) -> None:
    (tmp_path / "f").write_bytes(bytes(2 * SMALL + 3))
    with (tmp_path / "f").open("rb") as file:
        assert reader(3).read(file.fileno(), 1, memoryview(bytearray(8 * SMALL))) == 2 * SMALL + 2
        assert reader(3).read(file.fileno(), 1 << 20, memoryview(bytearray(8))) == 0
        with pytest.raises((BufferError, TypeError)):
            reader(1).read(file.fileno(), 0, memoryview(b"1234"))  # read-only
    with pytest.raises(OSError, match="Bad file descriptor"):
        reader(2).read(1 << 20, 0, memoryview(bytearray(4 * SMALL)))
    with pytest.raises(ValueError, match="FileReader: threads is 0, expected 1 to 256"):
        reader(0)


@pytest.mark.parametrize("reader", READERS)
def test_callers_of_one_reader_do_not_mix(tmp_path: Path, reader: type[FileReader]) -> None:
    data = os.urandom(6 * SMALL)
    (tmp_path / "f").write_bytes(data)
    one = reader(2)

    def ask(i: int) -> bool:
        out = bytearray(4 * SMALL)
        with (tmp_path / "f").open("rb") as file:
            return one.read(file.fileno(), i, memoryview(out)) == len(out) and out == data[i : i + len(out)]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(64)))


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", safetensors({"a": entry("U8", [1 << 20], 0, 1 << 20)}, bytes(1 << 20)))
    file = SafetensorsFile(path)
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match=r"m.safetensors: the file shrank from \d+ to 1000 bytes"):
        OnDevice(file, "cpu")["a"]
    view = memoryview(bytearray(100))
    file._file._check = lambda begin, end: None  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match=r"m.safetensors: the file ended at byte 1000 while it was read"):
        file._file.read_into(950, view)


def test_what_is_staged(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", safetensors({"a": entry("U8", [4], 0, 4)}, b"abcd"))
    file, plain = SafetensorsFile(path), {"a": torch.zeros(1)}
    assert on_device(file, "cpu") is file
    assert on_device(plain, "cuda") is plain
    staged = OnDevice(file, "cpu")
    assert staged["a"] is staged["a"]
    with pytest.raises(KeyError, match="no tensor 'b'"):
        staged["b"]


MEASURE = """
import json, resource, sys
import torch
from pyllm.load import open_checkpoint
from pyllm.load.staging import OnDevice
torch.zeros(1 << 20).sum()
checkpoint = open_checkpoint(sys.argv[1])
source = OnDevice(checkpoint.tensors, "cpu") if sys.argv[2] == "ring" else checkpoint.tensors
before = int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
open("/proc/self/clear_refs", "w").write("5")
total = 0
for name in source:
    total += int(source[name].view(torch.int32)[::1024].sum())
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
print(json.dumps({"growth": (peak - before) << 10, "total": total}))
"""


def test_host_memory_stays_under_one_shard(tmp_path: Path) -> None:
    """Four shards of 64 MiB in tensors of 16: through the ring the process grows by no more than a shard and a tenth (by two tensors, as
    measured), while mapped pages pile up to all of the model."""
    shard, each, where = 64 << 20, 16 << 20, {}
    for i in range(4):
        tensors = {f"t{i}.{j}": torch.full((each // 4,), i * 4 + j, dtype=torch.int32) for j in range(shard // each)}
        save_file(tensors, tmp_path / f"model-{i}.safetensors")
        where |= dict.fromkeys(tensors, f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text("{}")
    grown = {}
    for way in ("ring", "mapped"):
        done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), way], capture_output=True, text=True, check=True, cwd=ROOT)
        found = json.loads(done.stdout)
        assert found["total"] == sum(range(16)) * (each // 4 // 1024)
        grown[way] = found["growth"]
    assert grown["ring"] <= 1.1 * shard
    assert grown["mapped"] >= 3 * shard  # the measurement sees mapped pages


def test_a_checkpoint_of_each_kind_opens(demo_path: Path) -> None:
    tensors = open_checkpoint(demo_path).tensors
    staged = OnDevice(tensors, "cpu")
    for name in list(tensors)[:12]:
        assert torch.equal(staged[name], tensors[name])


def test_the_recorded_speeds_reach_the_goal() -> None:
    """bench/results/load.jsonl, by `python -m tools.load_speed --record`: at least 70 % of what the machine could read, or copy."""
    lines = [json.loads(text) for text in (ROOT / "bench" / "results" / "load.jsonl").read_text().splitlines()]
    assert lines
    for line in lines:
        assert line["goal"] == 0.7 and "host" in line["share_of_ceiling"]
        assert all(share >= line["goal"] for share in line["share_of_ceiling"].values()), line["machine"]
