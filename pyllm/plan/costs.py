"""The rows of explain: per layer class, the ops it runs, the bytes they must move and the FLOPs they must do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import singledispatch
from typing import Any

import torch

from pyllm.layers.attention import Attn
from pyllm.layers.decoder import Sum
from pyllm.layers.formats import Dense, Format, QuantPlan, resolve
from pyllm.layers.linear import Linear
from pyllm.layers.mla import MLA
from pyllm.layers.mlp import MLP
from pyllm.layers.moe import MoE
from pyllm.layers.norm import LayerNorm, RMSNorm
from pyllm.layers.spec import Spec, nodes, path_of
from pyllm.ops.attention import attention_kernel
from pyllm.ops.gemm import dense_wins, streams
from pyllm.ops.norm import GROUP
from pyllm.ops.registry import OPS
from pyllm.plan import fusions
from pyllm.plan.gpus import GPUS, Gpu


@dataclass(frozen=True)
class Row:
    """One op of one step. bytes: read + written by one rank; floor_us: max of bytes and FLOPs over the GPU's rates; None for
    communication."""

    at: str
    what: str
    shape: str
    format: str
    op: str
    kernel: str
    bytes: int
    flops: int
    floor_us: float | None = None


@dataclass(frozen=True)
class Context:
    """What is asked: B sequences that add `new` tokens each and then have `context` keys each, on one of `tp` ranks."""

    batch: int = 1
    context: int = 1024
    new: int = 1
    tp: int = 1
    quant: QuantPlan = ()
    fuse: bool = True
    item: int = 2  # bytes of an activation
    kv_item: int = 2
    gpu: Gpu = field(default_factory=lambda: GPUS["h200"])
    normed: bool = False  # the body at hand reads the residual through one norm
    streamed: bool = False  # and the residual is complete before it
    open: bool = False  # its result goes into the residual as it is

    @property
    def tokens(self) -> int:
        return self.batch * self.new

    def weight_bytes(self, fmt: Format, n: int, k: int) -> int:
        """The plain format stores the model's own dtype, which only the question knows."""
        return n * k * self.item if fmt == Dense() else fmt.weight_bytes(n, k)

    def row(self, at: str, what: str, op: str, bytes: float, flops: float = 0, shape: str = "", fmt: str = "") -> Row:
        info = OPS.get(op)
        if info is None:
            kernel = "NCCL" if op == "all_reduce" else "torch"
        else:
            kernel = info.kernel or ("torch composition" if info.composition else f"csrc/{info.stem}")
        rate = self.gpu.fp32 if fmt == "fp32" or (not fmt and self.item == 4) else self.gpu.bf16
        floor = None if op == "all_reduce" else max(bytes / self.gpu.read, flops / rate) * 1e6
        return Row(at, what, shape, fmt, op, kernel, int(bytes), int(flops), floor)


@singledispatch
def rows(spec: Spec, ctx: Context, path: str) -> Iterator[Row]:
    """Rows of a body whose class nobody registered: its children's, and one for its own forward."""
    for _, child in nodes(spec):
        yield from rows(child, ctx, path_of(child, path))
    own = sum(product(w.local_shape(ctx.tp, path)) for w in spec.weights().values())
    yield ctx.row(path, type(spec).__name__, "forward()", own * ctx.item)


@rows.register
def _(spec: Linear, ctx: Context, path: str) -> Iterator[Row]:
    yield from linear_rows(spec, ctx, path)


def linear_rows(
    spec: Any, ctx: Context, path: str, given: bool = False, norm: bool = False, act: str = "", gated: bool = True, to: str = ""
) -> Iterator[Row]:
    """given: the op that computed the input has already rounded it to what the format multiplies. norm, act: inside the product, the latter
    with a gate or alone. to: the product gives "e4m3"."""
    w = spec.weights()["weight"]
    n, k = sum(w.sizes(ctx.tp, path)), w.local_cols(ctx.tp, path) or 0
    fmt = resolve(spec.names(path), ctx.quant)
    what = "+".join(dict.fromkeys(p.name for p in spec.parts))
    item = ctx.item
    if fmt.quantizes:
        item = 1
    if fmt.quantizes and not given:
        scales = 4 if fmt.takes_e4m3 else 4 * -(-k // GROUP)
        yield ctx.row(path, f"{what} input", fmt.quantizes, ctx.tokens * (k * (ctx.item + item) + scales), 0, f"{k}", _label(fmt))
    moved = ctx.weight_bytes(fmt, n, k) + ctx.tokens * (n * ctx.item + k * item)
    tags = f"{n}x{k}" + (f" {spec.tp}" if spec.tp and ctx.tp > 1 else "") + (" +bias" if spec.bias else "")
    row = ctx.row(path, what, fmt.op, moved, 2 * ctx.tokens * n * k, tags, _label(fmt))
    skinny = fmt.op == "linear" and ctx.item == 2 and k % 8 == 0 and streams(ctx.tokens, n, k)
    dense = fmt.op == "linear" and ctx.item == 2 and k % 8 == 0 and n % 8 == 0 and dense_wins(ctx.tokens, n, k)
    row = replace(row, kernel=f"csrc/gemm/{'skinny' if skinny else 'dense'}_linear") if skinny or dense else row
    if to:
        columns = n // 2 if gated else n
        named = f"{what}, {act} * up to fp8" if gated else f"{what}, {act} to fp8"
        moved = row.bytes - ctx.tokens * (n * ctx.item - columns)
        row = replace(row, what=named, op="linear_e4m3", kernel="csrc/gemm/dense_e4m3", bytes=moved)
    elif act:
        own = {"linear_fp8": ("linear_fp8_gated", "csrc/gemm/dense_fp8")}.get(fmt.op, ("dense_linear", "csrc/gemm/dense_linear"))
        row = replace(row, what=f"{what}, {act} * up", op=own[0], kernel=own[1], bytes=row.bytes - ctx.tokens * n // 2 * ctx.item)
    if norm:
        row = replace(row, what=f"norm, {row.what}", op="norm_linear", kernel="csrc/gemm/skinny_linear")
    if fusions.adds(spec, ctx, path):
        row = replace(row, what=f"{row.what}+add", kernel="csrc/gemm/skinny_linear", op="skinny_linear")
    yield row


@rows.register
def _(spec: Attn, ctx: Context, path: str) -> Iterator[Row]:
    heads, kv = spec.heads // ctx.tp, max(spec.kv_heads // ctx.tp, 1)
    inner = dict(nodes(spec))
    first = replace(ctx, open=False)
    yield from linear_rows(inner["qkv"], first, path, fusions.normed_e4m3(spec, ctx, path), fusions.norms(inner["qkv"], ctx, path))
    yield from _project_rows(spec, ctx, path, heads, kv if spec.own_kv else 0)
    yield _attend_row(spec, ctx, path, heads, kv)
    yield from rows(inner["o"], ctx, path)


@rows.register
def _(spec: MLA, ctx: Context, path: str) -> Iterator[Row]:
    inner, heads = dict(nodes(spec)), spec.heads // ctx.tp
    out = inner.pop("o")
    for child in inner.values():
        if isinstance(child, RMSNorm):
            yield ctx.row(path, child.name, "rms_norm", 2 * ctx.tokens * child.d * ctx.item + 4 * child.d, 0, f"{child.d}")
        else:
            yield from rows(child, replace(ctx, open=False), path)
    yield ctx.row(path, "as heads", "copy", 6 * ctx.tokens * heads * spec.head_dim * ctx.item, 0, f"3x{heads}x{spec.head_dim}")
    yield from _project_rows(spec, ctx, path, heads, heads)
    yield _attend_row(spec, ctx, path, heads, heads)
    yield from rows(out, ctx, path)


def _attend_row(spec: Attn, ctx: Context, path: str, heads: int, kv: int) -> Row:
    dim, tokens = spec.head_dim, ctx.tokens
    first = ctx.context - ctx.new
    keys = min(ctx.context, spec.window + ctx.new - 1) if spec.window else ctx.context
    seen = ctx.batch * sum(min(p + 1, spec.window or p + 1) for p in range(first, ctx.context))
    moved = ctx.batch * keys * 2 * kv * dim * ctx.kv_item + 2 * tokens * heads * dim * ctx.item
    dtype = torch.bfloat16 if ctx.item == 2 else torch.float32
    cache = torch.float8_e4m3fn if ctx.kv_item == 1 else dtype
    op = attention_kernel(dtype, cache, dim, 64, ctx.new, hopper=True)
    mask = f"window {spec.window}" if spec.window else "causal"
    if spec.variant:
        op, mask = "variant_attention", f"{mask} {spec.variant.name}"
    return ctx.row(
        path,
        f"kv[{spec.kv}]" + ("" if spec.own_kv else " read"),
        op,
        moved,
        4 * heads * dim * seen,
        f"{heads}/{kv}x{dim} {mask}",
    )


def _project_rows(spec: Attn, ctx: Context, path: str, heads: int, kv: int) -> Iterator[Row]:
    """What stands between the qkv GEMM and attention: one op, or its pieces."""
    dim, copy = spec.head_dim, 2 * ctx.tokens * spec.head_dim * ctx.item  # read and write one head
    stored = 2 * kv * ctx.tokens * dim * (ctx.item + ctx.kv_item)
    op, shape = "qk_norm_rope_append", f"{heads}+{kv}x{dim}"
    if spec.whole_norm:
        yield from _whole_norm_rows(ctx, path, dim, (("q", heads), ("k", kv)) if kv else (("q", heads),))
    elif isinstance(spec.qk_norm, LayerNorm):
        for name, n in (("q", heads), ("k", kv)) if kv else (("q", heads),):
            yield ctx.row(path, f"{name}_norm", "F.layer_norm", n * (copy + 4 * dim), 0, f"{n}x{dim}")
            yield ctx.row(path, f"{name}_norm in place", "copy", n * copy, 0, f"{n}x{dim}")
    if ctx.fuse:
        parts = ["qk_norm"] * spec.head_norm + ["rope"] * bool(spec.rope) + ["append"] * bool(kv)
        yield ctx.row(path, "+".join(parts) or "split", op, heads * copy + stored, 0, shape)
        return
    for name, n in (("q", heads), ("k", kv)):
        if n and spec.head_norm:
            yield ctx.row(path, f"{name}_norm", "rms_norm", n * copy + 4 * dim, 0, f"{n}x{dim}")
        if n:
            yield ctx.row(path, f"rope {name}" if spec.rope else f"split {name}", op, n * copy, 0, f"{n}x{dim}")
    if kv:
        yield ctx.row(path, "append", op, stored, 0, shape)


def _whole_norm_rows(ctx: Context, path: str, dim: int, parts: tuple[tuple[str, int], ...]) -> Iterator[Row]:
    """The norm of q and of k over all their heads: read and written, then put back in place; over ranks their means are summed between."""
    one = 2 * ctx.tokens * dim * ctx.item
    if ctx.tp == 1:
        for name, n in parts:
            yield ctx.row(path, f"{name}_norm", "rms_norm", n * (one + 4 * dim), 0, f"{n * dim}")
            yield ctx.row(path, f"{name}_norm in place", "copy", n * one, 0, f"{n * dim}")
        return
    for name, n in parts:
        yield ctx.row(path, f"{name} mean of squares", "mean", n * one / 2, 0, f"{n * dim}")
    yield ctx.row(path, "sum over ranks", "all_reduce", 2 * 4 * len(parts) * ctx.tokens * (ctx.tp - 1) / ctx.tp)
    for name, n in parts:
        yield ctx.row(path, f"{name}_norm", "mul", n * (one + 4 * dim), 0, f"{n * dim}")


@rows.register
def _(spec: MLP, ctx: Context, path: str) -> Iterator[Row]:
    inner, ff = dict(nodes(spec)), spec.ff // ctx.tp
    norm = fusions.norms(inner["up"], ctx, path, spec.gated)
    gate = spec.gated and (norm or fusions.gates(inner["up"], ctx, path))
    first = replace(ctx, open=False)
    if fusions.writes(inner["up"], inner["down"], ctx, path, spec.gated):
        ready = fusions.normed_e4m3(spec, ctx, path)
        yield from linear_rows(inner["up"], first, path, ready, act=spec.act, gated=spec.gated, to="e4m3")
        yield from linear_rows(inner["down"], ctx, path, True)
        return
    yield from linear_rows(inner["up"], first, path, fusions.normed_e4m3(spec, ctx, path), norm, spec.act if gate else "")
    if gate:
        yield from linear_rows(inner["down"], ctx, path)
        return
    fp8 = spec.gated and fusions.takes_e4m3(inner["down"], ctx, path)
    static = "_static" if fp8 and fusions.static(inner["down"], ctx, path) else ""
    op, read = (f"act_mul_fp8{static}" if fp8 else "act_mul", 2) if spec.gated else ("act", 1)
    written = ff + 4 if fp8 else ff * ctx.item
    yield ctx.row(path, spec.act + (" * up" if spec.gated else ""), op, ctx.tokens * (ff * read * ctx.item + written), 0, f"{ff}")
    yield from linear_rows(inner["down"], ctx, path, fp8)


@rows.register
def _(spec: MoE, ctx: Context, path: str) -> Iterator[Row]:
    inner = dict(nodes(spec))
    if spec.fp32_router:
        moved = spec.experts * spec.d * 4 + ctx.tokens * (spec.d * (ctx.item + 8) + spec.experts * 4)  # x is widened first
        yield ctx.row(path, spec.router, "F.linear", moved, 2 * ctx.tokens * spec.experts * spec.d, f"{spec.experts}x{spec.d}", "fp32")
    else:
        yield from rows(inner["gate"], ctx, path)
    yield ctx.row(
        path,
        f"top {spec.top_k} of {spec.experts}, {spec.scoring}" + (", {1} of {0} groups".format(*spec.groups) if spec.groups else ""),
        "route_experts",
        ctx.tokens * (spec.experts * ctx.item + 8 * spec.top_k),
    )
    w13, w2 = inner["w13"], inner["w2"]
    assert isinstance(w13, Linear) and isinstance(w2, Linear)
    fmt = resolve(w13.names(path) + w2.names(path), ctx.quant)
    ff, pairs = spec.ff // ctx.tp, ctx.tokens * spec.top_k
    touched = min(spec.experts, pairs)
    moved = touched * (ctx.weight_bytes(fmt, 2 * ff, spec.d) + ctx.weight_bytes(fmt, spec.d, ff)) + 2 * ctx.tokens * spec.d * ctx.item
    yield ctx.row(path, "experts", fmt.experts_op, moved, 6 * pairs * ff * spec.d, f"{spec.experts}x(3x{ff}x{spec.d})", _label(fmt))
    if spec.shared:
        yield from rows(spec.shared, ctx, path_of(spec.shared, path))
    if spec.shared_gate:
        yield from rows(inner["shared_gate_proj"], ctx, path)


@rows.register
def _(spec: Sum, ctx: Context, path: str) -> Iterator[Row]:
    for branch in spec.branches:  # all read the one normed tensor
        yield from rows(branch, replace(ctx, normed=False, streamed=False, open=False), path_of(branch, path))


def product(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


def _label(fmt: Format) -> str:
    return "" if fmt == Dense() else fmt.name
