"""The GPUs whose floors `explain` knows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """What floors are computed from: bytes/s of a read stream, FLOP/s of large bf16 products (fp32 runs on the plain cores)."""

    name: str
    read: float
    bf16: float
    fp32: float
    source: str


GPUS = {
    "h200": Gpu("NVIDIA H200", 4.6e12, 7.6e14, 5.5e13, "measured: attention reads, cuBLAS bf16; fp32 from the data sheet"),
    "h100": Gpu("NVIDIA H100 SXM", 3.35e12, 9.9e14, 6.7e13, "data sheet"),
}
