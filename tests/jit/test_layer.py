"""A variant as a field of Attn: against fp64 formulas, over ranks, in explain, with tensors that a step brings."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pyllm.api.params import SamplingParams
from pyllm.jit import AttentionVariant
from pyllm.layers import Attn, Decoder, Embedding, Sub, bind
from pyllm.plan.explain import explain
from pyllm.runtime.batch import Batch, KvCache
from pyllm.runtime.engine import Engine
from tests.jit.examples import alibi, document_mask, soft_cap
from tests.layers.custom import DIM, HEADS, KV, VOCAB, D, random_state
from tests.models.paged import Paged
from tests.support.compare import assert_close

N = 45
IDS = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(5))
ATTN = Attn("attn", D, HEADS, KV, DIM, kv=0)


def decoder(variant: AttentionVariant | None) -> Decoder:
    return Decoder(Embedding("embed", VOCAB, D), (Sub("layer", None, replace(ATTN, variant=variant)),), None, max_positions=64)


def loud(spec: Decoder) -> dict[str, Tensor]:
    state = random_state(spec, 7)
    return state | {"embed.weight": state["embed.weight"] * D**0.5}


def run(spec: Decoder, state: dict[str, Tensor], tensors: dict[str, Tensor]) -> Tensor:
    """In three uneven steps over pages; a fourth tensor that no variant asks for is no error."""
    bound, pages, cuts = bind(spec, state), Paged(spec, 1, N), (0, 15, 16, N)
    steps = (replace(pages.step([IDS[a:b]]), tensors=tensors | {"other": IDS}) for a, b in itertools.pairwise(cuts))
    return torch.cat([bound(step) for step in steps])


def formula(st: dict[str, Tensor], change: str, document: Tensor) -> Tensor:
    x = st["embed.weight"][IDS]
    q, k, v = ((x @ st[f"layer.attn.{n}_proj.weight"].T).view(N, -1, DIM) for n in "qkv")
    s = DIM**-0.5 * torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(HEADS // KV, 1))
    at = torch.arange(N)
    if change == "alibi":
        s = s - torch.tensor([2.0 ** (-8 * (h + 1) / HEADS) for h in range(HEADS)]).view(-1, 1, 1) * (at[:, None] - at)
    elif change == "capped":
        s = 0.5 * torch.tanh(s / 0.5)
    elif change == "documents":
        s = s.masked_fill(document[0, :N, None] != document[0, None, :N], float("-inf"))
    p = s.masked_fill(torch.ones(N, N).triu(1).bool(), float("-inf")).softmax(-1)
    o = torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(HEADS // KV, 1)).reshape(N, -1)
    return (x + o @ st["layer.attn.o_proj.weight"].T) @ st["embed.weight"].T


@pytest.mark.parametrize("variant", [alibi(HEADS), soft_cap(0.5), document_mask(64)], ids=lambda v: v.name)
def test_against_a_formula(variant: AttentionVariant) -> None:
    spec, document = decoder(variant), torch.randint(0, 3, (1, 64), dtype=torch.int32)
    state = loud(spec)
    wide = {k: v.double() for k, v in state.items()}
    want, plain = formula(wide, variant.name, document), formula(wide, "", document)
    assert (want - plain).abs().max() > 0.01 * want.abs().max()  # else the variant would not matter
    # fp32 against fp64 in one layer: ~50 roundings of 2^-24, amplified a few times
    assert_close(run(spec, state, {"document": document}), want, atol=3e-5 * want.abs().max().item())


@pytest.mark.parametrize("tp", [2, 4])
def test_heads_keep_their_numbers_over_ranks(tp: int) -> None:
    attn = replace(ATTN, variant=alibi(HEADS))
    state, x = random_state(attn), torch.randn(N, D)
    starts, lens = torch.tensor([0, N], dtype=torch.int32), torch.tensor([N], dtype=torch.int32)

    def part(rank: int, ranks: int) -> Tensor:
        cache = KvCache(*(torch.zeros(3, 16, max(KV // ranks, 1), DIM) for _ in range(2)))
        at = torch.arange(N, dtype=torch.int32)
        batch = Batch(at, at, at, starts, lens, torch.arange(3, dtype=torch.int32).view(1, 3), {0: cache})
        return bind(attn, state, rank=rank, tp=ranks)(x, batch)

    assert_close(sum(part(r, tp) for r in range(tp)), part(0, 1), atol=1e-5, rtol=1e-5)  # type: ignore[arg-type]


def test_a_tensor_that_no_step_brings() -> None:
    spec = decoder(document_mask(64))
    with pytest.raises(ValueError, match="tensors has no 'document', which variant documents takes"):
        run(spec, loud(spec), {})


def test_declaration() -> None:
    assert decoder(alibi(4)) == decoder(alibi(4)) and hash(decoder(alibi(4))) == hash(decoder(alibi(4)))
    assert decoder(alibi(4)) != decoder(None)
    assert "AttentionVariant(name='alibi'" in repr(decoder(alibi(4)))
    with pytest.raises(ValueError, match="Attn attn: variant is 'alibi', expected AttentionVariant or None"):
        replace(ATTN, variant="alibi")


def test_explain_names_it() -> None:
    row = next(r for r in explain(decoder(alibi(4)), context=32).rows if r.what == "kv[0]")
    assert (row.op, row.kernel, row.shape) == ("variant_attention", "NVRTC variant_attention", "4/2x16 causal alibi")
    plain = next(r for r in explain(decoder(None), context=32).rows if r.what == "kv[0]")
    assert (plain.bytes, plain.flops) == (row.bytes, row.flops)


def test_the_engine_runs_it() -> None:
    """Prompts in chunks and decodes, against whole sequences through the bound module."""
    spec = replace(decoder(alibi(HEADS)), max_positions=64)
    state = loud(spec)
    engine = Engine(spec, bind(spec, state), max_batch=4, max_tokens=256, chunk=5)
    prompts = [IDS[:12].tolist(), IDS[20:23].tolist()]
    requests = [engine.submit(prompt, SamplingParams(max_tokens=6)) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        known = torch.tensor([*prompt, *request.token_ids])
        logits = bind(spec, state)(Paged(spec, 1, N).step([known[:-1]]))
        assert logits[len(prompt) - 1 :].argmax(-1).tolist() == list(request.token_ids)
