"""rms_norm against torch and vLLM: plain, with residual add, with FP8 output; bytes = x in, y out, residual in and out, weight once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F_

from bench import Case, Goal, compiled
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.norm import rms_norm

EPS = 1e-5


def plain(s: Any) -> torch.Tensor:
    return F_.rms_norm(s[0], s[1].shape, s[1], EPS)


def plain_add(s: Any) -> Any:
    x, weight, residual, _ = s
    residual.add_(x)
    return F_.rms_norm(residual, weight.shape, weight, EPS), residual


def plain_fp8(s: Any) -> Any:
    y = plain(s).float()
    scale = (y.abs().amax(1, keepdim=True) / 448).clamp(min=1e-10)
    return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def plain_static(s: Any) -> torch.Tensor:
    return (plain(s).float() / s[3]).clamp(-448, 448).to(torch.float8_e4m3fn)


def both(fn: Any) -> dict[str, Any]:
    return {"torch": fn, "torch.compile": compiled(fn)}


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "": (lambda s: rms_norm(s[0], s[1], EPS), both(plain) | {"vllm": lambda s: vllm.rms_norm(s[0], s[1], EPS)}),
    "add": (
        lambda s: rms_norm(s[0], s[1], EPS, residual=s[2]),
        both(plain_add) | {"vllm": lambda s: vllm.fused_add_rms_norm(s[0], s[2], s[1], EPS)},
    ),
    "fp8 token": (
        lambda s: rms_norm(s[0], s[1], EPS, quant="token"),
        both(plain_fp8) | {"vllm": lambda s: vllm.rms_norm_token_fp8(s[0], s[1], EPS)},
    ),
    "add fp8 token": (
        lambda s: rms_norm(s[0], s[1], EPS, residual=s[2], quant="token"),
        {"vllm": lambda s: vllm.rms_norm_token_fp8(s[0], s[1], EPS, residual=s[2])},
    ),
    "fp8 static": (
        lambda s: rms_norm(s[0], s[1], EPS, quant="static", scale=s[3]),
        both(plain_static) | {"vllm": lambda s: vllm.rms_norm_static_fp8(s[0], s[1], s[3], EPS)},
    ),
    "add fp8 static": (
        lambda s: rms_norm(s[0], s[1], EPS, residual=s[2], quant="static", scale=s[3]),
        {"vllm": lambda s: vllm.fused_add_rms_norm_static_fp8(s[0], s[2], s[1], s[3], EPS)},
    ),
}


def make(T: int, N: int, n: int) -> list[Any]:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    weight, scale = torch.randn(N, **options), torch.full((1,), 0.01, device="cuda")
    return [(torch.randn(T, N, **options), weight, torch.randn(T, N, **options), scale) for _ in range(n)]


def case(T: int, N: int, variant: str) -> Case:
    ours, baselines = VARIANTS[variant]
    fp8, add = "fp8" in variant, "add" in variant
    return Case(
        name=f"T={T} N={N} {variant} bf16".replace("  ", " "),
        dtype="bf16->fp8" if fp8 else "bf16",
        bytes=T * N * (2 + (1 if fp8 else 2) + (4 if add else 0)) + 2 * N + (4 * T if "token" in variant else 0),
        flops=T * N * (4 + add + fp8),
        make=lambda n: make(T, N, n),
        ours=ours,
        baselines=baselines,
        goal=Goal(share=0.95, ratio={"vllm": 1.0}) if T >= 8192 else Goal(us=2.0) if T == 1 and N <= 8192 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, N, variant) for variant in VARIANTS for T, N in shapes.grid(shapes.N)]
