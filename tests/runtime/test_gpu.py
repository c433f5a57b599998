"""CUDA graphs and overlap on a GPU: the same tokens as eager steps of the same padded size, at each batch size around a bucket's end."""

from __future__ import annotations

import pytest
import torch

from pyllm import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.layers import bind
from pyllm.models import spec_from_config
from pyllm.runtime.engine import Engine
from pyllm.runtime.graph import Graphs, graph_sizes

pytestmark = pytest.mark.gpu
MAX_BATCH = 33
CONFIG = {k: v for k, v in SHAPES["llama-3.2-1b"].items() if k != "rope_scaling"} | {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
}  # fmt: skip
EACH = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "seed": 7, "logprobs": 2},
    "shaped": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 3, "logit_bias": {5: 2.0}},
}


@pytest.fixture(scope="module")
def model():
    spec = spec_from_config(CONFIG)
    return spec, bind(spec, DummyWeights(spec, "cuda", torch.bfloat16), device="cuda", dtype=torch.bfloat16)


def make(model, **options) -> Engine:
    common = {
        "device": "cuda",
        "dtype": torch.bfloat16,
        "max_batch": MAX_BATCH,
        "max_tokens": 16384,
        "chunk": 2048,
        "reuse": False,
        "mixed_sizes": [64, 512],
    }
    return Engine(*model, **(common | options))


@pytest.fixture(scope="module")
def engines(model) -> dict[str, Engine]:
    """Padding alone may change bits (another matrix product is chosen), so each has the same sizes."""
    out = {"graphs": make(model), "graphs without overlap": make(model, overlap=False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Graphs, "capture", lambda *args: None)
        out |= {"eager": make(model), "eager without overlap": make(model, overlap=False)}
    for engine in out.values():
        for cache in engine.kv.caches.values():  # what nobody stored must never be read
            cache.k[1:], cache.v[1:] = float("nan"), float("nan")
    return out


@pytest.mark.parametrize("n", sorted({s + d for s in graph_sizes(MAX_BATCH) for d in (-1, 0, 1) if 0 < s + d <= MAX_BATCH}))
@pytest.mark.parametrize("how", EACH)
def test_graphs_and_overlap_change_nothing(engines, n, how) -> None:
    g = torch.Generator().manual_seed(n)
    prompts = [torch.randint(0, 1024, (1 + 3 * i % 70,), generator=g).tolist() for i in range(n)]
    got = {}
    for name, engine in engines.items():
        each = [SamplingParams(max_tokens=6 + i % 7, ignore_eos=True, **EACH[how]) for i in range(n)]
        requests = [engine.submit(p, s) for p, s in zip(prompts, each, strict=True)]
        engine.run()
        assert [r.error for r in requests] == [None] * n
        assert engine.pool.used == 0
        got[name] = [(r.token_ids, r.logprobs) for r in requests]
    assert all(tokens == got["eager"] for tokens in got.values()), [name for name, t in got.items() if t != got["eager"]]


def test_steps_of_a_full_chunk_come_from_a_graph(model, monkeypatch) -> None:
    """12 prompts of 100 to 1200 tokens: two or three such steps, the rest of the prompts without a graph."""
    g = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 1024, (100 + 100 * i,), generator=g).tolist() for i in range(12)]
    options = {"max_length": 2048, "mixed_sizes": [64, 2048], "graph_sizes": [MAX_BATCH]}
    spec = spec_from_config(CONFIG | {"max_position_embeddings": 2048})
    module = bind(spec, DummyWeights(spec, "cuda", torch.bfloat16), device="cuda", dtype=torch.bfloat16)
    got, replayed = [], []
    for graphs in (True, False):
        if not graphs:
            monkeypatch.setattr(Graphs, "capture", lambda *args: None)
        engine = make((spec, module), **options)
        for cache in engine.kv.caches.values():
            cache.k[1:], cache.v[1:] = float("nan"), float("nan")
        run = engine._runner.graphs.run
        monkeypatch.setattr(engine._runner.graphs, "run", lambda kind, n, run=run: (replayed.append((kind, n)), run(kind, n))[1])
        requests = [engine.submit(p, SamplingParams(max_tokens=9, ignore_eos=True)) for p in prompts]
        engine.run()
        assert [r.error for r in requests] == [None] * len(prompts)
        got.append([r.token_ids for r in requests])
    assert got[0] == got[1]
    assert sum(kind == "mixed" and n[0] == 2048 for kind, n in replayed) >= 2 * 2


def test_graphs_write_idle_rows_to_the_dummy_page_alone(model) -> None:
    engine = make(model, max_batch=8, graph_sizes=[8])
    before = {s: (c.k[1:].clone(), c.v[1:].clone()) for s, c in engine.kv.caches.items()}
    with torch.inference_mode():
        engine._runner.graphs.run("tokens", 8)
    for s, c in engine.kv.caches.items():
        assert torch.equal(c.k[1:], before[s][0])
        assert torch.equal(c.v[1:], before[s][1])


def test_llm_sizes_its_cache_by_the_memory_that_is_left(model) -> None:
    config = KvCacheConfig(free_gpu_memory_fraction=0.1)
    free = torch.cuda.mem_get_info()[0]
    with LLM(
        model[0], load_format="dummy", dtype="bf16", max_batch_size=64, max_seq_len=100_000 // 256, kv_cache_config=config,
        cuda_graph_config=CudaGraphConfig(batch_sizes=[1, 64]),
    ) as llm:  # fmt: skip
        assert llm._engine.kv.bytes <= free * 0.1
        outs = llm.generate([[i, 2, 3] for i in range(100)], SamplingParams(max_tokens=20, ignore_eos=True))
        assert all(o.outputs[0].length == 20 for o in outs)
        assert llm.get_stats()["used_pages"] == 0
