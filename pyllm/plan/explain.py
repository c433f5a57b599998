"""explain: what one step will run, from the declaration alone. No tensor, no GPU, no weights.

Every row is one op: the parts it serves, its kernel, the bytes it must move and the FLOPs it must do, and the floor time that follows
on a GPU.
A layer of your own shows its Linears and one row for the rest; register more with `@pyllm.plan.costs.rows.register(YourLayer)`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import torch

from pyllm.layers.attention import Attn
from pyllm.layers.bind import DTYPES
from pyllm.layers.decoder import Decoder
from pyllm.layers.formats import Format, QuantPlan, resolve
from pyllm.layers.linear import Embedding, Linear, check_plan
from pyllm.layers.mlp import MLP
from pyllm.layers.norm import RMSNorm
from pyllm.layers.recognise import not_served, rows_ahead
from pyllm.layers.spec import Spec, join, need_sizes, walk
from pyllm.layers.typed import typed_call
from pyllm.plan.costs import GPUS, Context, Row, linear_rows, product, rows
from pyllm.plan.edges import edge_rows
from pyllm.plan.fusions import added_inside, norm_inside, normed_e4m3, norms


@dataclass(frozen=True)
class Explanation:
    """`str()` is the table for people, `json()` the same for programs."""

    rows: tuple[Row, ...]
    weight_bytes: int
    kv_bytes_per_token: int
    ctx: Context
    kernel_rows: int = 0  # decode steps of up to so many sequences are one kernel,
    not_one_kernel: str | None = None  # or why none is

    @property
    def totals(self) -> dict[str, float]:
        return {
            "bytes": sum(r.bytes for r in self.rows),
            "flops": sum(r.flops for r in self.rows),
            "floor_us": sum(r.floor_us or 0.0 for r in self.rows),
            "ops": len(self.rows),
            "weight_bytes": self.weight_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
        }

    def json(self) -> str:
        c = self.ctx
        asked = {"batch": c.batch, "context": c.context, "new": c.new, "tp": c.tp, "gpu": asdict(c.gpu)}
        data = {"workload": asked, "rows": [asdict(r) for r in self.rows], "totals": self.totals}
        step = {"rows": self.kernel_rows, "reason": self.not_one_kernel}
        return json.dumps(data | {"one_kernel": step}, indent=1)

    def __str__(self) -> str:
        c, t, out = self.ctx, self.totals, []
        rates = f"{c.gpu.read / 1e12:.2f} TB/s read, {c.gpu.bf16 / 1e12:.0f} TFLOP/s bf16 ({c.gpu.source})"
        out.append(f"{c.batch} x {c.new} new tokens, {c.context} keys each, tp={c.tp}; floors on {c.gpu.name}: {rates}")
        line = "  {:<32} {:<26} {:<7} {:<20} {:<27} {:>10} {:>9} {:>9}".format
        out.append(line("what", "shape", "format", "op", "kernel", "MB", "GFLOP", "floor us"))
        for names, block in _folded(self.rows):
            out.append(names)
            for r in block:
                floor = "-" if r.floor_us is None else f"{r.floor_us:.2f}"
                out.append(line(r.what, r.shape, r.format, r.op, r.kernel, f"{r.bytes / 1e6:.3f}", f"{r.flops / 1e9:.3f}", floor))
        out.append(f"total: {t['ops']} ops, {t['bytes'] / 1e9:.3f} GB, {t['flops'] / 1e9:.1f} GFLOP, floor {t['floor_us'] / 1e3:.3f} ms")
        out.append(f"weights {self.weight_bytes / 1e9:.3f} GB a rank, KV cache {self.kv_bytes_per_token} bytes a token")
        out.append(f"decode steps{self._few()}")
        return "\n".join(out) + "\n"

    def _few(self) -> str:
        rows = self.kernel_rows
        if rows:
            return f" of {'1 sequence' if rows == 1 else f'1 to {rows} sequences'}: one kernel, csrc/step/decode_step"
        return f": these ops; {'one kernel only if asked' if self.not_one_kernel is None else f'no one kernel: {self.not_one_kernel}'}"


def _folded(all_rows: tuple[Row, ...]) -> Iterator[tuple[str, list[Row]]]:
    """Consecutive layers (rows with one `at`) that read alike are shown once: "model.layers.1 .. 31 (31 alike)"."""
    groups = [(at, list(g)) for at, g in groupby(all_rows, key=lambda r: r.at)]

    def key(g: tuple[str, list[Row]]) -> list[tuple[Any, ...]]:
        return [(*asdict(r).values(),)[2:] + (r.what.split("[")[0],) for r in g[1]]

    for _, alike in groupby(groups, key=key):
        same = list(alike)
        yield (same[0][0] if len(same) == 1 else f"{same[0][0]} .. {same[-1][0].rsplit('.', 1)[-1]} ({len(same)} alike)"), same[0][1]


@typed_call
def explain(
    spec: Decoder,
    *,
    tp: int = 1,
    quant: QuantPlan = (),
    batch: int = 1,
    context: int = 1024,
    new: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    gpu: str = "h200",
    fuse: bool = True,
) -> Explanation:
    """What one step of `batch` sequences runs on one of `tp` ranks; each sequence adds `new` tokens and then has `context` keys.

    fuse=False: the ops that `bind(fuse=False)` runs. Errors (ValueError): sizes that `tp` does not fit (names the part), context < new,
    an unknown gpu, a quant plan that splits a GEMM.
    """
    if gpu not in GPUS:
        raise ValueError(f"explain: gpu is {gpu!r}, expected one of {', '.join(GPUS)}")
    need_sizes("explain", batch=batch, new=new, tp=tp, context=context)
    if dtype not in DTYPES:
        raise ValueError(f"explain: dtype is {dtype!r}, expected torch.bfloat16, torch.float16 or torch.float32")
    check_plan("explain", spec, quant)
    if context < new:
        raise ValueError(f"explain: context is {context}, expected at least new={new}")
    ctx = Context(batch, context, new, tp, quant, fuse, dtype.itemsize, (kv_dtype or dtype).itemsize, GPUS[gpu])
    d, out, prev = spec.embed.d, [], None
    out.append(ctx.row("embed", "embedding", "embed_tokens", 2 * ctx.tokens * d * ctx.item, 0, f"{spec.vocab_size}x{d}"))
    if ctx.tp > 1:
        out.append(ctx.row("embed", "sum over ranks", "all_reduce", 2 * ctx.tokens * d * ctx.item * (tp - 1) / tp))
    if spec.positions:
        out += _position_rows(spec.positions, ctx)
    for sub in spec.subs:
        path, here = join(sub.at, getattr(sub.body, "at", "")), ctx
        if isinstance(sub.body, (Attn, MLP)):
            hands = type(sub.body) in (Attn, MLP)  # its norm to its first product
            streamed, into = isinstance(sub.pre, RMSNorm) and prev is None, tp == 1 and not sub.post and sub.scale == 1.0
            here = replace(ctx, normed=hands and sub.pre is not None, streamed=hands and streamed, open=into)
        if not norm_inside(sub, here, path):
            out += edge_rows(ctx, d, prev, sub.pre, sub.at, normed_e4m3(sub.body, here, path))
        out += [_moved(r, sub.at) for r in rows(sub.body, here, path)]
        prev = None if added_inside(sub, here, path) else sub
    last = replace(ctx, new=1, streamed=isinstance(spec.norm, RMSNorm) and prev is None)
    if not (spec.head and norms(spec.head, last, "")):
        out += edge_rows(ctx, d, prev, spec.norm, "head")
    out += _head_rows(spec, last)
    weights = sum(_stored(s, p, ctx) for p, s in walk(spec))
    kv = sum(2 * max(s.kv_heads // tp, 1) * s.head_dim * ctx.kv_item for s in spec.kv_slots().values())
    return Explanation(tuple(out), weights, kv, ctx, *_one_kernel(spec, ctx, dtype, kv_dtype or dtype))


def _one_kernel(spec: Decoder, ctx: Context, dtype: torch.dtype, kv_dtype: torch.dtype) -> tuple[int, str | None]:
    def formats(path: str, linear: Linear) -> Format:
        return resolve(linear.names(path), ctx.quant)

    reason = not_served(spec, formats, dtype=dtype, kv_dtype=kv_dtype, tp=ctx.tp) if ctx.fuse else "fuse is False"
    return (0, reason) if reason else (rows_ahead(spec, formats), None)


def _position_rows(table: Embedding, ctx: Context) -> Iterator[Row]:
    one = ctx.tokens * table.d * ctx.item
    yield ctx.row("embed", "positions", "embed_tokens", 2 * one, 0, f"{table.vocab}x{table.d}")
    if ctx.tp > 1:
        yield ctx.row("embed", "sum over ranks", "all_reduce", 2 * one * (ctx.tp - 1) / ctx.tp)
    yield ctx.row("embed", "add", "add", 3 * one)


def _moved(row: Row, at: str) -> Row:
    return replace(row, at=at)


def _head_rows(spec: Decoder, ctx: Context) -> Iterator[Row]:
    """The head sees one row per sequence."""
    tied = Linear(spec.embed.d, (spec.embed.weights()["weight"].parts[0],), "col")
    # a tied head multiplies by the embedding itself, which no quant plan changes
    if spec.head:
        yield from (_moved(r, "head") for r in linear_rows(spec.head, ctx, "", norm=norms(spec.head, ctx, "")))
    else:
        yield from (_moved(r, "head") for r in rows(tied, replace(ctx, quant=()), ""))
    if spec.logit_scale != 1.0:
        yield ctx.row("head", f"scale {spec.logit_scale:g}", "mul", 2 * ctx.batch * spec.vocab_size * ctx.item)
    if spec.logit_softcap:
        yield ctx.row("head", f"softcap {spec.logit_softcap:g}", "softcap", 2 * ctx.batch * spec.vocab_size * ctx.item)
    yield ctx.row("head", "choose the token", "sample_tokens", ctx.batch * spec.vocab_size * ctx.item)


def _stored(spec: Spec, path: str, ctx: Context) -> int:
    """Bytes of a node's own tensors on one rank."""
    total = 0
    for name, w in spec.weights().items():
        shape = w.local_shape(ctx.tp, path)
        if isinstance(spec, Linear) and name == "weight":
            total += (shape[0] if w.experts else 1) * ctx.weight_bytes(resolve(spec.names(path), ctx.quant), *shape[-2:])
        else:
            total += product(shape) * (4 if w.fp32 else ctx.item)
    return total
