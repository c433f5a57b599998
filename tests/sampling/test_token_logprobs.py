from __future__ import annotations

import pytest
import torch

from pyllm.ops.sampling import token_logprobs
from tests.sampling.rows import DEVICES, DTYPES, KINDS, row
from tests.support.compare import assert_close, assert_same
from tests.support.generate import padded_rows, poison_allocator

NAN, INF = float("nan"), float("inf")
# Weights as in sample_tokens at T = 1 (exponents up to 25 that matter: 3 roundings of 2^-24 * 25 * ln 2, 2^-22 of the exponential), four
# fp32 additions, the fixed point of 2^-41 * V / 4, then logf and two fp32 subtractions of values up to |logprob|.
ABSOLUTE, RELATIVE = 2.0**-17, 2.0**-22


def exact(x: torch.Tensor, tokens: torch.Tensor, top_n: int) -> tuple[torch.Tensor, ...]:
    """Row by row in fp64, by sorting."""
    B, V = x.shape
    x = x.cpu().double()
    logprob, rank = torch.full((B,), NAN, dtype=torch.float64), torch.zeros(B, dtype=torch.int32)
    top, ids = torch.full((B, top_n), NAN, dtype=torch.float64), torch.full((B, top_n), -1, dtype=torch.int32)
    for b in range(B):
        if x[b].isnan().any() or not x[b].isfinite().any():
            continue
        infinite = x[b] == INF
        log_p = torch.where(infinite, -infinite.sum().double().log(), -INF) if infinite.any() else torch.log_softmax(x[b], 0)
        order = torch.sort(x[b], descending=True, stable=True).indices
        if 0 <= (token := int(tokens[b])) < V:
            logprob[b], rank[b] = log_p[token], (order == token).nonzero()[0, 0] + 1
        n = min(top_n, V)
        top[b], ids[b, :n] = -INF, order[:n].int()
        top[b, :n] = log_p[order[:n]]
    return logprob, rank, top, ids


def check(x: torch.Tensor, tokens: torch.Tensor, top_n: int, what: str) -> None:
    B = x.shape[0]
    for shape, dtype in (((B,), torch.float32), ((B,), torch.int32), ((B, top_n), torch.float32), ((B, top_n), torch.int32)):
        poison_allocator(shape, dtype, x.device)
    got, want = token_logprobs(x, tokens.to(x.device), top_n), exact(x, tokens, top_n)
    assert_close(got[0], want[0], atol=ABSOLUTE, rtol=RELATIVE, what=what + " logprob")
    assert_same(got[1], want[1], what + " rank")
    assert_close(got[2], want[2], atol=ABSOLUTE, rtol=RELATIVE, what=what + " top logprobs")
    assert_same(got[3], want[3], what + " top tokens")


def lengths(device: str) -> tuple[int, ...]:
    return (1, 2, 7, 21, 257, 3001) if device == "cpu" else (1, 2, 7, 21, 257, 4099, 50257, 128256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_n", [0, 1, 5, 20])
def test_against_fp64(top_n, dtype, device):
    for V in lengths(device):
        x = torch.stack([row(kind, V) for kind in KINDS]).to(dtype)
        tokens = torch.randint(0, V, (len(KINDS),), dtype=torch.int32)
        tokens[0], tokens[1] = 0, V - 1
        rows, intact = padded_rows(x.to(device), gap=3, offset=V % 5)
        check(rows, tokens, top_n, f"V={V}")
        intact()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_tokens_without_an_answer(device):
    x = torch.randn(8, 300)
    x[0, 0] = x[1, -1] = NAN
    x[2], x[3] = -INF, INF
    x[4, :290] = -INF  # ten finite logits: the other places go to the lowest ids of -inf
    tokens = torch.tensor([5, 5, 5, 5, 7, -1, 300, 2**31 - 1], dtype=torch.int32)
    check(x.to(device), tokens, 20, "special rows")


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device):
    got = token_logprobs(torch.empty(0, 9, device=device), torch.empty(0, dtype=torch.int32, device=device), 4)
    assert [tuple(t.shape) for t in got] == [(0,), (0,), (0, 4), (0, 4)]


ERRORS = [
    ("logits", {"logits": torch.zeros(4)}, "has 1 dimensions"),
    ("logits", {"logits": torch.zeros(4, 8, dtype=torch.int32)}, "is int32, expected bfloat16"),
    ("logits", {"logits": torch.zeros(4, 0)}, "has V=0"),
    ("tokens", {"tokens": torch.zeros(4, dtype=torch.int64)}, "is int64, expected int32"),
    ("tokens", {"tokens": torch.zeros(3, dtype=torch.int32)}, r"\.size\(0\) is 3, expected B=4"),
    ("top_n", {"top_n": 21}, "is 21, expected 0 to 20"),
    ("top_n", {"top_n": -1}, "is -1"),
]


@pytest.mark.parametrize(("argument", "changes", "message"), ERRORS, ids=[f"{a}-{i}" for i, (a, _, _) in enumerate(ERRORS)])
@pytest.mark.parametrize("device", ["cpu", "meta", DEVICES[1]])
def test_errors(argument, changes, message, device):
    given = {"logits": torch.zeros(4, 8), "tokens": torch.zeros(4, dtype=torch.int32), "top_n": 2, **changes}
    with pytest.raises((ValueError, RuntimeError), match=f"token_logprobs: {argument} .*{message}"):
        token_logprobs(**{name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in given.items()})


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_and_compile(device):
    x, tokens = torch.randn(4, 130).to(device), torch.arange(4, dtype=torch.int32).to(device)
    for top_n in (0, 3):
        torch.library.opcheck(torch.ops.pyllm.token_logprobs.default, (x, tokens, top_n))
        compiled = torch.compile(token_logprobs, fullgraph=True, backend="aot_eager")
        for got, want in zip(compiled(x, tokens, top_n), token_logprobs(x, tokens, top_n), strict=True):
            assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_invariance(dtype):
    B, V = 150, 128256
    x = torch.stack([row(KINDS[b % len(KINDS)], V) for b in range(B)]).to(dtype).cuda()
    tokens = torch.randint(0, V, (B,), dtype=torch.int32).cuda()
    everything = token_logprobs(x, tokens, 8)
    for rows in (slice(0, B), slice(0, 1), slice(5, 6), slice(20, 29), slice(100, 140)):
        for got, want in zip(token_logprobs(x[rows].clone(), tokens[rows], 8), everything, strict=True):
            assert_same(got, want[rows], f"rows {rows}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [1, 12, 40, 140])
def test_aligned_rows_over_ragged_slices(B, dtype):
    """16, 16, 4 and 1 CTAs per row whose slices are no whole chunks: what pads them must not be counted, the more so beside -inf logits."""
    V = 128256
    x = torch.stack([row(("masked", "normal", "ties")[b % 3], V) for b in range(B)]).to(dtype)
    check(x.cuda(), torch.randint(0, V, (B,), dtype=torch.int32), 20, f"B={B}")


@pytest.mark.gpu
@pytest.mark.parametrize("B", [1, 30])
def test_graph_replay(B):
    x, tokens = torch.randn(B, 32001).cuda(), torch.zeros(B, dtype=torch.int32).cuda()
    token_logprobs(x, tokens, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = token_logprobs(x, tokens, 5)
    for _ in range(3):
        x.copy_(torch.randn(B, 32001) * 3)
        tokens.copy_(torch.randint(0, 32001, (B,)))
        graph.replay()
        for got, want in zip(captured, token_logprobs(x, tokens, 5), strict=True):
            assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [2**20, 2**20 - 3])
def test_longest_rows(V):
    x = torch.stack([row(kind, V) for kind in ("normal", "zeros")]).cuda()
    check(x, torch.tensor([V - 1, V // 2], dtype=torch.int32), 20, f"V={V}")
