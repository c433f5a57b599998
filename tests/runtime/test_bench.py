"""`pyllm bench` and `pyllm plan`: datasets, the report and its arithmetic, peers, the knee of a curve, the memory plan."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.api.model import quant_plan
from pyllm.cli import app
from pyllm.layers import bind, plan
from pyllm.measure import bench, peers
from pyllm.measure.curve import picture
from pyllm.models import spec_from_config
from pyllm.plan.memory import OVERHEAD, memory_plan, weight_bytes
from tests.runtime.tiny import CONFIG, save_tiny, tiny_spec

SMALL = ("--max-batch-size", 4, "--device", "cpu")


def command(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def test_a_report_of_random_weights_and_prompts(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))  # no weights, no tokenizer
    path = tmp_path / "report.json"
    args = ("--load-format", "dummy", "--num-requests", 9, "--input-len", 20, "--output-len", 6, "--report-json", path)
    out = command("bench", "throughput", tmp_path, *args, *SMALL)
    assert out.exit_code == 0, out.output
    assert "20.0 in, 6.0 out" in out.stdout
    r = json.loads(path.read_text())
    assert r["engine"] | {"model": ""} == {
        "model": "", "version": r["engine"]["version"], "backend": "pyllm", "dtype": "float32", "kv_cache_dtype": "float32",
        "quantization": None, "load_format": "dummy",
    }  # fmt: skip
    assert (r["world_info"]["max_batch_size"], r["world_info"]["scheduling_policy"]) == (4, "GUARANTEED_NO_EVICT")
    q, p, s = r["request_info"], r["performance"], r["streaming_metrics"]
    assert (q["num_requests"], q["avg_input_length"], q["avg_output_length"]) == (9, 20, 6)
    seconds = p["total_latency_ms"] / 1e3
    assert p["system_output_throughput_tok_s"] == pytest.approx(54 / seconds)
    assert p["system_total_throughput_tok_s"] == pytest.approx((54 + 180) / seconds)
    assert p["request_throughput_req_s"] == pytest.approx(9 / seconds)
    for spread in (p["request_latency_percentiles_ms"], s["ttft_percentiles"], s["tpot_percentiles"], s["itl_percentiles"]):
        assert 0 <= spread["minimum"] <= spread["p50"] <= spread["p90"] <= spread["p99"] <= spread["maximum"]
    assert s["avg_ttft_ms"] + 5 * s["avg_tpot_ms"] == pytest.approx(p["avg_request_latency_ms"])
    assert p["steps"] >= 3 * 6


def test_a_dataset_of_texts_and_ids(folder, tmp_path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [{"task_id": i, "prompt": "abc" * (i + 1), "output_tokens": 2 + i} for i in range(3)]
    rows.append({"task_id": 3, "input_ids": [1, 2, 3], "output_tokens": 9})
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    out = command("bench", "throughput", folder, "--dataset", path, *SMALL)
    assert out.exit_code == 0, out.output
    assert f"{(3 + 6 + 9 + 3) / 4:.1f} in, {(2 + 3 + 4 + 9) / 4:.1f} out" in out.stdout
    assert [i.output_tokens for i in bench.read_dataset(path, 2)] == [2, 3]
    for bad, text in (("{", "line 1: "), ('{"prompt": "x"}', "line 1: expected an object with prompt"), ("", "no requests")):
        path.write_text(bad)
        out = command("bench", "throughput", folder, "--dataset", path, *SMALL)
        assert (out.exit_code, text in out.stderr) == (2, True), out.stderr


def test_latency_and_a_sweep(folder) -> None:
    out = command("bench", "latency", folder, "--num-requests", 2, "--input-len", 5, "--output-len", 3, "--device", "cpu")
    assert out.exit_code == 0, out.output
    assert "TPOT ms" in out.stdout
    out = command("bench", "throughput", folder, "--num-requests", 6, "--input-len", 5, "--output-len", 3, "--sweep", "1,2,4", *SMALL)
    assert out.exit_code == 0, out.output
    table, drawn = out.stdout.split("\n\n")
    assert [line.split()[0] for line in table.splitlines()] == ["concurrency", "1", "2", "4"]
    assert table.count("<- knee") == 1
    assert drawn.count(" knee") == drawn.count("#") == 1
    assert max(map(len, drawn.splitlines())) <= 80


def test_the_picture_of_a_curve() -> None:
    lines = picture([(1, 25), (2, 100), (4, 100)], [1, 8, 64], 1, "TPOT ms")
    assert lines[0].strip() == "tokens/s"
    assert [line.index("|") for line in lines[1:13]] == [11] * 12
    top, corner = lines[1][12:], lines[-1]
    assert (lines[1].split()[0], top.index("#"), top.index("*"), corner.split()) == ("100", 28, 55, ["0", "4.00", "TPOT", "ms"])
    assert top.split() == ["#", "8", "knee", "*", "64"]
    low = lines[9][12:]  # a quarter of the way up, and of the way across
    assert (low.index("*"), low.split()) == (14, ["*", "1"])
    assert all(not line[12:].strip() for line in (*lines[2:9], *lines[10:13]))
    alone = picture([(3.0, 7.0)], [5], 0, "TTFT ms")
    assert alone[1].split() == ["7", "|", "#", "5", "knee"]
    close = "\n".join(picture([(1, 1), (1, 1.01), (1.01, 1)], [1, 2, 3], 0, "x"))
    assert (close.count("#"), " 1 knee" in close) == (1, True)  # points in one place keep the knee
    wide = picture([(1, 1), (2, 2)], [1, 1024], 1, "x")
    assert wide[1].endswith("# 1024 knee") and max(map(len, wide)) <= 80


def test_the_knee_is_where_the_curve_bends() -> None:
    assert bench.knee([(1, 10), (2, 100), (10, 110), (30, 111)]) == 1
    assert bench.knee([(1, 10)]) == 0


@pytest.mark.parametrize(
    ("options", "drafts"),
    [((), False), (("--draft", "ngram"), True), (("--draft", "self", "--draft-len", 2), True), (("--deterministic",), False)],
)
def test_guessing_and_the_deterministic_mode(folder, tmp_path, options, drafts) -> None:
    path = tmp_path / "report.json"
    sizes = ("--input-len", 20, "--output-len", 40, "--num-requests", 2, "--max-num-tokens", 64, "--device", "cpu", "--report-json", path)
    out = command("bench", "latency", folder, *sizes, *(folder if o == "self" else o for o in options))
    assert out.exit_code == 0, out.output
    stats = json.loads(path.read_text())["decoding_stats"]
    assert (stats is not None) == drafts
    if drafts:
        assert stats["acceptance_rate"] == stats["accepted_tokens"] / stats["drafted_tokens"]
        assert "self" not in options or stats["acceptance_rate"] > 0.9  # a model guesses what it says itself


def test_against_a_peer(folder, monkeypatch, tmp_path) -> None:
    args = ("--num-requests", 3, "--input-len", 5, "--output-len", 4, "--load-format", "dummy", *SMALL)
    out = command("bench", "throughput", folder, *args, "--against", "hf")
    assert out.exit_code == 0, out.output
    assert "times as fast" in out.stdout
    monkeypatch.setattr(peers, "installed", lambda name: False)
    assert "not installed" in command("bench", "throughput", folder, *args, "--against", "vllm").stdout
    monkeypatch.setattr("pyllm.api.llm.LLM.__init__", lambda *a, **k: pytest.fail("a model was loaded"))
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "abc", "output_tokens": 2}')
    for model, options, text in (
        (folder, (*args, "--against", "abacus"), "--against is 'abacus', expected one of hf, vllm"),
        (folder, ("--dataset", texts, "--against", "hf"), "--against needs prompts as token ids"),
        (folder, (*args, "--against", "vllm", "--kv-cache-dtype", "int8"), "int8, which it has not, expected auto or fp8"),
    ):
        out = command("bench", "throughput", model, *options)
        assert (out.exit_code, text in out.stderr, out.stderr.count("\n")) == (2, True, 1), out.output
    items = bench.synthetic(1, 2, 2, 10, 0)
    for model in ("demo", str(tmp_path / "model.gguf"), str(tmp_path)):
        with pytest.raises(ValueError, match="--against needs a Hugging Face directory, or --load-format dummy; MODEL is"):
            peers.check_peers(["hf"], model, items, "auto", "auto")
        peers.check_peers([], model, items, "auto", "int8")
        peers.check_peers(["hf"], model, items, "dummy", "int8")


def test_a_peer_is_compared_at_its_own_concurrency_and_quantization(folder, monkeypatch, tmp_path) -> None:
    """Of a sweep: what both do at the last one, even where another was faster. vLLM quantizes as pyllm does; transformers cannot."""
    asked = []

    def speed(name, model, config, items, concurrency, options) -> float:
        asked.append((name, concurrency, options["quantization"], options["kv_cache_dtype"]))
        return 10.0

    def measured(llm, items, concurrency, **rest):
        spread = {"average": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
        s = {"avg_ttft_ms": 1.0, "avg_tpot_ms": 1.0 * concurrency, "ttft_percentiles": spread}
        return {"performance": {"system_output_throughput_tok_s": 40.0 / concurrency}, "streaming_metrics": s}

    monkeypatch.setattr(peers, "tokens_per_second", speed)
    monkeypatch.setattr(peers, "installed", lambda name: True)
    monkeypatch.setattr(bench, "measure", measured)
    path = tmp_path / "report.json"
    args = ("--num-requests", 3, "--input-len", 5, "--output-len", 4, "--load-format", "dummy", *SMALL, "--report-json", path)
    options = ("--sweep", "1,2", "--quantization", "fp8", "--kv-cache-dtype", "fp8", "--against", "vllm", "--against", "hf")
    out = command("bench", "throughput", folder, *args, *options)
    assert out.exit_code == 0, out.output
    assert asked == [("vllm", 2, "fp8", "fp8"), ("hf", 2, "fp8", "fp8")]
    lines = [line for line in out.stdout.splitlines() if "times as fast" in line]
    assert "tokens/s at concurrency 2; pyllm is 2.00 times" in lines[0]
    assert "tokens/s in float32 with a cache of float32; pyllm is 2.00 times" in lines[1]
    first, last = json.loads(path.read_text())
    assert "against" not in first and last["against"]["vllm"]["ratio"] == 2.0


def test_dummy_weights_are_all_that_a_declaration_asks_for() -> None:
    spec = tiny_spec()
    weights = DummyWeights(spec)
    assert set(weights) == {name for item in plan(spec) for name in item.sources}
    assert torch.equal(weights["model.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    bind(spec, weights)  # strict both ways
    assert not torch.equal(weights["model.layers.0.self_attn.k_proj.weight"], weights["model.layers.0.self_attn.v_proj.weight"])
    for config in SHAPES.values():
        DummyWeights(spec_from_config(config))


def test_the_memory_plan_adds_up() -> None:
    spec = spec_from_config(SHAPES["llama-3.1-8b"])
    assert weight_bytes(spec, torch.bfloat16) == pytest.approx(8.03e9 * 2, rel=0.01)  # 8.03 billion parameters, as published
    total = 141 * 10**9
    made = memory_plan(spec, total, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, tokens=8192, max_batch=256, fraction=0.9)
    assert made.kv_token == 32 * 2 * 8 * 128  # layers, K and V, heads, dims; one byte each
    room = int((total - made.weights - made.activations - OVERHEAD) * 0.9)
    page = 64 * made.kv_token
    assert (made.kv, made.windows, made.enough) == (room // page * page, 0, False)  # whole pages of 64 tokens, and one is the dummy page
    assert made.tokens == made.kv // made.kv_token - 64
    assert math.isclose(made.activations, 2 * 1.1e9, rel_tol=0.5)  # in a graph and without one


def test_fp8_halves_the_weights_and_runs(folder) -> None:
    spec = spec_from_config(SHAPES["llama-3.1-8b"])
    head, embed = 128256 * 4096 * 2, 128256 * 4096 * 2
    plain, fp8 = (weight_bytes(spec, torch.bfloat16, quant_plan(q)) for q in ((), "fp8"))
    assert fp8 - head - embed == pytest.approx((plain - head - embed) / 2, rel=0.01)
    args = ("--num-requests", 2, "--input-len", 5, "--output-len", 3, "--quantization", "fp8", "--load-format", "dummy")
    out = command("bench", "throughput", folder, *args, *SMALL)
    assert out.exit_code == 0, out.output
    out = command("bench", "throughput", folder, *args[:-4], "--quantization", "int1", *SMALL)
    assert (out.exit_code, "quant is 'int1', expected 'fp8', 'fp8-block'" in out.stderr) == (2, True)


def test_the_plan_command(folder, tmp_path) -> None:
    out = command("plan", "llama-3.1-8b", "--memory", 141, "--kv-cache-dtype", "fp8")
    assert (out.exit_code, "tokens of 64 KiB each" in out.stdout) == (0, True), out.output
    assert command("plan", folder, "--memory", 1e-12).exit_code == 1
    out = command("plan", "llama-3.1-70b", "--memory", 100)
    assert (out.exit_code, "does not fit" in out.stdout) == (1, True)
    config = Path(folder) / "config.json"
    alone = tmp_path / "config.json"
    alone.write_bytes(config.read_bytes())
    plans = [command("plan", where, "--memory", 10) for where in (folder, config, alone, tmp_path)]
    assert (plans[0].exit_code, {p.stdout for p in plans}) == (0, {plans[0].stdout})
    out = command("plan", "llama-3.1-8b", "--memory", 141, "--max-batch-size", 4, "--max-seq-len", 1000)
    assert "4,096 tokens of 128 KiB each, all that the requests can have" in out.stdout  # 16 pages of 64 for each
    out = command("plan", "llama-3.1-8b", "--max-seq-len", 131073)
    assert (out.exit_code, "--max-seq-len is 131073, expected 1 to the model's context of 131072" in out.stderr) == (2, True)
    out = command("plan", "/no/such/model")
    assert (out.exit_code, "no such file" in out.stderr) == (2, True)
    assert command("plan", "llama-3.1-8b", "--kv-cache-dtype", "int2").exit_code == 2
