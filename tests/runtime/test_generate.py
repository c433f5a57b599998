"""Text in, text out: chat template, streaming that never splits a character, many prompts at once, and the command line."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from pyllm.cli import app
from pyllm.load.tokenizer import Tokenizer
from pyllm.runtime.engine import Engine
from pyllm.runtime.generate import generate, stream
from pyllm.runtime.model import LoadedModel, load_model, pick_device, pick_dtype
from pyllm.runtime.params import SamplingParams
from tests.runtime.fake import FakeModel, FakeSpec
from tests.runtime.tiny import CONFIG, EOS, IM_END, VOCAB, byte_tokenizer, save_tiny, tiny_weights

PROMPT = "Say it:"


def speaking(ids: list[int], max_positions: int = 400) -> LoadedModel:
    """A model that answers PROMPT with these token ids, then ends."""
    script = [*ids, EOS]
    model = FakeModel(choose=lambda history: script[min(len(history) - len(PROMPT), len(script) - 1)], vocab=VOCAB, nan_token=-1)
    spec = FakeSpec(max_positions, VOCAB)
    engine = Engine(spec, model, page_size=16, pages=60, eos_ids=(EOS,))
    return LoadedModel("speaking", spec, engine, SimpleNamespace(chat_template=None), Tokenizer(byte_tokenizer()))


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_are_whole_characters_and_together_the_text(text) -> None:
    ids = list(text.encode())
    model = speaking(ids)
    pieces = list(stream(model, PROMPT, SamplingParams(max_tokens=300)))
    assert "".join(pieces) == text == generate(model, PROMPT, SamplingParams(max_tokens=300)).text
    assert all(pieces)
    assert len(pieces) == len(text)
    assert model.engine.pool.used == 0


@pytest.mark.parametrize("max_tokens", range(1, 26))
def test_a_cut_at_any_token_shows_a_replacement_only_at_the_end(max_tokens) -> None:
    text = "👩‍👩‍👧‍👦你好"  # 31 bytes; joined by zero-width joiners
    pieces = list(stream(speaking(list(text.encode())), PROMPT, SamplingParams(max_tokens=max_tokens)))
    cut = text.encode()[:max_tokens].decode(errors="replace")
    assert "".join(pieces) == cut
    assert not any("\ufffd" in p for p in pieces[:-1])


def test_special_tokens_are_no_text() -> None:
    model = speaking([72, IM_END, 105])
    s = stream(model, PROMPT, SamplingParams(max_tokens=20))
    assert list(s) == ["H", "i"]
    assert (s.request.token_ids, s.request.finish_reason) == ([72, IM_END, 105, EOS], "stop")
    done = generate(model, PROMPT, SamplingParams(max_tokens=20, stop_token_ids=(IM_END,)))
    assert (done.text, done.token_ids, done.stop_reason) == ("H", (72, IM_END), IM_END)


def test_leaving_a_stream_early_aborts_it_and_others_go_on() -> None:
    model = speaking(list(b"abcdefgh"))
    first, second, never = (stream(model, PROMPT, SamplingParams(max_tokens=20)) for _ in range(3))
    for piece in first:
        assert piece == "a"
        break
    first.close()
    never.close()
    assert first.request.finish_reason == never.request.finish_reason == "abort"
    assert "".join(second) == "abcdefgh"
    assert model.engine.pool.used == 0


def test_an_error_while_running() -> None:
    model = speaking([1])
    model.engine._runner._module = lambda b: torch.full((len(b.logit_rows), VOCAB), torch.nan)
    with pytest.raises(RuntimeError, match="hold no finite number or a NaN"):
        list(stream(model, PROMPT))
    done = generate(model, [PROMPT, PROMPT])
    assert [(d.finish_reason, d.text) for d in done] == [("error", "")] * 2
    assert "NaN" in done[0].error


def test_many_prompts_one_refused_runs_none() -> None:
    model = speaking(list(b"ok"))
    assert [d.text for d in generate(model, [PROMPT] * 20)] == ["ok"] * 20
    assert generate(model, []) == []
    assert generate(model, [list(PROMPT.encode())])[0].text == "ok"
    texts = [d.text for d in generate(model, [PROMPT, PROMPT], [SamplingParams(max_tokens=1), SamplingParams()])]
    assert texts == ["o", "ok"]
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate(model, [PROMPT, ""])
    assert not model.engine.has_work
    assert model.engine.pool.used == 0
    with pytest.raises(ValueError, match="generate: 1 params for 2 prompts"):
        generate(model, [PROMPT, PROMPT], [SamplingParams()])
    with pytest.raises(ValueError, match="prompts is a list of numbers"):
        generate(model, [1, 2])
    for bad, text in ((None, "generate: prompts is None"), ([None], "encode: the prompt is None")):
        with pytest.raises(ValueError, match=text):
            generate(model, bad)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def test_the_chat_template_is_used_unless_raw(folder) -> None:
    model = load_model(folder, "cpu")
    chat = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert model.encode("hé") == model.tokenizer.encode(chat, add_special_tokens=False)
    assert model.encode("hé").count(IM_END) == 1
    assert model.encode("hé", raw=True) == list("hé".encode())
    assert model.encode([1, 2]) == [1, 2]
    assert model.engine.eos_ids == {EOS}


def test_load_model_options(folder) -> None:
    model = load_model(folder, "cpu", "bf16", max_batch=2, max_tokens=320, page_size=32)
    assert model.engine.pool.total == 10
    assert {c.k.dtype for c in model.engine.kv.caches.values()} == {torch.bfloat16}
    with pytest.raises(TypeError, match="batch_size"):
        load_model(folder, batch_size=3)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to(tmp_path) -> None:
    path, weights = save_tiny(tmp_path / "model"), tiny_weights(0)
    embed = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embed.clone()}, path / "model.safetensors")
    load_model(path, "cpu", pages=4)
    save_file({**weights, "lm_head.weight": embed + 1}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tie_word_embeddings is set, but lm_head\.weight differs"):
        load_model(path, "cpu", pages=4)


def test_a_warning_is_one_line(tmp_path) -> None:
    path = save_tiny(tmp_path / "model")
    (path / "config.json").write_text(json.dumps({**CONFIG, "foo": 1}))
    out = command("explain", path)
    assert (out.exit_code, out.stderr) == (0, "pyllm: warning: config: fields that are not read: foo\n")


def test_half_precision_on_a_cpu(folder) -> None:
    for dtype in ("bf16", "fp16"):
        done = generate(load_model(folder, "cpu", dtype, max_batch=2), ["hello", "x"], SamplingParams(max_tokens=5, ignore_eos=True))
        assert [len(d.token_ids) for d in done] == [5, 5]


def test_device_and_dtype() -> None:
    cuda = torch.device("cuda")
    assert pick_dtype(None, torch.device("cpu"), {"torch_dtype": "bfloat16"}) == torch.float32
    assert pick_dtype(None, cuda, {"torch_dtype": "float16"}) == torch.float16
    assert pick_dtype(None, cuda, {"dtype": "float32"}) == torch.bfloat16
    assert pick_dtype("float16", cuda, {}) == pick_dtype(torch.float16, cuda, {}) == torch.float16
    for bad in ("fp8", torch.float64):
        with pytest.raises(ValueError, match="expected one of fp32, bf16, fp16"):
            pick_dtype(bad, cuda, {})
    for bad in ("tpu", "meta", "cuda:99"):
        with pytest.raises(ValueError, match=f"device is '{bad}'"):
            pick_device(bad)


def command(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_the_generate_command(folder) -> None:
    out = command("generate", folder, "hello", "--max-tokens", 12, "--device", "cpu")
    assert out.exit_code == 0, out.output
    want = generate(load_model(folder, "cpu"), "hello", SamplingParams(max_tokens=12))
    assert out.stdout == want.text + "\n"
    speeds, where = out.stderr.strip().splitlines()
    assert speeds.startswith(f"prefill {len(want.prompt_token_ids)} tokens, ")
    assert f"; decode {len(want.token_ids)} tokens, " in speeds
    assert where.startswith("kernels: CPU references")
    quiet = command(
        "generate", folder, "hello", "--raw", "--max-tokens", 3, "--seed", 1, "--temperature", 1, "--no-stats", "--device", "cpu"
    )
    assert (quiet.exit_code, quiet.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["generate", "/no/such/model", "x"], "/no/such/model: no such file or directory"),
        (["generate", "MODEL", "x", "--temperature", "-1"], "SamplingParams: temperature is -1.0"),
        (["generate", "MODEL", "x", "--max-tokens", "0"], "SamplingParams: max_tokens is 0"),
        (["generate", "MODEL", "x", "--device", "tpu"], "device is 'tpu', expected cpu, cuda or cuda:N"),
        (["generate", "MODEL", "x", "--device", "cpu", "--dtype", "int3"], "dtype is 'int3'"),
        (["generate", "", "x"], "model is '', expected a directory"),
        (["generate", "MODEL", "x", "--device", "cpu:3"], "device is 'cpu:3', expected cpu, cuda or cuda:N"),
        (["generate", "MODEL", "", "--raw", "--device", "cpu"], "submit: the prompt is empty"),
        (["generate", "MODEL", "y" * 200, "--raw", "--device", "cpu"], "submit: the prompt has 200 tokens, expected at most 159"),
        (["explain", "MODEL", "--gpu", "abacus"], "explain: gpu is 'abacus'"),
        (["explain", "MODEL", "--tp", "3"], "cannot be cut for tp=3"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(folder, args, text) -> None:
    out = command(*(folder if a == "MODEL" else a for a in args))
    assert out.exit_code == 2
    assert out.stderr.startswith("pyllm: ")
    assert text in out.stderr
    assert out.stderr.count("\n") == 1
    assert out.stdout == ""


def test_usage_errors_and_traceback(folder) -> None:
    assert command("generate", folder).exit_code == 2
    assert command("generate", folder, "x", "--tempurature", 1).exit_code == 2
    out = command("--traceback", "generate", "/no/such/model", "x")
    assert isinstance(out.exception, ValueError)


def test_explain_and_env_and_help(folder) -> None:
    out = command("explain", folder, "--batch", 2, "--context", 100)
    assert out.exit_code == 0, out.output
    assert "2 x 1 new tokens, 100 keys each, tp=1" in out.stdout
    assert json.loads(command("explain", folder, "--json").stdout)["totals"]["ops"] > 10
    out = command("env")
    assert torch.__version__ in out.stdout
    assert "kernels" in out.stdout
    out = command("--help")
    assert all(word in out.stdout for word in ("generate", "explain", "env", "demo"))
