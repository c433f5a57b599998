"""A good call of each public op, on a CPU, with all the arguments that go together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyllm.jit.variant import AttentionVariant, Param
from pyllm.ops.step import StepModel, step_workspace

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
Call = dict[str, Any]


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _paged(dim: int = 64, cache: torch.dtype = BF16) -> Call:
    """Two sequences, of 2 and 1 rows and 5 and 3 keys."""
    k, v = (rows(4, 16, 2, dim, dtype=cache) for _ in range(2))
    table = {"page_table": ints([1], [2]), "q_starts": ints(0, 2, 3), "kv_lens": ints(5, 3)}
    return {
        "q": rows(3, 4, dim),
        "k_cache": k,
        "v_cache": v,
        **table,
        "scale": 0.1,
        "window": 4,
        "softcap": 9.0,
        "sinks": rows(4, dtype=FP32),
    }


def _ragged(paged: bool = False) -> Call:
    where = {"kv_starts": ints(0, 5, 8)}
    k, v = rows(8, 2, 64), rows(8, 2, 64)
    if paged:
        k, v, where = rows(4, 16, 2, 64), rows(4, 16, 2, 64), {"page_table": ints([1], [2]), "kv_lens": ints(5, 3)}
    masks = {"mask": ints([7], [7], [7]), "mask_starts": ints(0, 0), "sinks": rows(4, dtype=FP32), "window": 4, "softcap": 9.0}
    return {"q": rows(3, 4, 64), "k": k, "v": v, "q_starts": ints(0, 2, 3), **where, "scale": 0.1, **masks}


def _scales() -> Call:
    return {"k_scale": torch.ones(2), "v_scale": torch.ones(1)}


def _experts(dtype: torch.dtype = BF16) -> Call:
    e4m3 = {"w13_scale": torch.ones(3, 32), "w2_scale": torch.ones(3, 16)} if dtype == E4M3 else {}
    bias = {"w13_bias": rows(3, 32), "w2_bias": rows(3, 16), "clamp": (1.7, 7.0)}
    who = {"ids": ints([0, 1], [2, 0]), "weights": torch.ones(2, 2)}
    return {"x": rows(2, 16), "w13": rows(3, 32, 16, dtype=dtype), "w2": rows(3, 16, 16, dtype=dtype), **who, "act": "silu", **bias, **e4m3}


def _sampling() -> Call:
    each = {name: torch.ones(2) for name in ("temperature", "top_p", "min_p")} | {
        name: ints(1, 1) for name in ("top_k", "index", "position")
    }
    return {"logits": rows(2, 9), "seed": torch.tensor([1, 2]), **each}


def _advance() -> Call:
    names = ("sampled", "token", "position", "kv_len", "slots", "active")
    return {name: ints(1, 1) for name in names} | {"table": ints([1], [2]), "page": 16}


def _append(dtype: torch.dtype) -> Call:
    caches = {name: rows(2, 16, 1, 16, dtype=dtype) for name in ("k_cache", "v_cache")}
    norms = {"q_weight": torch.ones(16), "k_weight": torch.ones(16), "eps": 1e-6}
    return {"qkv": rows(2, 64), "heads": 2, "kv_heads": 1, **norms, **caches, "slots": ints(16, 17)}


def _decode_step() -> Call:
    d, dim, ffn = 64, 64, 64
    model = StepModel(
        embed=rows(16, d), attn_norm=[torch.ones(d)], qkv=[rows(3 * dim, d)], o=[rows(d, dim)], mlp_norm=[torch.ones(d)],
        up=[rows(2 * ffn, d)], down=[rows(d, ffn)], norm=torch.ones(d), head=rows(16, d), heads=1, kv_heads=1, head_dim=dim, eps=1e-5,
        act="silu", softmax_scale=0.125,
    )  # fmt: skip
    caches = {name: [rows(2, 16, 1, dim, dtype=E4M3)] for name in ("k_caches", "v_caches")} | {
        n: [torch.ones(1)] for n in ("k_scale", "v_scale")
    }
    step = {
        "ids": ints(1),
        "slots": ints(16),
        "kv_lens": ints(1),
        "page_table": ints([1]),
        "cos_sin": torch.ones(2, dim),
        "rope_rows": ints(0),
    }
    return {"model": model, **step, **caches, "workspace": step_workspace(model, 1)}


VARIANT = AttentionVariant("shift", "s + by[h]", params=(Param("by", "float32"),), reference=lambda s, at, by: s + by[at.h.long()])

CALLS: dict[str, list[Callable[[], Call]]] = {
    "act": [lambda: {"x": rows(2, 16), "act": "silu"}],
    "act_mul": [lambda: {"x": rows(2, 16), "act": "silu"}],
    "act_mul_fp8": [lambda: {"x": rows(2, 16), "act": "silu", "scale": torch.ones(1)}],
    "advance_rows": [_advance],
    "composed_attention": [lambda: _paged() | {"causal": True}, lambda: _paged(cache=E4M3) | _scales()],
    "decode_attention": [
        lambda: _paged() | {"max_q": 2, "invariant": False, "mask": ints(1, 3, 1)},
        lambda: _paged(cache=E4M3) | _scales() | {"max_q": 2},
    ],
    "decode_step": [_decode_step],
    "dense_linear": [
        lambda: _narrow(BF16) | {"residual": rows(2, 16), "act": "silu", "gated": True, "softcap": 3.0}
    ],
    "embed_tokens": [lambda: {"ids": ints(1, 2), "weight": rows(4, 16), "scale": 2.0, "first": 0}],
    "fused_experts": [_experts, lambda: _experts(E4M3)],
    "layer_norm": [
        lambda: {"x": rows(2, 16), "weight": torch.ones(16), "bias": torch.ones(16), "eps": 1e-5, "residual": rows(2, 16)},
        lambda: {"x": rows(2, 16), "weight": rows(16), "bias": None, "eps": 1e-5, "quant": "static", "scale": torch.ones(1)},
    ],
    "linear": [lambda: {"x": rows(2, 16), "weight": rows(8, 16), "bias": rows(8)}],
    "linear_e4m3": [
        lambda: {"x": rows(2, 32), "weight": rows(32, 32), "out_scale": torch.ones(1), "bias": rows(32), "act": "silu", "gated": True},
        lambda: {"x": rows(2, 32, dtype=E4M3), "weight": rows(32, 32, dtype=E4M3), "out_scale": torch.ones(1), "x_scale": torch.ones(1)}
        | {"weight_scale": torch.ones(32)},
    ],
    "linear_fp8": [
        lambda: _narrow(E4M3) | {"out_dtype": BF16, "x_scale": torch.ones(2), "weight_scale": torch.ones(32), "act": "silu", "gated": True},
        lambda: _narrow(E4M3) | {"out_dtype": BF16, "x_scale": torch.ones(2, 1), "weight_scale": torch.ones(1, 1)},
    ],
    "linear_int8": [
        lambda: _narrow(torch.int8) | {"out_dtype": BF16, "x_scale": torch.ones(2), "weight_scale": torch.ones(1)},
    ],
    "linear_normed": [
        lambda: {"x": rows(2, 32), "squares": torch.ones(2, 1), "eps": 1e-6, "weight": rows(16, 32), "bias": rows(16)}
        | {"act": "silu", "gated": True}
    ],
    "linear_squares": [lambda: {"x": rows(2, 32), "weight": rows(16, 32), "residual": rows(2, 16), "bias": rows(16)}],
    "merge_states": [lambda: {"o_a": rows(2, 2, 8), "lse_a": torch.ones(2, 2), "o_b": rows(2, 2, 8), "lse_b": torch.ones(2, 2)}],
    "moe_experts": [_experts],
    "norm_linear": [lambda: _norm_linear("rms"), lambda: _norm_linear("layer") | {"norm_bias": torch.ones(16)}],
    "paged_attention": [
        lambda: _paged() | {"causal": True},
        lambda: _paged() | {"max_q": 2},
        lambda: _paged(dim=8) | {"max_q": 2},
        lambda: _paged(dim=32) | {"max_q": 2},
        lambda: _paged(cache=E4M3) | _scales(),
        lambda: _paged(cache=torch.int8) | _scales() | {"max_q": 2},
    ],
    "prefill_attention": [
        lambda: _ragged() | {"causal": True},
        lambda: _ragged(paged=True),
        lambda: {n: t.to(E4M3) if n in "qkv" else t for n, t in _ragged().items()} | _scales() | {"q_scale": torch.ones(3, 4)},
    ],
    "qk_norm_rope_append": [
        lambda: _append(BF16) | {"cos_sin": torch.ones(4, 16), "rows": ints(0, 1), "interleaved": False},
        lambda: _append(E4M3) | {"k_scale": torch.ones(1), "v_scale": torch.ones(1)},
    ],
    "quantize_fp8": [lambda: {"x": rows(2, 16), "mode": "static", "scale": torch.ones(1)}],
    "rms_norm": [
        lambda: {"x": rows(2, 16), "weight": torch.ones(16), "eps": 1e-5, "residual": rows(2, 16)},
        lambda: {"x": rows(2, 16), "weight": rows(16), "eps": 1e-5, "quant": "static", "scale": torch.ones(1)},
    ],
    "route_experts": [
        lambda: {"logits": rows(2, 8), "top_k": 2, "scoring": "sigmoid", "renormalize": True, "bias": torch.ones(8), "scale": 1.5,
                 "groups": 2, "top_groups": 1}
    ],
    "sample_tokens": [_sampling],
    "simple_attention": [lambda: _ragged() | {"causal": True, "max_q": 2}, lambda: _ragged(paged=True) | _fp8_keys()],
    "skinny_linear": [
        lambda: {"x": rows(2, 16), "weight": rows(32, 16), "bias": rows(32), "residual": rows(2, 16), "act": "silu", "gated": True,
                 "softcap": 3.0, "norm_weight": rows(16), "eps": 1e-5},
        lambda: _narrow(E4M3, torch.float16) | {"x_scale": torch.ones(2), "weight_scale": torch.ones(32), "dtype": torch.float16},
    ],
    "softcap": [lambda: {"x": rows(2, 9), "cap": 30.0}],
    "token_logprobs": [lambda: {"logits": rows(2, 9), "tokens": ints(0, 8), "top_n": 2}],
    "variant_attention": [
        lambda: _ragged() | {"variant": VARIANT, "tensors": {"by": torch.ones(4)}, "first_head": 0, "causal": True, "max_q": 2},
        lambda: _ragged(paged=True) | _fp8_keys() | {"variant": VARIANT, "tensors": {"by": torch.ones(4)}},
    ],
}  # fmt: skip


def _narrow(dtype: torch.dtype, bias: torch.dtype = BF16) -> Call:
    return {"x": rows(2, 16, dtype=dtype), "weight": rows(32, 16, dtype=dtype), "bias": rows(32, dtype=bias)}


def _norm_linear(kind: str) -> Call:
    gate = {"act": "silu", "gated": True, "residual": rows(2, 8), "kind": kind}
    return {"x": rows(2, 16), "norm_weight": torch.ones(16), "eps": 1e-5, "weight": rows(16, 16), "bias": rows(16), **gate}


def _fp8_keys() -> Call:
    return {name: rows(4, 16, 2, 64, dtype=E4M3) for name in "kv"} | _scales()
