"""variant_attention: ALiBi, a document mask, a soft cap written by hand, and a variant that reads every place, in PyTorch against formulas
and compiled against PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from pyllm.jit import AttentionVariant, CompileError, Param
from pyllm.jit.compiler import unavailable
from tests.attention.simple_cases import Step, compare, make, random_mask
from tests.jit.examples import alibi, document_mask, every_place, soft_cap
from tests.support.compare import assert_close, assert_same
from tests.support.generate import normal, poison_allocator

BF16 = torch.bfloat16
LENGTHS = [1, 0, 63, 64, 65, 127, 129, 200, 16, 17]
CHUNKS = [1, 0, 63, 1, 64, 100, 2, 200, 9, 0]
needs_compiler = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
VARIANTS = ["alibi", "documents", "capped", "places", "plain"]


def variant_of(name: str, step: Step) -> tuple[AttentionVariant, dict[str, Any]]:
    """The variant, and the options that its call needs."""
    if name == "alibi":
        return alibi(step.q.shape[1]), {}
    if name == "documents":
        width = max(step.keys, 1)
        return document_mask(width), {"tensors": {"document": torch.randint(0, 3, (len(step.q_lens), width), dtype=torch.int32)}}
    if name == "places":
        return every_place(0.5), {"tensors": {"bias": normal(step.q.shape[0])}, "first_head": 5}
    if name == "capped":
        return soft_cap(2.0), {}
    return AttentionVariant("doubled", "2 * s", reference=lambda s, at: 2 * s), {}


def test_references_are_their_formulas() -> None:
    """Two sequences, the second with more keys than rows; each score by itself in fp64."""
    step = make([3, 2], [3, 7], 4, 2, 8, dtype=torch.float32)
    for name in VARIANTS:
        variant, options = variant_of(name, step)
        got, _ = step.call(variant=variant, scale=0.5, **options)
        for b, (first, n, begin, L) in enumerate([(0, 3, 0, 3), (3, 2, 3, 7)]):
            for j in range(n):
                for h in range(4):
                    p = L - n + j
                    keys = slice(begin, begin + p + 1)
                    q, k, v = step.q[first + j, h].double(), step.k[keys, h // 2].double(), step.v[keys, h // 2]
                    s = 0.5 * (k @ q)
                    at = torch.arange(p + 1)
                    if name == "alibi":
                        s = s - 2.0 ** (-2 * (h + 1)) * (p - at)
                    elif name == "documents":
                        row = options["tensors"]["document"][b]
                        s = s.masked_fill(row[at] != row[p], float("-inf"))
                    elif name == "capped":
                        s = 2 * torch.tanh(s / 2)
                    elif name == "places":
                        s = s * 0.5 + options["tensors"]["bias"][first + j] + 0.01 * (h + 5) + 0.02 * b - 0.001 * L + 0.003 * n
                        s = s.masked_fill((p + at) % 3 == 0, float("-inf"))
                    else:
                        s = 2 * s
                    weights = torch.exp(s - s.max()) if (s > float("-inf")).any() else torch.zeros_like(s)
                    want = weights @ v.double() / weights.sum().clamp_min(1e-300)
                    assert_close(got[first + j, h], want, atol=1e-5, what=name)  # fp32: a few dozen roundings of 2^-24


def test_softcap_comes_after_the_score() -> None:
    step = make([5], [9], 2, 1, 16, dtype=torch.float32)
    doubled = AttentionVariant("doubled", "2 * s", reference=lambda s, at: 2 * s)
    got, want = step.call(variant=doubled, scale=0.5, softcap=1.5), step.call(scale=1.0, softcap=1.5)
    for g, w in zip(got, want, strict=True):
        assert_close(g, w, rtol=1e-5, atol=1e-6)


def test_opcheck_and_compile() -> None:
    step = make([1, 20, 0], [5, 40, 3], 4, 2, 16, P=16)
    k, v = step.k.nan_to_num(), step.v.nan_to_num()
    table, lens, variant = step.where["page_table"], step.where["kv_lens"], document_mask(40)
    document = torch.randint(0, 3, (3, 40), dtype=torch.int32)
    args = (step.q, k, v, step.q_starts, None, lens, table, 0.2, True, 5, 2.0, normal(4), random_mask(step, 1), None, None, None, 20)
    torch.library.opcheck(torch.ops.pyllm.variant_attention.default, (*args, variant.number, [document], 0))

    def call(document: Tensor) -> Tensor:
        where = {"scale": 0.2, "page_table": table, "kv_lens": lens}
        return ops.variant_attention(*args[:4], variant, **where, tensors={"document": document})[0]

    assert_same(torch.compile(call, fullgraph=True, backend="aot_eager")(document), call(document))


def test_errors() -> None:
    step = make([2], [2], 2, 2, 16)
    with pytest.raises(ValueError, match="variant bare has no reference, which is what runs on a CPU"):
        step.call(variant=AttentionVariant("bare", "s"))
    with pytest.raises(ValueError, match=r"reference of variant odd returned \(2, 2\), expected scores of shape \(2, 2, 2\)"):
        step.call(variant=AttentionVariant("odd", "s", reference=lambda s, at: s[0]))
    with pytest.raises(ValueError, match="variant_attention: tensors has no 'x'"):
        step.call(variant=AttentionVariant("v", "s", params=(Param("x", "float32"),), reference=lambda s, at, x: s))
    with pytest.raises(TypeError, match="variant_attention: variant is 'alibi', expected AttentionVariant"):
        step.call(variant="alibi")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="variant_attention: window is 0, expected more than 0"):
        step.call(variant=alibi(2), window=0)
    with pytest.raises(ValueError, match="variant_attention: kv_starts is missing"):
        ops.variant_attention(step.q, step.k, step.v, step.q_starts, alibi(2), scale=1.0)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("P", [0, 16])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled(name: str, P: int) -> None:
    step = make(CHUNKS, LENGTHS, 4, 2, 64, P=P, spare=3)
    variant, options = variant_of(name, step)
    for more in ({}, {"causal": False}, {"window": 40, "softcap": 3.0, "sinks": normal(4), "mask": random_mask(step, 2)}):
        poison_allocator(step.q.shape, BF16, "cuda")
        # ALiBi adds up to 200 / 4 to a score: the exponent's rounding grows with it
        compare(step.call("cuda", variant, **options, **more), step, variant, steep=4.0, **options, **more)


@pytest.mark.gpu
@needs_compiler
@pytest.mark.parametrize("name", VARIANTS)
def test_decode(name: str) -> None:
    """The form for few rows, over splits of the keys."""
    lengths = [*LENGTHS, 3000]
    step = make([min(L, 2) for L in lengths], lengths, 8, 2, 128, P=64, spare=1)
    variant, options = variant_of(name, step)
    got = step.call("cuda", variant, max_q=2, **options)
    compare(got, step, variant, steep=40.0 if name == "alibi" else 4.0, **options)
    for one, two in zip(got, step.call("cuda", variant, max_q=2, **options), strict=True):
        assert_same(one, two, "two runs")


@pytest.mark.gpu
@needs_compiler
def test_values_change_without_a_new_compilation() -> None:
    step = make(CHUNKS, LENGTHS, 4, 2, 64)
    for cap in (1.0, 2.0, 30.0):
        compare(step.call("cuda", soft_cap(cap)), step, soft_cap(cap))


@pytest.mark.gpu
@needs_compiler
def test_graph_capture() -> None:
    """The first call compiles, which a capture must not; later calls replay with what their tensors hold then."""
    step = make([1, 1], [40, 90], 4, 2, 64, P=16)
    fresh = AttentionVariant("fresh", "s + 0 * (float)token", reference=lambda s, at: s)
    moved, variant = step_on_gpu(step), document_mask(90)
    with pytest.raises(RuntimeError, match="call it once before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        moved.call("cuda", fresh)
    torch.cuda.synchronize()
    document = torch.zeros(2, 90, dtype=torch.int32)
    there = document.cuda()
    moved.call("cuda", variant, tensors={"document": there})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = moved.call("cuda", variant, tensors={"document": there})
    for fill in (lambda: document.zero_(), lambda: document.random_(0, 3)):
        fill()
        there.copy_(document)
        graph.replay()
        compare(got, step, variant, tensors={"document": document})


def step_on_gpu(step: Step) -> Step:
    tensors = (t.cuda() for t in (step.q, step.k, step.v, step.q_starts))
    return Step(*tensors, {n: t.cuda() for n, t in step.where.items()})


@pytest.mark.gpu
@needs_compiler
def test_errors_on_cuda() -> None:
    step = make([2], [2], 2, 2, 16)
    with pytest.raises(CompileError, match=r"wrong\.score\(1\): error"):
        step.call("cuda", AttentionVariant("wrong", "s + nothing"))
    with pytest.raises(RuntimeError, match="q is torch.float32, expected bfloat16 or float16"):
        step.wide().call("cuda", alibi(2))
    moved = step_on_gpu(step)
    with pytest.raises(RuntimeError, match="q_starts is on cpu, expected cuda:0"):
        ops.variant_attention(moved.q, moved.k, moved.v, step.q_starts, alibi(2), scale=1.0, **moved.where)
    odd = torch.zeros(2, 2, 17, dtype=BF16, device="cuda")[:, :, 1:]
    with pytest.raises(RuntimeError, match="q has strides .*, expected rows at multiples of 16 bytes"):
        ops.variant_attention(odd, moved.k, moved.v, moved.q_starts, alibi(2), scale=1.0, **moved.where)
