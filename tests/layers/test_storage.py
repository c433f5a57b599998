"""How a checkpoint may store what a layer reads: fused tensors, rows head by head, transposed matrices; and the norm over all heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.layers import MLP, Attn, Decoder, Embedding, LayerNorm, Linear, Part, RMSNorm, Rope, Sub, Transform, bind, consecutive, plan
from pyllm.models import spec_from_config
from pyllm.plan.explain import explain
from tests.layers.custom import DIM, FF, HEADS, KV, VOCAB, D, random_state
from tests.layers.test_custom import IDS
from tests.layers.test_formats import Int4Packed
from tests.layers.test_tensor_parallel import BASE, run_ranks
from tests.models.paged import Paged

State = dict[str, Tensor]
FUSED = ("qkv", "qkv", "qkv", "o_proj")


def one(body: Any) -> Decoder:
    return Decoder(Embedding("embed", VOCAB, D), (Sub("layer", RMSNorm("norm", D, 1e-6), body),), None, max_positions=64)


def attn(**changes: Any) -> Attn:
    return replace(Attn("attn", D, HEADS, KV, DIM, kv=0, rope=Rope(DIM, max_positions=64), qkv_bias=True, o_bias=True), **changes)


def logits(spec: Decoder, state: State, fuse: bool = True) -> Tensor:
    return bind(spec, state, fuse=fuse)(Paged(spec, 1, len(IDS)).step([IDS]))


def fuse_qkv(state: State, order: Any) -> State:
    """The state of three tensors as one of `order(q, k, v)` for weight and bias."""
    out = dict(state)
    for suffix in ("weight", "bias"):
        out[f"layer.attn.qkv.{suffix}"] = order(*(out.pop(f"layer.attn.{n}_proj.{suffix}") for n in "qkv"))
    return out


def test_one_tensor_for_q_k_and_v() -> None:
    state = random_state(one(attn()))
    fused = one(attn(names=FUSED))
    assert torch.equal(logits(fused, fuse_qkv(state, lambda *t: torch.cat(t))), logits(one(attn()), state))


@pytest.mark.parametrize("kv_heads", [1, KV, HEADS])
def test_one_tensor_stored_head_by_head(kv_heads: int) -> None:
    """Each KV head with its query heads before it."""

    def order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for h in range(kv_heads):
            n = HEADS // kv_heads * DIM
            rows += [q[h * n : (h + 1) * n], k[h * DIM : (h + 1) * DIM], v[h * DIM : (h + 1) * DIM]]
        return torch.cat(rows)

    plain = one(attn(kv_heads=kv_heads))
    state = random_state(plain)
    spec, stored = one(attn(kv_heads=kv_heads, names=FUSED, qkv_transform=Transform.UNGROUP)), fuse_qkv(state, order)
    want = logits(plain, state)
    assert torch.equal(logits(spec, stored), want)
    for tp in (2, 4):
        for got in run_ranks(spec, stored, tp):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_one_transposed_tensor_for_gate_and_up() -> None:
    plain = one(MLP("mlp", D, FF, bias=True))
    state = random_state(plain)
    spec = one(MLP("mlp", D, FF, bias=True, names=("both", "both", "down_proj"), transform=Transform.TRANSPOSE))
    stored = {k: v.T.contiguous() if k.startswith("layer.mlp") and v.dim() > 1 else v for k, v in state.items()}
    for suffix, dim in (("weight", 1), ("bias", 0)):
        stored[f"layer.mlp.both.{suffix}"] = torch.cat([stored.pop(f"layer.mlp.{n}_proj.{suffix}") for n in ("gate", "up")], dim)
    want = logits(plain, state)
    assert torch.equal(logits(spec, stored), want)
    for got in run_ranks(spec, stored, 2):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_a_reader_of_anothers_cache_takes_its_rows_of_a_fused_tensor() -> None:
    linear = attn(names=FUSED, own_kv=False).children()["qkv"]
    assert isinstance(linear, Linear) and linear.parts == (Part("qkv", HEADS * DIM, DIM, of=(HEADS + 2 * KV) * DIM),)


def test_a_fused_tensor_is_named_once() -> None:
    spec, seen = one(attn(names=FUSED)), []
    bind(spec, random_state(spec), progress=seen.append)
    assert sorted(seen) == sorted(s for i in plan(spec) for s in i.sources)
    assert len(set(seen)) == len(seen)
    assert [r.what for r in explain(spec).rows if "qkv" in r.what] == ["qkv"]


NEOX = BASE | {"architectures": ["GPTNeoXForCausalLM"], "num_key_value_heads": 4}
GPT2 = BASE | {"architectures": ["GPT2LMHeadModel"], "num_key_value_heads": 4}
OLMO2 = BASE | {"architectures": ["Olmo2ForCausalLM"], "attention_bias": True}
GEMMA3 = BASE | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8, "sliding_window_pattern": 2}
MODELS = [NEOX, GPT2, OLMO2, GEMMA3]


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c["architectures"][0])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_agree_with_one_rank(config: dict[str, Any], tp: int) -> None:
    """OLMo 2 with tp=4: two ranks hold the same KV head, whose squares must count once."""
    spec = spec_from_config(config)
    state = random_state(spec)
    want = logits(spec, state)
    for got in run_ranks(spec, state, tp):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c["architectures"][0])
@pytest.mark.parametrize("fuse", [True, False])
def test_explain_lists_the_ops_that_run(config: dict[str, Any], fuse: bool) -> None:
    """In any order: the norm of a parallel branch runs when the branch reads it, explain lists all norms at the edge."""
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "pyllm":
                seen.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    spec = spec_from_config(config)
    bound, batch = bind(spec, random_state(spec), fuse=fuse), Paged(spec, 1, len(IDS)).step([IDS])
    with Watch():
        bound(batch)
    rows = [r.op for r in explain(spec, context=len(IDS), new=len(IDS), fuse=fuse, dtype=torch.float32).rows]
    assert sorted(seen) == sorted(op for op in rows if op not in ("add", "copy", "sample_tokens"))


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c["architectures"][0])
def test_fused_and_separate_ops_agree(config: dict[str, Any]) -> None:
    spec = spec_from_config(config)
    state = random_state(spec)
    want = logits(spec, state)
    torch.testing.assert_close(logits(spec, state, fuse=False), want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_the_norm_over_all_heads_is_one_reduction_a_layer() -> None:
    rows = [r for r in explain(spec_from_config(OLMO2), tp=2, batch=3).rows if r.at == "model.layers.1"]
    sums = [r.bytes for r in rows if r.op == "all_reduce"]
    assert sums == [3 * D * 2, 2 * 4 * 3, 3 * D * 2]  # bf16 rows before each step, two fp32 means a token


def test_refusals() -> None:
    packed = Linear(64, (Part("a", 32),), transform=Transform.TRANSPOSE)
    q, k = Part("a", 32, 16), Part("a", 16, 16)
    whole = RMSNorm("{}_norm", DIM, 1e-6)
    for attempt, message in (
        (lambda: Linear(D, (Part("a", 8),), transform=Transform.PLUS_ONE), "Linear a: transform is PLUS_ONE, expected None, TRANSPOSE"),
        (lambda: Linear(D, (q, k), transform=Transform.UNGROUP), "Linear a: transform is UNGROUP, expected parts that are all of one"),
        (lambda: Linear(D, consecutive(q, k)[:1], transform=Transform.UNGROUP), "Linear a: transform is UNGROUP, expected parts"),
        (lambda: attn(whole_norm=True), "Attn attn: whole_norm is set, expected a qk_norm with it"),
        (lambda: attn(whole_norm=True, qk_norm=whole), r"Attn attn: qk_norm\.d is 16, expected heads \* head_dim=64"),
        (lambda: bind(packed, {}, quant=[("*", Int4Packed())]), "quant plan: a needs TRANSPOSE, which the packed format"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_names_without_the_first_segment() -> None:
    norm = LayerNorm("top.norm", D, 1e-5)
    spec = Decoder(Embedding("top.embed", VOCAB, D), (), norm, prefix="top")
    state = random_state(spec)
    short = {k.removeprefix("top."): v for k, v in state.items()}
    assert torch.equal(logits(spec, short), logits(spec, state))
    with pytest.raises(ValueError, match=r"checkpoint has no tensor 'top\.embed\.weight'"):
        bind(replace(spec, prefix=""), short)
    with pytest.raises(ValueError, match="no layer asked for: extra"):
        bind(spec, short | {"extra": torch.zeros(1)})
