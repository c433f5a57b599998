"""Inputs of qk_norm_rope_append with every unused value poisoned, its formula in fp64, and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pyllm.ops.rope import qk_norm_rope_append
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import FP8, normal, padded_rows, poisoned

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3_STEP = 2.0**-9  # distance of e4m3 subnormals


@dataclass(frozen=True)
class Shape:
    T: int = 5
    H: int = 4
    K: int = 2
    D: int = 64
    R: int | None = 64  # None: no rotation
    interleaved: bool = False
    norm: str = "qk"  # which of Q and K are normed
    dtype: torch.dtype = BF16
    weight_dtype: torch.dtype | None = None  # None: fp32
    fp8: bool = False
    int8: bool = False
    scales: str = ""  # "": None, "1": one scale, "K": one per head
    P: int = 16
    skip: float = 0.2  # share of the tokens without a slot

    def __str__(self) -> str:
        rope = "nope" if self.R is None else f"R{self.R}{'i' if self.interleaved else ''}"
        cache = f"fp8{self.scales}" if self.fp8 else f"int8{self.scales}" if self.int8 else "same"
        return f"T{self.T}-{self.H}+{self.K}x{self.D}-{rope}-n{self.norm}-{str(self.dtype)[6:]}-{cache}-P{self.P}"


@dataclass
class Inputs:
    """The tensors of one call; `args` are the keyword arguments of the op."""

    shape: Shape
    qkv: torch.Tensor
    args: dict[str, torch.Tensor | float | bool | None] = field(default_factory=dict)

    def run(self) -> torch.Tensor:
        return qk_norm_rope_append(self.qkv, self.shape.H, self.shape.K, **self.args)  # type: ignore[arg-type]

    def get(self, name: str) -> torch.Tensor | None:
        x = self.args.get(name)
        return x if isinstance(x, torch.Tensor) else None


def caches_of(s: Shape, device: str, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisoned K and V caches of different page strides (a layer's slice of one pool, a gap behind each page)."""
    dtype = FP8 if s.fp8 else torch.int8 if s.int8 else s.dtype
    size = s.P * s.K * s.D
    pool = poisoned(pages, 2 * size, dtype=dtype, device=device)
    other = poisoned(pages, size + 16, dtype=dtype, device=device)
    return pool[:, size:].view(pages, s.P, s.K, s.D), other[:, :size].view(pages, s.P, s.K, s.D)


def make(s: Shape, device: str = "cpu") -> Inputs:
    """Random inputs; rows of qkv are padded with NaN, lines of cos_sin that no token uses are NaN, caches start as NaN."""
    values = normal(s.T, (s.H + 2 * s.K) * s.D, dtype=s.dtype, device=device, scale=2)
    qkv, _ = padded_rows(values, gap=16)
    inputs = Inputs(s, qkv)
    a = inputs.args
    a.update(interleaved=s.interleaved, eps=1e-5)
    if s.R is not None:
        L = 2 * s.T + 5
        rows = torch.randperm(L)[: s.T].to(torch.int32).to(device)
        angle = torch.rand(L, s.R // 2) * 6.3
        table = torch.full((L, s.R), float("nan"))
        used = rows.long().cpu()
        table[used] = torch.cat((angle.cos(), angle.sin()), 1)[used] * 1.1  # 1.1: an attention factor folded in
        a.update(cos_sin=table.to(device), rows=rows)
    for name in "qk" if s.K else "q":
        if name in s.norm:
            a[f"{name}_weight"] = (torch.randn(s.D) * 0.5 + 1).to(s.weight_dtype or FP32).to(device)
    if s.K:
        pages = s.T // s.P + 3
        slots = torch.randperm(pages * s.P)[: s.T].to(torch.int32)
        slots[torch.rand(s.T) < s.skip] = -1
        k_cache, v_cache = caches_of(s, device, pages)
        a.update(k_cache=k_cache, v_cache=v_cache, slots=slots.to(device))
        if s.scales:
            n = 1 if s.scales == "1" else s.K
            size = 0.07 if s.int8 else 0.01  # values are about 2, 8 at most: a few saturate
            a.update({f"{name}_scale": ((torch.rand(n) + 0.5) * size).to(device) for name in "kv"})
    return inputs


def formula(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K, V of every token in fp64; the rotation as a product of complex numbers."""
    s = inputs.shape
    x = (
        inputs.qkv.double().cpu().view(s.T, s.H + 2 * s.K, s.D)
        if inputs.qkv.is_contiguous()
        else inputs.qkv.double().cpu().unflatten(1, (-1, s.D))
    )
    q, k, v = x.split([s.H, s.K, s.K], 1)

    def turn(y: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * weight.double().cpu()
        cos_sin, rows = inputs.get("cos_sin"), inputs.get("rows")
        if cos_sin is None or rows is None:
            return y
        R = cos_sin.shape[1]
        i = torch.arange(R // 2)
        first, second = (2 * i, 2 * i + 1) if s.interleaved else (i, i + R // 2)
        line = cos_sin.double().cpu()[rows.long().cpu()]
        turned = torch.complex(y[..., first], y[..., second]) * torch.complex(line[:, : R // 2], line[:, R // 2 :])[:, None]
        y = y.clone()
        y[..., first], y[..., second] = turned.real, turned.imag
        return y

    return turn(q, inputs.get("q_weight")), turn(k, inputs.get("k_weight")), v


def inner_error(want: torch.Tensor) -> torch.Tensor:
    """fp32 errors per head: the sum of D squares and rsqrt D + 4 roundings (relative, common to the head), weight and rotation 6 more of
    values no larger than sqrt(2) times the largest of the head."""
    D = want.shape[-1]
    return want.abs().amax(-1, keepdim=True) * (D + 16) * 1.5 * EPS[FP32] if want.numel() else want


def check(inputs: Inputs, q: torch.Tensor) -> None:
    """q, the written slots and the untouched rest of the caches."""
    s = inputs.shape
    want_q, want_k, want_v = formula(inputs)
    assert q.shape == (s.T, s.H, s.D) and q.dtype == s.dtype and q.is_contiguous()
    u, tiny = EPS[s.dtype], torch.finfo(s.dtype).smallest_normal * EPS[s.dtype]
    assert_close(q, want_q, rtol=u, atol=inner_error(want_q) + tiny, what=f"q of {s}")
    slots = inputs.get("slots")
    if slots is None:
        return
    token = (slots >= 0).nonzero()[:, 0].cpu()
    at = slots.cpu()[token].long()
    for name, want in (("k", want_k[token]), ("v", want_v[token])):
        cache = inputs.get(f"{name}_cache")
        assert cache is not None
        flat = cache.cpu().contiguous().view(-1, s.K, s.D)
        got = flat[at]
        if s.fp8 or s.int8:
            scale = inputs.get(f"{name}_scale")
            scale = torch.ones(1) if scale is None else scale.cpu()
            scale = scale.double()[:, None]
            # One rounding of value / scale, itself off by two fp32 roundings: to an integer, or to e4m3 (2^-4 relative, half a subnormal
            # step). The fp32 error of the clamped values is that of the largest value before.
            most, relative, step = (127, 0.0, 0.5) if s.int8 else (448, 2.0**-4, E4M3_STEP / 2)
            exact = want / scale
            bound = inner_error(exact) + step
            assert_close(got.float(), exact.clamp(-most, most), rtol=relative + 1e-6, atol=bound, what=f"{name} cache of {s}")
        elif name == "v":
            assert_same(got, want.to(s.dtype), f"v cache of {s}")
        else:
            assert_close(got, want, rtol=u, atol=inner_error(want) + tiny, what=f"k cache of {s}")
        rest = torch.ones(flat.shape[0], dtype=torch.bool)
        rest[at] = False
        assert_same(flat[rest], poisoned(*flat[rest].shape, dtype=flat.dtype), f"{name} cache where nothing is stored, {s}")
