"""decode_step against the chain of kernels that it stands for: the bound model, its ops fused as they are served otherwise.

Bytes: all weights once, and keys and values of 1024 tokens for each row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from bench import Case, Goal
from bench.shapes import Shapes
from pyllm import ops
from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.layers import Bound, Fp8, bind
from pyllm.layers.one_kernel import step_model
from pyllm.models import spec_from_config
from pyllm.ops.step import step_workspace
from pyllm.runtime.batch import Batch, KvCache

KEYS, PAGE = 1024, 64
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FP8 = (("*lm_head", None), ("*", Fp8()))
MODELS = {"default": ("llama-3.2-1b", "llama-3.1-8b"), "llama3.2-1b": ("llama-3.2-1b",), "llama3-8b": ("llama-3.1-8b",)}
GOALS = {("llama-3.2-1b", "bf16"): 720.0, ("llama-3.1-8b", "bf16"): 4150.0, ("llama-3.1-8b", "fp8"): 2500.0}
"""µs of a step of one row."""


@cache
def module_of(name: str, fp8: bool) -> Bound:
    spec = spec_from_config(SHAPES[name])
    return bind(spec, DummyWeights(spec, "cuda", BF16), quant=FP8 if fp8 else (), device="cuda", dtype=BF16)


def batch_of(name: str, rows: int, fp8: bool) -> Batch:
    spec = spec_from_config(SHAPES[name])
    width = KEYS // PAGE
    i32: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    table = 1 + torch.randperm(rows * width, device="cuda").int().view(rows, width)
    caches = {}
    for slot, kv in spec.kv_slots().items():
        pair = [torch.randn(1 + rows * width, PAGE, kv.kv_heads, kv.head_dim, device="cuda").to(E4M3 if fp8 else BF16) for _ in range(2)]
        caches[slot] = KvCache(*pair, *((torch.ones(1, device="cuda"),) * 2 if fp8 else ()))
    return Batch(
        ids=torch.arange(rows, **i32), positions=torch.full((rows,), KEYS - 1, **i32), slots=table[:, -1] * PAGE + PAGE - 1,
        q_starts=torch.arange(rows + 1, **i32), kv_lens=torch.full((rows,), KEYS, **i32), page_table=table, caches=caches, max_q=1,
    )  # fmt: skip


def step_of(name: str, batch: Batch, fp8: bool) -> dict[str, Any]:
    """The arguments of `ops.decode_step`."""
    spec, model = spec_from_config(SHAPES[name]), step_model(module_of(name, fp8))
    caches = [batch.caches[attn.kv] for _, attn in spec.attns()]
    cos_sin, rope_rows = batch.rope(spec.attns()[0][1].rope)  # type: ignore[arg-type]
    return {
        "model": model, "ids": batch.ids, "slots": batch.slots, "kv_lens": batch.kv_lens, "page_table": batch.page_table,
        "cos_sin": cos_sin, "rope_rows": rope_rows, "k_caches": [c.k for c in caches], "v_caches": [c.v for c in caches],
        "workspace": step_workspace(model, len(batch.ids)), "k_scale": [c.k_scale for c in caches if c.k_scale is not None],
        "v_scale": [c.v_scale for c in caches if c.v_scale is not None],
    }  # fmt: skip


def bytes_of(name: str, rows: int, fp8: bool) -> int:
    c = SHAPES[name]
    d, ffn, heads, kv_heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"], c["num_key_value_heads"]
    dim, layers, item = c.get("head_dim", d // heads), c["num_hidden_layers"], 1 if fp8 else 2
    weights = layers * item * d * ((2 * heads + 2 * kv_heads) * dim + 3 * ffn) + 2 * c["vocab_size"] * d
    return weights + layers * rows * KEYS * 2 * kv_heads * dim * item


def case(name: str, rows: int, fp8: bool) -> Case:
    def make(count: int) -> list[tuple[Batch, dict[str, Any]]]:
        batches = [batch_of(name, rows, fp8) for _ in range(count)]
        return [(b, step_of(name, b, fp8)) for b in batches]

    goal = GOALS.get((name, "fp8" if fp8 else "bf16")) if rows == 1 else None
    return Case(
        name=f"{name} {'fp8' if fp8 else 'bf16'}, {rows} rows, {KEYS} keys",
        dtype="fp8" if fp8 else "bf16",
        bytes=bytes_of(name, rows, fp8),
        make=make,
        ours=lambda s: ops.decode_step(**s[1]),
        baselines={"kernel by kernel": lambda s: module_of(name, fp8)(s[0])},
        goal=Goal(us=goal),
    )


def cases(shapes: Shapes) -> list[Case]:
    names = MODELS.get(shapes.name, ("llama-3.2-1b",))  # whole models: those that there are random weights for
    return [case(name, rows, fp8) for name in names for fp8 in (False, True) for rows in (1, 2, 4)]
