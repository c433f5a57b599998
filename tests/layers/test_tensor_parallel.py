"""Tensor parallelism by annotation: the ranks of one process, summed by threads, give what one rank gives."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.layers import MLP, Decoder, Embedding, Linear, MoE, Part, Split, Sub, Sum, bind, plan
from pyllm.models import spec_from_config
from pyllm.plan.explain import explain
from tests.layers.custom import FF, VOCAB, D, mine, random_state
from tests.layers.test_custom import IDS, Scale
from tests.models.paged import Paged

BASE = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=3,
vocab_size=VOCAB,
            max_position_embeddings=64)  # fmt: skip


def llama(**changes: Any) -> Decoder:
    return spec_from_config(BASE | {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True} | changes)


def gemma(**changes: Any) -> Decoder:
    return spec_from_config(BASE | {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 16, "sliding_window": 8,
    "attn_logit_softcapping": 5.0,
                                    "final_logit_softcapping": 3.0, "tie_word_embeddings": True} | changes)  # fmt: skip


def own_layer() -> Decoder:
    """A replicated body (full result on each rank) between sharded ones."""
    spec = mine(2)
    return replace(spec, subs=(*spec.subs, Sub("model.extra", None, Scale("mine", D))))


def run_ranks(spec: Decoder, state: dict[str, Tensor], tp: int) -> list[Tensor]:
    """One thread a rank; `reduce` and `gather` meet at a barrier, as NCCL would."""
    barrier, box, out = threading.Barrier(tp, timeout=60), [torch.empty(0)] * tp, [torch.empty(0)] * tp
    errors: list[BaseException] = []

    def rank(r: int) -> None:
        def meet(t: Tensor) -> list[Tensor]:
            box[r] = t
            barrier.wait()
            all_ranks = list(box)
            barrier.wait()
            return all_ranks

        try:
            module = bind(spec, state, rank=r, tp=tp)
            batch = Paged(spec, 1, len(IDS), tp=tp).step(
                [IDS], reduce=lambda t: torch.stack(meet(t)).sum(0), gather=lambda t: torch.cat(meet(t), -1)
            )
            out[r] = module(batch)
        except BaseException as e:
            errors.append(e)
            barrier.abort()

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(tp)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]
    return out


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "make", [mine, llama, gemma, own_layer, lambda: llama(tie_word_embeddings=True)], ids=["mine", "llama", "gemma2", "own", "tied"]
)
def test_ranks_agree_with_one_rank(make: Any, tp: int) -> None:
    """tp=4 has more ranks than the 2 KV heads (replicated) and a vocabulary of 50 that 4 does not divide (padded)."""
    spec = make()
    state = random_state(spec)
    want = bind(spec, state)(Paged(spec, 1, len(IDS)).step([IDS]))
    for got in run_ranks(spec, state, tp):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_sinks_and_learned_positions_are_cut_like_the_rest() -> None:
    spec = mine(2)
    attn = replace(spec.subs[0].body.branches[0], sinks=True, qkv_bias=True, o_bias=True)
    subs = (replace(spec.subs[0], body=Sum((attn, *spec.subs[0].body.branches[1:]))), *spec.subs[1:])
    spec = replace(spec, subs=subs, positions=Embedding("wpe", 64, D), max_positions=64)
    state = random_state(spec)
    want = bind(spec, state)(Paged(spec, 1, len(IDS)).step([IDS]))
    for tp in (2, 4):
        for got in run_ranks(spec, state, tp):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_plan_and_bind_agree_on_local_shapes() -> None:
    spec = mine()
    state = random_state(spec)
    for tp in (1, 2, 4):
        want = {i.tensor: i.shape for i in plan(spec, tp=tp)}
        for rank in range(tp):
            got = {k: tuple(p.shape) for k, p in bind(spec, state, rank=rank, tp=tp).named_parameters()}
            assert got == want


def test_each_row_of_each_part_is_on_the_right_rank() -> None:
    part = Part("k_proj", 4 * 8, 8, Split.REPLICATE)
    t = torch.arange(32)
    assert [part.cut(t, 0, r, 2).tolist() for r in range(2)] == [list(range(16)), list(range(16, 32))]
    assert [part.cut(t, 0, r, 8)[0].item() for r in range(8)] == [0, 0, 8, 8, 16, 16, 24, 24]
    vocab = Part("lm_head", 10, split=Split.PAD)
    cuts = [vocab.cut(torch.arange(1, 11), 0, r, 4).tolist() for r in range(4)]
    assert cuts == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 0]]
    assert [Part("tiny", 2, split=Split.PAD).cut(torch.ones(2), 0, r, 4).tolist() for r in range(4)] == [[1], [1], [0], [0]]


@pytest.mark.parametrize(
    ("make", "tp", "message"),
    [
        (lambda: llama(), 3, r"self_attn\.q_proj: 4 units of 16 rows cannot be cut for tp=3; the number of units must be a multiple of tp"),
        (
            lambda: llama(num_attention_heads=6, num_key_value_heads=2),
            3,
            r"self_attn\.k_proj: 2 units of 16 rows cannot be cut for tp=3; the number of units must be a multiple or a divisor of tp",
        ),
        (lambda: llama(intermediate_size=98), 4, r"^model\.layers\.0\.mlp\.gate_proj: 98 units of 1 rows cannot be cut for tp=4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(make: Any, tp: int, message: str) -> None:
    spec = make()
    for attempt in (lambda: bind(spec, random_state(spec), tp=tp), lambda: plan(spec, tp=tp), lambda: explain(spec, tp=tp)):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_row_parallel_input_that_does_not_divide() -> None:
    spec = Linear(98, (Part("down", D),), "row")
    with pytest.raises(ValueError, match=r"down: input size 98 is not a multiple of tp=4"):
        bind(spec, {"down.weight": torch.zeros(D, 98)}, tp=4)


def test_embedding_is_vocab_parallel() -> None:
    spec = Embedding("e", 10, 8)
    table = torch.randn(10, 8)
    ids = torch.arange(10, dtype=torch.int32)
    total = sum(bind(spec, {"e.weight": table}, rank=r, tp=4)(ids) for r in range(4))
    torch.testing.assert_close(total, table, rtol=0, atol=0)


def test_shared_experts_and_gate_sum_to_one_rank() -> None:
    body = MoE("moe", D, FF, 4, 2, scoring="sigmoid", correction="gate.e_score_correction_bias", scale=2.5, shared=MLP("shared_experts",
    D, FF),
               shared_gate="shared_expert_gate", router="router")  # fmt: skip
    spec = replace(mine(1), subs=(*mine(1).subs, Sub("model.extra", None, body)))
    state = random_state(spec)
    want = bind(spec, state)(Paged(spec, 1, len(IDS)).step([IDS]))
    for got in run_ranks(spec, state, 2):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * want.abs().max().item())
