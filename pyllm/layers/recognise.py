"""Which declarations have their decode steps of few rows in one kernel, `ops.decode_step`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch

from pyllm.layers.attention import Attn
from pyllm.layers.decoder import Decoder
from pyllm.layers.formats import Dense, Format
from pyllm.layers.fp8 import Fp8
from pyllm.layers.linear import Linear
from pyllm.layers.mlp import MLP
from pyllm.layers.norm import RMSNorm
from pyllm.layers.spec import Spec, walk
from pyllm.ops.step_checks import most_rows, size_problem

Formats = Callable[[str, Linear], Format]
"""The format of the Linear at a path."""
AHEAD = {Dense: ((3072, 2), (4096, 1)), Fp8: ((4096, 1),)}
"""Rows of a step up to which one kernel is taken unasked, by the weights' format and the model's width at most. One H200, 1,000 keys a row,
one kernel and kernel by kernel, ms. In one run (the records): bf16, Llama 3.2 1B (2048 wide) 0.712 and 0.791, 2 rows 0.759 and 0.868, 4
rows 0.939 and 0.924; 3.1 8B (4096) 3.679 and 3.794, 2 rows 4.069 and 4.072; e4m3, 8B 2.244 and 2.372, 2 rows 2.660 and 2.582, 1B 0.630
both. 3B (3072) in bf16 in different runs, the chain with some 0.01 of sampling: 1.780 and 2.052, 2 rows 2.002 and 2.127."""
CACHES = (torch.bfloat16, torch.float8_e4m3fn)
_ATTN = {"own_kv": True, "whole_norm": False, "window": None, "softcap": None, "sinks": False, "o_bias": False, "variant": None}
_ALIKE = ("heads", "kv_heads", "head_dim", "rope", "qkv_bias", "qk_norm", "softmax_scale")
_DECODER = {"positions": None, "embed_scale": 1.0, "logit_scale": 1.0, "logit_softcap": None}


def not_served(spec: Spec, formats: Formats, *, dtype: torch.dtype, kv_dtype: torch.dtype, tp: int = 1) -> str | None:
    """Why no decode step of this declaration is one kernel; None where it is. The structure decides, whatever the model is called."""
    if dtype != torch.bfloat16 or kv_dtype not in CACHES:
        return f"the model is {_short(dtype)} with a cache of {_short(kv_dtype)}, expected bfloat16 with bfloat16 or float8_e4m3fn"
    if tp != 1:
        return f"tp is {tp}, expected 1"
    return next(_problems(spec, formats), None)


def rows_served(spec: Decoder) -> int:
    """Sequences of a step at most, of a declaration that is served."""
    attn, mlp = spec.subs[0].body, spec.subs[1].body
    assert isinstance(attn, Attn) and isinstance(mlp, MLP)
    return most_rows(spec.embed.d, mlp.ff, attn.heads, attn.kv_heads, attn.head_dim)


def rows_ahead(spec: Decoder, formats: Formats) -> int:
    """Sequences of a step up to which one kernel is measured faster, of a declaration that is served."""
    path, linear = next((path, s) for path, s in walk(spec) if isinstance(s, Linear) and s is not spec.head)
    ahead = next((rows for width, rows in AHEAD[type(formats(path, linear))] if spec.embed.d <= width), 0)
    return min(ahead, rows_served(spec))


def _problems(spec: Spec, formats: Formats) -> Iterator[str]:
    if type(spec) is not Decoder:
        yield f"the model is a {type(spec).__name__}, expected a Decoder"
        return
    yield from _differs("decoder", spec, _DECODER)
    bodies = [sub.body for sub in spec.subs]
    wanted = [Attn, MLP] * max(len(bodies) // 2, 1)
    for i, kind in enumerate(wanted):
        if i >= len(bodies) or type(bodies[i]) is not kind:
            got = f"a {type(bodies[i]).__name__} at {spec.subs[i].at}" if i < len(bodies) else "nothing"
            yield f"step {i} is {got}, expected Attn and MLP in turn"
            return
    if len(bodies) % 2:
        yield f"there are {len(bodies)} steps, expected an even number"
        return
    yield from _layers(spec)
    yield from _formats(spec, formats)
    attn, mlp = bodies[0], bodies[1]
    assert isinstance(attn, Attn) and isinstance(mlp, MLP)
    sizes = (spec.embed.d, mlp.ff, spec.vocab_size, attn.heads, attn.kv_heads, attn.head_dim, len(bodies) // 2)
    problem = size_problem(*sizes)
    if problem:
        yield " ".join(problem)


def _layers(spec: Decoder) -> Iterator[str]:
    """Every layer is one that the kernel knows, and like the first."""
    attn, mlp = spec.subs[0].body, spec.subs[1].body
    norms: list[tuple[str, Any]] = [("norm", spec.norm)]
    for sub in spec.subs:
        body, at = sub.body, ".".join(s for s in (sub.at, getattr(sub.body, "at", "")) if s)
        yield from _differs(sub.at, sub, {"post": None, "scale": 1.0})
        norms.append((sub.at, sub.pre))
        if isinstance(body, Attn):
            yield from _differs(at, body, _ATTN)
            if body.rope is None or body.rope.interleaved:
                yield f"{at}: rope is {'interleaved' if body.rope else None}, expected one that pairs halves"
            other = next((name for name in _ALIKE if getattr(body, name) != getattr(attn, name)), None)
            if other:
                yield f"{at}: {other} is {_text(getattr(body, other))}, expected that of {spec.subs[0].at}"
            norms += [(at, body.qk_norm)] if body.qk_norm else []
        else:
            yield from _differs(at, body, {"gated": True, "bias": False, "act": getattr(mlp, "act", None), "ff": getattr(mlp, "ff", None)})
    eps = getattr(spec.norm, "eps", None)
    for at, norm in norms:
        if type(norm) is not RMSNorm or norm.eps != eps:
            yield f"{at}: a norm is {_text(norm)} with eps={getattr(norm, 'eps', None)}, expected an RMSNorm with eps={eps}"


def _formats(spec: Decoder, formats: Formats) -> Iterator[str]:
    """Weights of all layers in bf16, or all in e4m3; the head in bf16."""
    first: Format | None = None
    for path, linear in walk(spec):
        if not isinstance(linear, Linear):
            continue
        fmt = formats(path, linear)
        plain = fmt in (Dense(), Dense(torch.bfloat16))
        if linear is spec.head:
            if not plain or linear.bias or type(linear) is not Linear:
                yield f"the head is {fmt.name}{' with a bias' if linear.bias else ''}, expected bf16 without one"
            continue
        first = first or fmt
        if not (plain or fmt == Fp8()) or type(fmt) is not type(first):
            yield f"{path}: the weights are {fmt.name}, expected all layers in bf16, or all in fp8"


def _differs(at: str, spec: Any, wanted: dict[str, Any]) -> Iterator[str]:
    for name, want in wanted.items():
        got = getattr(spec, name)
        if got != want:
            yield f"{at}: {name} is {_text(got)}, expected {_text(want)}"


def _text(value: Any) -> str:
    return f"a {type(value).__name__}" if is_dataclass(value) else str(value)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
