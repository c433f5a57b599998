"""Which ops of a step run as one kernel: the rules of the layers, asked for one body without tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pyllm.layers.attention import Attn
from pyllm.layers.decoder import Sub
from pyllm.layers.formats import Format, resolve
from pyllm.layers.mlp import MLP
from pyllm.layers.norm import RMSNorm
from pyllm.layers.spec import Spec, nodes

if TYPE_CHECKING:
    from pyllm.plan.costs import Context


def _asked(linear: Any, ctx: Context, path: str) -> tuple[Format, tuple[int, int, int, torch.dtype, str]]:
    """A product's format, and what the format's rules want to know."""
    w, dtype = linear.weights()["weight"], torch.bfloat16 if ctx.item == 2 else torch.float32
    return resolve(linear.names(path), ctx.quant), (ctx.tokens, sum(w.sizes(ctx.tp, path)), w.local_cols(ctx.tp, path) or 0, dtype, "cuda")


def takes_e4m3(linear: Any, ctx: Context, path: str) -> bool:
    """The op that computes the product's input rounds it to e4m3."""
    return ctx.fuse and _asked(linear, ctx, path)[0].takes_e4m3


def gates(linear: Any, ctx: Context, path: str) -> bool:
    """The product's epilogue is the gated activation."""
    fmt, asked = _asked(linear, ctx, path)
    return ctx.fuse and fmt.gates(*asked)


def static(linear: Any, ctx: Context, path: str) -> bool:
    """The product's input is rounded with a scale that is given."""
    return _asked(linear, ctx, path)[0].static


def writes(linear: Any, then: Any, ctx: Context, path: str, gated: bool) -> bool:
    """The product's epilogue rounds to e4m3 with the scale that the next product has for its input."""
    fmt, asked = _asked(linear, ctx, path)
    return ctx.fuse and static(then, ctx, path) and fmt.writes(*asked, gated)


def norms(linear: Any, ctx: Context, path: str, gated: bool = False) -> bool:
    """The norm ahead (and the gate behind) is inside the product."""
    fmt, asked = _asked(linear, ctx, path)
    return ctx.fuse and ctx.streamed and fmt.norms(*asked, gated)


def adds(linear: Any, ctx: Context, path: str) -> bool:
    """The product's epilogue adds to the residual stream."""
    fmt, asked = _asked(linear, ctx, path)
    return ctx.fuse and ctx.open and fmt.adds(*asked)


def _product(body: Spec, last: bool) -> Any:
    if not isinstance(body, (Attn, MLP)) or not (last or type(body) in (Attn, MLP)):
        return None
    first, final = ("qkv", "o") if isinstance(body, Attn) else ("up", "down")
    return dict(nodes(body))[final if last else first]


def normed_e4m3(body: Spec, ctx: Context, path: str) -> bool:
    """The norm ahead of a body gives its first product e4m3 rows."""
    product = _product(body, False)
    return ctx.normed and product is not None and takes_e4m3(product, ctx, path)


def norm_inside(sub: Sub, ctx: Context, path: str) -> bool:
    """The norm ahead of a body has no op of its own."""
    product = _product(sub.body, False)
    gated = isinstance(sub.body, MLP) and sub.body.gated
    return product is not None and isinstance(sub.pre, RMSNorm) and norms(product, ctx, path, gated)


def added_inside(sub: Sub, ctx: Context, path: str) -> bool:
    """A body gives the residual stream itself, not what is to be added to it."""
    product = _product(sub.body, True)
    return product is not None and adds(product, ctx, path)
