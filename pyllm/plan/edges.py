"""The rows of explain for the join between two steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyllm.layers.decoder import Sub
from pyllm.layers.norm import LayerNorm
from pyllm.plan.costs import Context, Row


def edge_rows(ctx: Context, d: int, prev: Sub | None, pre: Any, at: str, fp8: bool = False) -> Iterator[Row]:
    """The join between two steps; the same rule as `Decoder.forward`. prev=None: nothing is left to add. fp8: the norm gives e4m3 rows."""
    one = ctx.tokens * d * ctx.item
    if prev and ctx.tp > 1 and prev.body.partial:
        yield ctx.row(at, "sum over ranks", "all_reduce", 2 * one * (ctx.tp - 1) / ctx.tp)
    if prev and prev.post:
        yield ctx.row(at, "post_norm", _norm_op(prev.post), 2 * one + 4 * d)
    if prev and prev.scale != 1.0:
        yield ctx.row(at, f"scale {prev.scale:g}", "mul", 2 * one)
    norms = pre if isinstance(pre, tuple) else (pre,)
    if prev and not ctx.fuse and norms[0] is not None:
        yield ctx.row(at, "add", "add", 3 * one)
    for i, norm in enumerate(norms):
        if norm is None:
            if prev:
                yield ctx.row(at, "add", "add", 3 * one)
        else:
            added = prev and i == 0 and ctx.fuse
            what = ("add+norm" if added else "norm") + (" to fp8" if fp8 else "")
            written = ctx.tokens * (d + 4) if fp8 else one
            yield ctx.row(at, what, _norm_op(norm), (3 if added else 1) * one + written + 4 * d)


def _norm_op(norm: Any) -> str:
    return "layer_norm" if isinstance(norm, LayerNorm) else "rms_norm"
