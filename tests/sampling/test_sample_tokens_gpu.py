"""What only a GPU can show of sample_tokens: batch invariance, CUDA graphs, overlapping launches, large offsets, giant rows."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.fused import embed_tokens, softcap
from pyllm.ops.sampling import sample_tokens
from tests.sampling.rows import DTYPES, KINDS, at, check_draws, row, settings
from tests.support.compare import assert_same

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MIXED = {"top_k": [0, 50, 0, 700, 30, 1, 0], "top_p": [1.0, 1.0, 0.9, 0.9, 0.8, 0.5, 1.0], "min_p": [0.0, 0.0, 0.0, 0.0, 0.05, 0.0, 0.1]}
TEMPERATURES = [1.0, 0.7, 1.3, 1.0, 0.0, 1.0, 2.0, 0.9]


def mixed(B: int) -> dict[str, torch.Tensor]:
    """Greedy rows and every filter, in one batch."""
    filters = {name: [values[b % 7] for b in range(B)] for name, values in MIXED.items()}
    return settings(B, CUDA, temperature=[TEMPERATURES[b % 8] for b in range(B)], **filters)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1000, 50257, 128256])
def test_batch_invariance(V, dtype):
    """The same bits alone (16 CTAs per row), in small and in large batches (fewer CTAs, other thread counts), in any order, and again."""
    B = 200
    x = torch.stack([row(KINDS[b % len(KINDS)], V) for b in range(B)]).to(dtype).to(CUDA)
    given = mixed(B)
    everything = sample_tokens(x, **given)
    assert_same(sample_tokens(x, **given), everything, "second run")
    for rows in (slice(0, 1), slice(7, 8), slice(30, 38), slice(40, 49), slice(60, 130)):
        assert_same(sample_tokens(x[rows], **at(given, rows)), everything[rows], f"rows {rows}")
    for b in range(0, B, 9):
        assert_same(sample_tokens(x[b : b + 1].clone(), **at(given, slice(b, b + 1))), everything[b : b + 1], f"row {b} alone")
    order = torch.randperm(B, device=CUDA)
    assert_same(sample_tokens(x[order], **at(given, order)), everything[order], "another order")


@pytest.mark.parametrize("V", [3000, 128256])
def test_the_kernel_agrees_with_the_reference(V):
    """Not only within slack: two correct samplers differ in a row only when the two best scores, or a token and a cut, nearly tie."""
    B = 60
    x = torch.randn(B, V) * 2
    given = mixed(B)
    want = sample_tokens(x, **{name: t.cpu() for name, t in given.items()})
    got = sample_tokens(x.to(CUDA), **given).cpu()
    # A near tie within 2^-15 has probability below 1e-4 per row: 2 of 60 rows happen with probability 2e-5.
    assert int((got != want).sum()) <= 1


@pytest.mark.parametrize("V", [1001, 128256])
@pytest.mark.parametrize("B", [1, 5, 40])
def test_graph_replay_with_other_parameters(B, V):
    x = torch.randn(B, V, device=CUDA)
    given = mixed(B)
    sample_tokens(x, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tokens = sample_tokens(x, **given)
    for seed in range(4):
        x.copy_(torch.randn(B, V) * (1 + seed))
        for name, t in mixed(B).items():
            given[name].copy_(t.roll(seed))
        graph.replay()
        assert_same(tokens, sample_tokens(x, **given), f"replay {seed}")


@pytest.mark.parametrize("B", [1, 3, 64])
def test_chain_of_overlapping_launches(B):
    """softcap -> sample_tokens -> embed_tokens, each allowed to start before its predecessor ends, against the same with a wait."""
    V, N = 32000, 256
    x = torch.randn(B, V, device=CUDA).bfloat16() * 8
    weight = torch.randn(V, N, device=CUDA).bfloat16()
    given = mixed(B)
    want = []
    for step in range(20):
        logits = softcap(x * (step + 1), 30.0)
        torch.cuda.synchronize()
        tokens = sample_tokens(logits, **given)
        torch.cuda.synchronize()
        want.append(embed_tokens(tokens.clamp(min=0), weight))
        torch.cuda.synchronize()
    scaled = [x * (step + 1) for step in range(20)]
    torch.cuda.synchronize()
    got = [embed_tokens(sample_tokens(softcap(s, 30.0), **given), weight) for s in scaled]
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)


@pytest.mark.parametrize(("V", "dtype"), [(2**20, torch.bfloat16), (2**20, torch.float32), (2**20 - 3, torch.float32)])
@pytest.mark.parametrize("B", [1, 12])
def test_longest_rows(B, V, dtype):
    """fp32 rows of 2^20 do not fit the shared memory of 16 CTAs: part of them is read again from global memory."""
    x = torch.stack([row(("normal", "ties", "zeros", "masked")[b % 4], V) for b in range(B)]).to(dtype).to(CUDA)
    filters = {"top_k": [0, 60, 0, 3000], "top_p": [0.9, 0.95, 1.0, 0.5]}
    check_draws(x, settings(B, CUDA, **{name: [v[b % 4] for b in range(B)] for name, v in filters.items()}), f"V={V}")
    assert_same(sample_tokens(x), x.cpu().float().argmax(1).int(), "greedy") if B == 1 else None


@pytest.mark.large
def test_offsets_beyond_2_to_31():
    buffer = torch.zeros(2**31 + 5000, dtype=torch.bfloat16, device=CUDA)
    x = buffer.as_strided((2, 4099), (2**31 + 1, 1))
    x.copy_(torch.randn(2, 4099))
    given = settings(2, CUDA, top_p=0.9)
    assert_same(sample_tokens(x, **given), sample_tokens(x.clone(), **given))
    assert_same(sample_tokens(x), x.cpu().float().argmax(1).int())
