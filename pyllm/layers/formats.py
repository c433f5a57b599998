"""Formats: how one Linear is stored and multiplied. Chosen by a quant plan over checkpoint names, never by the layer.

A Format says which tensors it reads (`tensors`), how it turns them once into what its kernel wants (`finish`), and how it multiplies
(`matmul`).
A layer never asks which format it has; a format never asks which layer it serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers.spec import Weight
from pyllm.ops import invariant
from pyllm.ops.gemm import add_streams, norm_streams

QuantPlan = Sequence[tuple[str, "Format | None"]]
"""Ordered (glob over checkpoint names without suffix, Format); the first match wins; None and no match: the model's dtype."""

GATE_ROWS = 512
"""Rows of x from which the gate is in the epilogue, which halves the memory in between. In bf16, behind a norm, it is 1.07x, 1.05x and
1.03x the speed of the product and an op of its own at 512, 1,024 and 4,096 rows of (28672, 4096), 1.05x at 1,024 of (16384, 2048)."""


class Format:
    """Subclasses are frozen dataclasses, so that they compare, hash and print."""

    name: str = "?"
    op: str = "linear"  # torch.ops.pyllm.<op> that multiplies
    experts_op: str = "moe_experts"  # torch.ops.pyllm.<op> of `experts`
    expert_extras: bool = False  # `experts` takes biases and a clamp
    quantizes: str = ""  # torch.ops.pyllm.<op> that turns x into what `op` multiplies; "": x as it is
    takes_e4m3: bool = False  # multiplies e4m3 rows with a scale each or one (`matmul_e4m3`), which a norm or an activation can give
    multiple: int = 1  # rows and columns of what it multiplies are multiples of it
    granule: int = 0  # `matmul` heeds m.invariant where K and N are multiples of it; 0: never
    static: bool = False  # multiplies rows quantized with the one scale that `given` has
    no_experts: str | None = None  # why there is no `experts`, said when such a product is bound

    def tensors(self, weight: Weight) -> dict[str, Weight]:
        """attribute -> what to read, given the plain weight `[N, K]` (its parts, sharding and names)."""
        raise TypeError(f"{type(self).__name__} has no tensors()")

    def reads(self, weight: Weight, held: Callable[[Weight], list[tuple[str, tuple[int, ...] | None]]]) -> dict[str, Weight]:
        """`tensors`, where that depends on what the checkpoint has: held gives the names that a Weight is made from, with the shape of
        those that are there."""
        return self.tensors(weight)

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Repack once, after loading and sharding; returns what the module keeps."""
        return tensors

    def matmul(self, m: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x `[T, K]` -> `[T, N]` of x's dtype."""
        raise TypeError(f"{type(self).__name__} has no matmul()")

    def gates(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> bool:
        """Whether, for so many rows of x, `matmul` (`matmul_e4m3`) takes `gate` (an activation) and gives `act(gate) * up` itself."""
        return False

    def norms(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str, gated: bool) -> bool:
        """Whether, for so many rows, `matmul_normed` is faster than the norm (the product, and the gate) one after the other."""
        return False

    def adds(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> bool:
        """Whether `matmul` takes `residual` `[T, N]` for so many rows, and gives its sum with the product."""
        return False

    def matmul_normed(self, m: Any, x: Any, bias: Tensor | None, gate: str | None = None) -> Tensor:
        """The product of an unread `Normed`, with gate an activation: of `act(gate) * up`."""
        raise TypeError(f"{type(self).__name__} has no matmul_normed()")

    def matmul_e4m3(self, m: Any, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """q `[T, K]` e4m3 with scale `[T]`, or `[1]` for all -> `[T, N]` of dtype."""
        raise TypeError(f"{type(self).__name__} has no matmul_e4m3()")

    def given(self, m: Any) -> Tensor | None:
        """The scale `[1]` with which the product's input is quantized; None: each row has its own."""
        return None

    def writes(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str, gated: bool) -> bool:
        """Whether, for so many rows of x, `matmul_to_e4m3` is there and faster than the product and a quantizing op."""
        return False

    def matmul_to_e4m3(self, m: Any, x: Any, bias: Tensor | None, out_scale: Tensor, act: str, gated: bool) -> Tensor:
        """`act` of the product, or `act(gate) * up`, as e4m3 with the scale `[1]`. x: rows, or the pair of e4m3 rows and their scales."""
        raise TypeError(f"{type(self).__name__} has no matmul_to_e4m3()")

    def experts(self, w13: Any, w2: Any, x: Tensor, ids: Tensor, weights: Tensor, act: str, **extras: Any) -> Tensor:
        """The routed gated MLPs of a MoE layer over two stacked Linears of this format. extras, where `expert_extras`: w13_bias, w2_bias,
        clamp, as in `moe_experts`; only those that the layer has."""
        raise TypeError(f"format {self.name} has no MoE path; leave the experts out of the quant plan")

    def weight_bytes(self, n: int, k: int) -> int:
        """Bytes that one multiplication reads of the weight (scales included)."""
        raise TypeError(f"{type(self).__name__} has no weight_bytes()")


@dataclass(frozen=True)
class Dense(Format):
    """Plain storage: bf16, fp16 or fp32; None: the model's dtype. Multiplies in the stored dtype, returns x's dtype."""

    dtype: torch.dtype | None = None

    granule = 8
    expert_extras = True

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"Dense: dtype is {self.dtype}, expected bfloat16, float16, float32 or None")

    @property
    def name(self) -> str:  # type: ignore[override]
        return {None: "model", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]

    def tensors(self, weight: Weight) -> dict[str, Weight]:
        return {"weight": replace(weight, fp32=self.dtype is torch.float32)}

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: t if self.dtype is None else t.to(self.dtype) for k, t in tensors.items()}

    def gates(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> bool:
        halves = dtype in (torch.bfloat16, torch.float16) and self.dtype in (None, dtype)
        return halves and device == "cuda" and rows >= GATE_ROWS and n % 16 == 0 and k % 8 == 0

    def norms(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str, gated: bool) -> bool:
        mine = dtype == torch.bfloat16 and self.dtype in (None, dtype) and device == "cuda"
        return mine and k % 8 == 0 and n % 16 == 0 and norm_streams(rows, n, k, gated)

    def adds(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str) -> bool:
        halves = dtype in (torch.bfloat16, torch.float16) and self.dtype in (None, dtype) and device == "cuda"
        return halves and k % 8 == 0 and add_streams(rows, n, k)

    def matmul_normed(self, m: Any, x: Any, bias: Tensor | None, gate: str | None = None) -> Tensor:
        norm = x.norm
        return ops.norm_linear(x.residual, norm.weight, norm.spec.eps, m.weight, bias, act=gate, gated=gate is not None)

    def writes(self, rows: int, n: int, k: int, dtype: torch.dtype, device: str, gated: bool) -> bool:
        mine = dtype == torch.bfloat16 and self.dtype in (None, dtype) and device == "cuda"
        return mine and rows >= GATE_ROWS and n % (32 if gated else 16) == 0 and k % 8 == 0

    def matmul_to_e4m3(self, m: Any, x: Any, bias: Tensor | None, out_scale: Tensor, act: str, gated: bool) -> Tensor:
        return ops.linear_e4m3(x, m.weight, out_scale, bias, act=act, gated=gated)

    def matmul(self, m: Any, x: Tensor, bias: Tensor | None, gate: str | None = None, residual: Tensor | None = None) -> Tensor:
        if gate is not None:
            return ops.dense_linear(x, m.weight, bias, act=gate, gated=True)
        if residual is not None:
            return ops.skinny_linear(x, m.weight, bias, residual=residual)
        w, linear = m.weight, invariant.invariant_linear if m.invariant else ops.linear
        if w.dtype == x.dtype:
            return linear(x, w, bias)
        return linear(x.to(w.dtype), w, None if bias is None else bias.to(w.dtype)).to(x.dtype)

    def experts(self, w13: Any, w2: Any, x: Tensor, ids: Tensor, weights: Tensor, act: str, **extras: Any) -> Tensor:
        dtype = w13.weight.dtype
        return ops.moe_experts(x.to(dtype), w13.weight, w2.weight, ids, weights, act, **biases_as(dtype, extras)).to(x.dtype)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k * (4 if self.dtype is torch.float32 else 2)


def biases_as(dtype: torch.dtype, extras: dict[str, Any]) -> dict[str, Any]:
    """The extras of `experts` with their tensors in the dtype of the products."""
    return {name: value.to(dtype) if isinstance(value, Tensor) else value for name, value in extras.items()}


def resolve(names: Sequence[str], quant: QuantPlan) -> Format:
    """The one Format of a GEMM whose checkpoint parts are `names`; parts that resolve differently are an error that names them."""
    found = {n: next((f for pattern, f in quant if fnmatchcase(n, pattern)), None) or Dense() for n in names}
    if len(set(found.values())) > 1:
        lines = ", ".join(f"{n}: {f.name}" for n, f in found.items())
        raise ValueError(f"quant plan: the parts of one GEMM get different formats ({lines}); a fused GEMM has one format")
    return next(iter(found.values()))
