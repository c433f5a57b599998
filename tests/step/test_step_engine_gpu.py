"""The one kernel on a GPU: logits against fp64, bits that repeat, graphs over changing lengths, and the executor with it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from pyllm import LLM, KvCacheConfig, ops
from pyllm.api.params import SamplingParams
from pyllm.layers import Bound, Decoder, bind
from pyllm.layers.one_kernel import OneKernel, in_one_kernel, step_model
from pyllm.ops.step import step_workspace
from pyllm.runtime.engine import Engine
from tests.models.paged import Paged
from tests.step.cases import BF16, FORMATS, MODELS, Weights, arguments, assert_near, bound, copied, declare, decode_batch, exact, shape
from tests.step.test_decode_step import MODEL, WRONG
from tests.support.compare import assert_same

pytestmark = pytest.mark.gpu
LENS = {1: [70], 2: [64, 1], 3: [65, 0, 1000], 4: [4097, 63, 1, 257]}
SIZED = {"1b": "llama-3.2-1b", "8b": "llama-3.1-8b"}


@cache
def spec_of(name: str) -> Decoder:
    return shape(SIZED[name], num_hidden_layers=2, vocab_size=1024) if name in SIZED else declare(name, max_position_embeddings=8192)


@cache
def module_of(name: str, formats: str) -> Bound:
    return bound(spec_of(name), formats, "cuda")


def made(name: str, formats: str, lens: list[int], page: int = 64, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    spec = spec_of(name)
    batch = decode_batch(spec, lens, FORMATS[formats][1], page=page, device="cuda", seed=seed)
    model = step_model(module_of(name, formats))
    return batch, arguments(spec, batch, model, step_workspace(model, len(lens)))


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", [*MODELS, *SIZED])
@pytest.mark.parametrize("rows", LENS)
def test_logits_against_fp64(name: str, formats: str, rows: int) -> None:
    _, given = made(name, formats, LENS[rows])
    want, before = exact(given), [t.clone() for t in (*given["k_caches"], *given["v_caches"])]
    got = ops.decode_step(**given)
    live = torch.tensor(LENS[rows], device="cuda") > 0
    assert_near(got[live], want[live], len(given["model"].qkv), formats)
    slots = [int(s) for s in given["slots"] if s >= 0]
    for t, old in zip((*given["k_caches"], *given["v_caches"]), before, strict=True):
        flat, was = (x.view(torch.uint8).flatten(0, 1).flatten(1) for x in (t, old))
        changed = (flat != was).any(-1).nonzero().flatten().tolist()
        assert sorted(changed) == sorted(slots)
        stored = t.flatten(0, 1)[slots].float()
        assert stored.isfinite().all()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("rows", LENS)
def test_the_same_bits_again(formats: str, rows: int) -> None:
    _, given = made("1b", formats, LENS[rows])
    want = ops.decode_step(**given)
    for _ in range(20):  # a race between phases would show in some of them
        assert_same(ops.decode_step(**given), want, "logits")


def test_a_workspace_serves_fewer_rows_than_it_was_made_for() -> None:
    model = step_model(module_of("llama", "bf16"))
    workspace = step_workspace(model, 4)
    for rows in (4, 1, 3, 2, 4):
        _, given = made("llama", "bf16", LENS[rows])
        assert_same(ops.decode_step(**given | {"workspace": workspace}), ops.decode_step(**given), f"{rows} rows")


@pytest.mark.parametrize("page", [16, 32, 128])
def test_page_sizes(page: int) -> None:
    _, given = made("qwen3", "bf16", [page, page + 1, page - 1, 2000], page)
    want = exact(given)
    assert_near(ops.decode_step(**given), want, len(given["model"].qkv), "bf16")


@pytest.mark.parametrize("formats", ["bf16", "fp8-both"])
def test_a_graph_replays_over_changing_lengths(formats: str) -> None:
    each = ([5, 1], [300, 64], [65, 2000], [1, 1])
    steps = [made("1b", formats, lens, seed=i)[1] for i, lens in enumerate(each)]
    longest = max(g["page_table"].shape[1] for g in steps)
    held = {n: torch.zeros_like(steps[0][n]) for n in ("ids", "slots", "kv_lens", "rope_rows")}
    held["kv_lens"].fill_(0)
    held["slots"].fill_(-1)
    held["page_table"] = torch.zeros(2, longest, dtype=torch.int32, device="cuda")
    pages = max(g["k_caches"][0].shape[0] for g in steps)
    fixed = steps[0] | held
    for name in ("k_caches", "v_caches"):
        fixed[name] = [torch.zeros(pages, *t.shape[1:], dtype=t.dtype, device="cuda") for t in steps[0][name]]
    ops.decode_step(**fixed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.decode_step(**fixed)
    for i in (0, 1, 2, 3, 1, 2):
        given = made("1b", formats, each[i], seed=i)[1]
        for name, t in held.items():
            t.copy_(given[name]) if t.dim() == 1 else t[:, : given[name].shape[1]].copy_(given[name])
        for name in ("k_caches", "v_caches"):
            for to, new in zip(fixed[name], given[name], strict=True):
                to.view(torch.uint8)[: len(new)].copy_(new.view(torch.uint8))
        scales = {n: fixed[n] for n in ("k_scale", "v_scale")}
        graph.replay()
        assert_same(out, ops.decode_step(**given | scales), f"step {i}")


@cache
def oracle() -> Bound:
    """The 1B shape of two layers in fp32, of the weights rounded to bf16."""
    spec = spec_of("1b")
    weights = Weights(spec, "cuda", BF16)
    return bind(spec, {name: weights[name].float() for name in weights}, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_tokens_of_an_engine_with_graphs_are_what_the_model_says(n: int, overlap: bool) -> None:
    """Each token of the engine must be the best of fp32 logits of the same text, up to six times the mean error of a step's logits (see
    `assert_near`; 19 roundings, twice: keys of the text come from another path)."""
    spec, module = spec_of("1b"), in_one_kernel(module_of("1b", "bf16"), True, BF16)
    assert isinstance(module, OneKernel)
    engine = Engine(
        spec, module, device="cuda", dtype=BF16, max_batch=8, max_tokens=8192, chunk=512, graph_sizes=[1, 2, 4, 8], overlap=overlap
    )
    for kv in engine.kv.caches.values():  # what nobody stored must never be read
        kv.k[1:], kv.v[1:] = float("nan"), float("nan")
    g = torch.Generator().manual_seed(n)
    prompts = [torch.randint(0, 1024, (1 + 61 * i,), generator=g).tolist() for i in range(n)]
    requests = [engine.submit(p, SamplingParams(max_tokens=20 + 5 * i, ignore_eos=True)) for i, p in enumerate(prompts)]
    engine.run()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.error is None
        text = torch.tensor([*prompt, *request.token_ids])
        with torch.inference_mode():
            logits = oracle()(Paged(spec, 1, len(text), page=64, device="cuda").step([text[:-1]]))[len(prompt) - 1 :].double().cpu()
        chosen = logits.gather(1, text[len(prompt) :, None]).squeeze(1)
        allowed = 6 * (2 * 19 * 4.0**-8 * logits.square().mean(-1)).sqrt()
        assert (chosen >= logits.amax(-1) - allowed).all(), ((logits.amax(-1) - chosen) / allowed).max().item()


@pytest.mark.parametrize("case", [*WRONG, *MODEL])
def test_bad_arguments_are_errors_on_a_gpu_too(case: str) -> None:
    _, given = made("llama", "bf16", LENS[2])
    if case in WRONG:
        name, change, _ = WRONG[case]
        given |= {name: to_gpu(change(given[name]))}
    else:
        given |= {"model": replace(given["model"], **{n: to_gpu(v) for n, v in MODEL[case][0].items()})}
    with pytest.raises((RuntimeError, ValueError), match="^decode_step: "):
        ops.decode_step(**given)


def to_gpu(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [to_gpu(v) for v in value]
    return value.cuda() if isinstance(value, torch.Tensor) else value


def test_idle_rows_of_a_graph_touch_the_dummy_page_alone() -> None:
    spec, module = spec_of("1b"), in_one_kernel(module_of("1b", "bf16"), True, BF16)
    engine = Engine(spec, module, device="cuda", dtype=BF16, max_batch=4, max_tokens=1024, graph_sizes=[4])
    before = {s: (c.k[1:].clone(), c.v[1:].clone()) for s, c in engine.kv.caches.items()}
    with torch.inference_mode():
        engine._runner.graphs.run("tokens", 4)
    torch.cuda.synchronize()
    for s, c in engine.kv.caches.items():
        assert_same(c.k[1:], before[s][0], "k")
        assert_same(c.v[1:], before[s][1], "v")


def test_what_is_taken_unasked() -> None:
    module = module_of("1b", "bf16")
    assert isinstance(in_one_kernel(module, None, BF16), OneKernel)
    assert in_one_kernel(module, False, BF16) is module
    assert isinstance(in_one_kernel(module_of("1b", "fp8"), None, BF16), OneKernel)


@pytest.mark.parametrize("asked", [None, True])
def test_llm_takes_it_in_its_graphs(asked: bool | None) -> None:
    spec = spec_of("1b")
    config = KvCacheConfig(max_tokens=2048)
    with LLM(
        spec, weights=Weights(spec, "cuda", BF16), dtype="bf16", max_batch_size=4, one_kernel=asked, kv_cache_config=config, progress=False
    ) as llm:
        assert isinstance(llm._engine._runner._module, OneKernel)
        outs = llm.generate([[i, 2, 3] for i in range(7)], SamplingParams(max_tokens=30, ignore_eos=True))
        assert [o.outputs[0].length for o in outs] == [30] * 7  # steps of four, and of three and two at the end
        assert llm.get_stats()["used_pages"] == 0


def test_the_module_calls_the_op_for_decode_steps_alone() -> None:
    batch, given = made("llama", "bf16", LENS[2])
    module = module_of("llama", "bf16")
    one = OneKernel(module, 4)
    with torch.inference_mode():
        assert_same(one(copied(batch)), ops.decode_step(**given | {"workspace": step_workspace(given["model"], 4)}), "decode step")
        for other in (replace(batch, max_q=None), replace(batch, logit_rows=torch.tensor([1], device="cuda"))):
            assert_same(one(copied(other)), module(copied(other)), "another step")
