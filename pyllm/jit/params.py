"""The mirror of csrc/attention/simple_params.cuh and of the launch shapes; the generated source asserts that both sides agree."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

THREADS = 128
_LONG, _INT, _FLOAT, _PTR = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class Params(ctypes.Structure):
    _fields_ = (
        *((name, _PTR) for name in ("q", "k", "v")),
        *((f"{name}_stride", _LONG) for name in ("q_token", "q_head", "k_token", "k_head", "k_page", "v_token", "v_head", "v_page")),
        *((name, _PTR) for name in ("q_starts", "kv_starts", "kv_lens", "page_table")),
        ("table_stride", _LONG),
        ("sinks", _PTR),
        ("mask", _PTR),
        ("mask_stride", _LONG),
        *((name, _PTR) for name in ("mask_starts", "k_scale", "v_scale", "out", "lse", "partial", "partial_lse")),
        ("slots", ctypes.c_uint64 * 8),
        ("tokens", _LONG),
        *((name, _INT) for name in ("batch", "heads", "kv_heads", "group", "page_shift", "mask_words", "window", "causal")),
        *((name, _INT) for name in ("k_scale_step", "v_scale_step", "splits")),
        ("first_head", _INT),
        ("scale", _FLOAT),
        ("softcap", _FLOAT),
    )


def shared_bytes(dim: int, value_dim: int, few: bool) -> int:
    """Dynamic shared memory of SimpleShape<T, dim, value_dim, few>."""
    rows, keys = (16, 64) if few else (64, 64 if max(dim, value_dim) <= 128 else 32)
    row, value = (((2 * -(-d // 16)) | 1) * 16 for d in (dim, value_dim))
    merge = 4 * 16 * (value_dim + 2) * 4 if few else 0
    return rows * row + max(keys * (row + value), merge)


@dataclass(frozen=True)
class Plan:
    """As plan_simple_attention makes it."""

    few: bool
    tiles: int
    splits: int


def plan(tokens: int, batch: int, group: int, kv_heads: int, max_q: int, max_keys: int, sms: int) -> Plan:
    few = (max_q or tokens) * group <= 16
    tiles = tokens * group // (16 if few else 64) + min(batch, tokens) + 1
    splits = 1
    if few:
        splits = min(max(-(-3 * sms // (tiles * kv_heads)), 1), 64, max(1, -(-max_keys // 64)))
    return Plan(few, tiles, splits)
