"""Decode steps of few rows in one kernel: a bound model as `ops.decode_step` takes it, and a module that calls it for such steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyllm import _native
from pyllm.layers.bind import Bound
from pyllm.layers.linear import Linear
from pyllm.layers.recognise import Formats, not_served, rows_ahead, rows_served
from pyllm.ops.step import StepModel, decode_step, step_workspace
from pyllm.runtime.batch import Batch


def bound_not_served(module: Any, kv_dtype: torch.dtype) -> str | None:
    """Why no decode step of a bound model over a cache of this dtype is one kernel; None where it is."""
    if not isinstance(module, Bound):
        return f"the model is a {type(module).__name__}, expected a bound Decoder"
    if not module.fuse:
        return f"the model is bound with {'invariant=True' if module.invariant else 'fuse=False'}"
    nodes = [m for m in module.modules() if isinstance(m, Bound)]
    hooked = next((m for m in nodes if m._forward_hooks or m._forward_pre_hooks), None)
    if hooked is not None:
        return f"{hooked.path or 'the model'} has forward hooks, which one kernel would not call"
    embed: Any = getattr(module, "embed", None)
    dtype = torch.bfloat16 if embed is None else embed.weight.dtype
    return not_served(module.spec, bound_formats(module), dtype=dtype, kv_dtype=kv_dtype, tp=module.tp)


def bound_formats(module: Bound) -> Formats:
    """Of a bound model: what its quant plan has chosen."""
    found: dict[tuple[str, ...], Any] = {}
    for m in module.modules():
        if isinstance(m, Bound) and isinstance(m.spec, Linear):
            found[tuple(m.spec.names(m.path))] = m.format
    return lambda path, linear: found[tuple(linear.names(path))]


def serves_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and _native.kernels_available() and torch.cuda.get_device_capability(device) == (9, 0)


def in_one_kernel(module: Any, asked: bool | None, kv_dtype: torch.dtype) -> Any:
    """The module with its decode steps of few rows in one kernel. asked: None: where that is measured faster; True: wherever it is served,
    on a CPU by the op's reference, and a ValueError where it is not; False: never."""
    if asked not in (None, True, False):
        raise ValueError(f"one_kernel is {asked!r}, expected None, True or False")
    if asked is False:
        return module
    reason = bound_not_served(module, kv_dtype)
    if asked and reason:
        raise ValueError(f"one_kernel is True, but {reason}")
    if reason:
        return module
    ahead = rows_ahead(module.spec, bound_formats(module)) if serves_gpu(module.embed.weight.device) else 0
    rows = rows_served(module.spec) if asked else ahead
    return OneKernel(module, rows) if rows else module


def step_model(module: Any) -> StepModel:
    """The bound model's tensors and sizes, as `decode_step` takes them."""
    spec, attns, mlps = module.spec, list(module.subs)[0::2], list(module.subs)[1::2]
    attn, mlp = spec.subs[0].body, spec.subs[1].body

    def each(subs: list[Any], *names: str) -> list[Tensor]:
        """One tensor of each layer; none where the layers have no such tensor."""
        found = []
        for at in subs:
            for name in names:
                at = getattr(at, name, None)
            found += [] if at is None else [at]
        return found

    head = module.head if spec.head else module.embed
    return StepModel(
        embed=module.embed.weight, attn_norm=each(attns, "pre", "weight"), qkv=each(attns, "body", "qkv", "weight"),
        o=each(attns, "body", "o", "weight"), mlp_norm=each(mlps, "pre", "weight"), up=each(mlps, "body", "up", "weight"),
        down=each(mlps, "body", "down", "weight"), norm=module.norm.weight, head=head.weight, heads=attn.heads, kv_heads=attn.kv_heads,
        head_dim=attn.head_dim, eps=spec.norm.eps, act=mlp.act, softmax_scale=attn.softmax_scale,
        qkv_scale=each(attns, "body", "qkv", "weight_scale"), o_scale=each(attns, "body", "o", "weight_scale"),
        up_scale=each(mlps, "body", "up", "weight_scale"), down_scale=each(mlps, "body", "down", "weight_scale"),
        qkv_bias=each(attns, "body", "qkv", "bias"), q_norm=each(attns, "body", "q_norm", "weight"),
        k_norm=each(attns, "body", "k_norm", "weight"),
    )  # fmt: skip


def alike(scales: list[Tensor | None]) -> list[Tensor]:
    """Those that are there, all of one length: the KV heads', where one of them has that."""
    given = [s for s in scales if s is not None]
    longest = max((len(s) for s in given), default=1)
    return [s if len(s) == longest else s.expand(longest).contiguous() for s in given]


class OneKernel:
    """`module(batch)`, with decode steps of up to so many rows in one kernel. The workspace makes it serve one stream at a time."""

    def __init__(self, module: Any, rows: int) -> None:
        self._module, self._rows = module, rows
        self._model = step_model(module)
        self._slots = [sub.body.kv for sub in module.spec.subs[0::2]]
        self._rope = module.spec.subs[0].body.rope
        self._workspace = step_workspace(self._model, rows)

    def __call__(self, b: Batch) -> Tensor:
        n = len(b.ids)
        if not 1 <= n <= self._rows or b.max_q != 1 or len(b.kv_lens) != n or b.logit_rows is not None:
            return self._module(b)
        caches = [b.caches[slot] for slot in self._slots]
        scales = alike([c.k_scale for c in caches]), alike([c.v_scale for c in caches])
        return decode_step(
            self._model, b.ids, b.slots, b.kv_lens, b.page_table, *b.rope(self._rope), [c.k for c in caches], [c.v for c in caches],
            self._workspace, *scales,
        )  # fmt: skip
