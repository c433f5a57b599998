"""What this GPU can do, measured in the same run by code that is not ours: memory by CuPy raw kernels, matrix rates by cuBLAS.

A share of a ceiling compares a case with a copy of the same number of bytes under the same timer (`copies`); the large read
rate gives the floors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from bench.timing import Contender, race, sets_for

# A block takes 4 * 512 neighbouring 16-byte items, four loads of each thread in flight; no persistent grid, so no tail of a last wave.
ITEMS_PER_BLOCK = 2048
SOURCE = r"""
typedef long long i64;
static __device__ __forceinline__ i64 first() { return (i64)blockIdx.x * 2048 + threadIdx.x; }

extern "C" __global__ __launch_bounds__(512) void copy16(const uint4* __restrict__ in, uint4* __restrict__ out, i64 n) {
  const i64 i = first();
  if (i + 1536 < n) {
    const uint4 a = in[i], b = in[i + 512], c = in[i + 1024], d = in[i + 1536];
    out[i] = a; out[i + 512] = b; out[i + 1024] = c; out[i + 1536] = d;
  } else {
    for (i64 k = i; k < n; k += 512) out[k] = in[k];
  }
}

extern "C" __global__ __launch_bounds__(512) void read16(const uint4* __restrict__ in, uint4* __restrict__ out, i64 n) {
  const i64 i = first();
  uint4 s = make_uint4(0, 0, 0, 0);
  if (i + 1536 < n) {
    const uint4 a = in[i], b = in[i + 512], c = in[i + 1024], d = in[i + 1536];
    s.x = a.x ^ b.x ^ c.x ^ d.x; s.y = a.y ^ b.y ^ c.y ^ d.y; s.z = a.z ^ b.z ^ c.z ^ d.z; s.w = a.w ^ b.w ^ c.w ^ d.w;
  } else {
    for (i64 k = i; k < n; k += 512) { const uint4 a = in[k]; s.x ^= a.x; s.y ^= a.y; s.z ^= a.z; s.w ^= a.w; }
  }
  // Practically never true for random data, and unknown to the compiler: the loads stay, nothing is written.
  if (s.x == 0x9e3779b9u && s.y == 0x7f4a7c15u && s.z == 0xf39cc060u && s.w == 0x5cedc834u) out[0] = s;
}

extern "C" __global__ __launch_bounds__(512) void write16(uint4* __restrict__ out, i64 n) {
  const i64 i = first();
  for (i64 k = i; k < n && k < i + 2048; k += 512) out[k] = make_uint4((unsigned)k, 1u - (unsigned)k, 0x9e3779b9u * (unsigned)k, 12345u);
}
"""
LARGE_BYTES = 1 << 30
MATRIX_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """GB/s (10^9 bytes) and TFLOP/s; null where this run could not measure it, with the reason in `notes`."""

    copy_gbs: float
    read_gbs: float
    write_gbs: float | None
    bf16_tflops: float
    fp8_tflops: float | None
    notes: str = ""

    def to_json(self) -> dict[str, Any]:
        return {k: round(v, 1) if isinstance(v, float) else v for k, v in asdict(self).items()}


@cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=SOURCE, options=("-std=c++17",))


def cupy_missing() -> str:
    """Why the CuPy kernels cannot run, or ""."""
    try:
        _module().get_function("copy16")
    except Exception as error:  # an absent package, no NVRTC, a driver that is too old: all mean the torch copy is the only ceiling
        return f"{type(error).__name__}: {error}"
    return ""


def _launch(name: str, n: int, *args: Any) -> None:
    """n 16-byte items. Tensors go in as pointers, n as int64: CuPy passes NumPy scalars with their own size."""
    import cupy
    import numpy as np

    packed = tuple(np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in args)
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        _module().get_function(name)((-(-n // ITEMS_PER_BLOCK),), (512,), (*packed, np.int64(n)))


def cupy_copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    n = pair[0].nbytes // 16
    _launch("copy16", n, pair[0], pair[1])


def torch_copy(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    pair[1].copy_(pair[0])


def copies(nbytes: int, n: int) -> dict[str, tuple[Callable[[Any], Any], Sequence[Any]]]:
    """Contenders that move nbytes (half read, half written) over n pairs of buffers, rotating as the case does."""
    half = max(16, nbytes // 2 // 16 * 16)
    pairs = [(_random_bytes(half), torch.empty(half, dtype=torch.uint8, device="cuda")) for _ in range(n)]
    found: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]] = {"copy (torch)": (torch_copy, pairs)}
    if not cupy_missing():
        found["copy (cupy)"] = (cupy_copy, pairs)
    return found


def _random_bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), dtype=torch.uint8, device="cuda")


def _rate(work: dict[str, tuple[Callable[[Any], Any], Sequence[Any]]], amount: float, rounds: int) -> float:
    """amount / microseconds of the fastest contender: bytes / 1e3 gives GB/s, FLOPs / 1e6 gives TFLOP/s."""
    contenders = {name: Contender(fn, sets) for name, (fn, sets) in work.items()}
    for contender in contenders.values():
        contender.prepare(round_ms=20.0)
    return amount / min(t.us for t in race(contenders, rounds=rounds).values())


def _memory(rounds: int) -> tuple[float, float, float | None, str]:
    n = sets_for(LARGE_BYTES)[0]
    copy = _rate(copies(LARGE_BYTES, n), LARGE_BYTES / 1e3, rounds)
    missing = cupy_missing()
    bufs = [_random_bytes(LARGE_BYTES) for _ in range(n)]
    if missing:
        # A sum over int32 reads every byte once and writes nothing of size: the read ceiling where CuPy is absent.
        read = _rate({"sum": (lambda b: b.view(torch.int32).amax(), bufs)}, LARGE_BYTES / 1e3, rounds)
        return copy, read, None, f"memory ceilings by torch, CuPy missing ({missing})"
    sink = torch.empty(16, dtype=torch.uint8, device="cuda")
    count = LARGE_BYTES // 16
    read = _rate({"read": (lambda b: _launch("read16", count, b, sink), bufs)}, LARGE_BYTES / 1e3, rounds)
    write = _rate({"write": (lambda b: _launch("write16", count, b), bufs)}, LARGE_BYTES / 1e3, rounds)
    return copy, read, write, ""


def _bf16(rounds: int) -> float:
    m = MATRIX_SIZE
    sets = [tuple(torch.randn(m, m, device="cuda", dtype=torch.bfloat16) for _ in range(2)) for _ in range(2)]
    return _rate({"bf16": (lambda s: s[0] @ s[1].t(), sets)}, 2 * m**3 / 1e6, rounds)


def _fp8(rounds: int) -> tuple[float | None, str]:
    m = MATRIX_SIZE
    one = torch.ones((), device="cuda")
    sets = [tuple(torch.randn(m, m, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)) for _ in range(2)]

    def product(s: Any) -> torch.Tensor:
        return torch._scaled_mm(s[0], s[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        product(sets[0])
    except RuntimeError as error:
        return None, f"fp8 matrix rate not measured ({str(error).splitlines()[0]})"
    return _rate({"fp8": (product, sets)}, 2 * m**3 / 1e6, rounds), ""


def measure(rounds: int = 5) -> Ceilings:
    """All ceilings of the current GPU; a few seconds."""
    copy, read, write, memory_note = _memory(rounds)
    torch.cuda.empty_cache()
    bf16 = _bf16(rounds)
    fp8, fp8_note = _fp8(rounds)
    torch.cuda.empty_cache()
    return Ceilings(copy, read, write, bf16, fp8, "; ".join(note for note in (memory_note, fp8_note) if note))
