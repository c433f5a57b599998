"""explain against golden files: a lost fusion, a changed kernel or a wrong byte count shows in review. `pytest --update-golden`
rewrites them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pyllm.layers import Decoder, bind
from pyllm.models import spec_from_config
from pyllm.plan.explain import explain
from tests.layers.custom import mine, random_state
from tests.layers.test_custom import IDS
from tests.models.paged import Paged

GOLDEN = Path(__file__).parent / "golden"
LLAMA_8B = dict(architectures=["LlamaForCausalLM"], hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
num_key_value_heads=8,
                num_hidden_layers=32, vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5)  # fmt: skip
GEMMA_2B = dict(architectures=["Gemma2ForCausalLM"], hidden_size=2304, intermediate_size=9216, num_attention_heads=8,
num_key_value_heads=4, head_dim=256,
                num_hidden_layers=26, vocab_size=256000, max_position_embeddings=8192, sliding_window=4096, query_pre_attn_scalar=256,
                attn_logit_softcapping=50.0, final_logit_softcapping=30.0, tie_word_embeddings=True)  # fmt: skip


def llama() -> Decoder:
    return spec_from_config(LLAMA_8B)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-8b": (llama, {}),
    "llama-8b-tp2-batch16": (llama, {"tp": 2, "batch": 16, "context": 4096}),
    "llama-8b-prefill": (llama, {"new": 1024}),
    "gemma2-2b": (lambda: spec_from_config(GEMMA_2B), {"batch": 4, "context": 8192}),
    "custom": (mine, {"batch": 2, "context": 64}),
    "custom-unfused": (mine, {"batch": 2, "context": 64, "fuse": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, request: pytest.FixtureRequest) -> None:
    make, options = CASES[case]
    got, path = str(explain(make(), **options)), GOLDEN / f"{case}.txt"
    if request.config.getoption("update_golden"):
        path.write_text(got)
    assert got == path.read_text(), f"{path.name} differs; look at the change, then run pytest --update-golden"


def test_json_says_what_the_table_says() -> None:
    e = explain(llama(), batch=2)
    data = json.loads(e.json())
    assert data["workload"]["batch"] == 2
    assert len(data["rows"]) == len(e.rows) == data["totals"]["ops"]
    assert data["totals"]["bytes"] == sum(r["bytes"] for r in data["rows"])


def test_weight_and_kv_bytes_of_llama_8b() -> None:
    """8.03 G parameters; 32 layers x 8 heads x 128 x (K and V) x 2 bytes. The head is read whole, the embedding one row a token."""
    e = explain(llama())
    parameters = 2 * 128256 * 4096 + 32 * (4096 * (6144 + 4096 + 3 * 14336))
    norms = 65 * 4096
    assert e.weight_bytes == 2 * parameters + 4 * norms
    assert e.kv_bytes_per_token == 32 * 8 * 128 * 2 * 2
    linear = sum(r.bytes for r in e.rows if r.op == "linear")
    assert linear - 2 * (parameters - 128256 * 4096) < 1e7


def test_bytes_and_rate_of_an_fp32_model() -> None:
    single, half = (explain(llama(), batch=4096, dtype=d) for d in (torch.float32, torch.bfloat16))
    norms = 4 * 65 * 4096
    assert single.weight_bytes - norms == 2 * (half.weight_bytes - norms)
    assert single.kv_bytes_per_token == 2 * half.kv_bytes_per_token
    rows = [next(r for r in e.rows if r.op == "linear") for e in (single, half)]
    assert rows[0].bytes == 2 * rows[1].bytes
    assert rows[0].floor_us == rows[0].flops / single.ctx.gpu.fp32 * 1e6 > rows[1].floor_us


def test_windows_and_causality_in_attention_flops() -> None:
    def attention(**options: Any) -> list[int]:
        return [r.flops for r in explain(mine(), **options).rows if r.op.endswith("_attention")]

    assert attention(context=64)[:4] == [4 * 4 * 16 * 4] * 3 + [4 * 4 * 16 * 64]
    assert attention(context=8, new=8)[3] == 4 * 4 * 16 * sum(range(1, 9))
    assert attention(context=8, new=8)[0] == 4 * 4 * 16 * (1 + 2 + 3 + 4 * 5)


@pytest.mark.parametrize("fuse", [True, False])
def test_explain_lists_the_ops_that_run(fuse: bool) -> None:
    """Ops seen by the dispatcher in one step, in order, against the rows. A MoE's own activation runs inside its op."""
    seen: list[str] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "pyllm":
                seen.append(func._schema.name.split("::")[1])
            return func(*args, **(kwargs or {}))

    spec = mine()
    bound, batch = bind(spec, random_state(spec), fuse=fuse), Paged(spec, 1, len(IDS)).step([IDS])
    with Watch():
        bound(batch)
    rows = [r.op for r in explain(spec, context=len(IDS), new=len(IDS), dtype=torch.float32, fuse=fuse).rows]
    assert seen == [op for op in rows if op not in ("add", "sample_tokens")]


def test_errors() -> None:
    for options, message in (
        ({"gpu": "b200"}, "gpu is 'b200', expected one of h200"),
        ({"batch": 0}, "batch is 0, expected a positive integer"),
        ({"context": 3, "new": 4}, "context is 3, expected at least new=4"),
    ):
        with pytest.raises(ValueError, match=f"explain: {message}"):
            explain(llama(), **options)
