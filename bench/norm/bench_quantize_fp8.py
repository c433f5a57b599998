"""quantize_fp8 against torch and vLLM; bytes = x in (once, also for mode tensor, which must look at it twice), q and scales out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench import Case, Goal, compiled
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.norm import quantize_fp8

FP8 = torch.float8_e4m3fn


def scaled(x: torch.Tensor, absmax: torch.Tensor) -> Any:
    scale = (absmax.float() / 448).clamp(min=1e-10)
    return (x.float() / scale).clamp(-448, 448).to(FP8), scale


def token(s: Any) -> Any:
    return scaled(s[0], s[0].abs().amax(1, keepdim=True))


def tensor(s: Any) -> Any:
    return scaled(s[0], s[0].abs().max())


def group(s: Any) -> Any:
    x = s[0].unflatten(1, (-1, 128))
    return scaled(x, x.abs().amax(2, keepdim=True))


def static(s: Any) -> torch.Tensor:
    return (s[0].float() / s[1]).clamp(-448, 448).to(FP8)


PLAIN: dict[str, Callable[[Any], Any]] = {"token": token, "static": static, "tensor": tensor, "group": group}
VLLM: dict[str, Callable[[Any], Any]] = {
    "token": lambda s: vllm.fp8_token(s[0]),
    "static": lambda s: vllm.fp8_static(s[0], s[1]),
    "tensor": lambda s: vllm.fp8_tensor(s[0]),
    "group": lambda s: vllm.fp8_group(s[0]),
}


def make(T: int, N: int, n: int) -> list[Any]:
    scale = torch.full((1,), 0.01, device="cuda")
    return [(torch.randn(T, N, device="cuda", dtype=torch.bfloat16), scale) for _ in range(n)]


def case(T: int, N: int, mode: str) -> Case:
    scales = {"token": T, "group": T * -(-N // 128)}.get(mode, 1)
    # Mode tensor is two dependent kernels over x: its floor is not a copy of the bytes.
    goal = Goal(ratio={"vllm": 1.0}) if mode == "tensor" else Goal(share=0.95, ratio={"vllm": 1.0})
    return Case(
        name=f"T={T} N={N} {mode} bf16",
        dtype="bf16->fp8",
        bytes=3 * T * N + 4 * scales,
        flops=2 * T * N,
        make=lambda n: make(T, N, n),
        ours=lambda s: quantize_fp8(s[0], mode, s[1] if mode == "static" else None),
        baselines={"torch": PLAIN[mode], "torch.compile": compiled(PLAIN[mode]), "vllm": VLLM[mode]},
        goal=goal if T >= 8192 else Goal(us=2.0) if T == 1 and N <= 8192 and mode != "tensor" else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    # The groups of torch's formula need N % 128 == 0; the kernel does not.
    modes = [mode for mode in PLAIN if mode != "group" or shapes.N % 128 == 0]
    return [case(T, N, mode) for mode in modes for T, N in shapes.grid(shapes.N)]
