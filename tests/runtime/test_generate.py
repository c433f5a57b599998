"""Text in, text out: streams that never split a character, the chat template, devices and dtypes, and the command line."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from pyllm import LLM, KvCacheConfig, SamplingParams
from pyllm.api.model import load_parts, pick_device, pick_dtype
from pyllm.cli import app
from tests.runtime.test_llm import speaking
from tests.runtime.tiny import CONFIG, EOS, IM_END, save_tiny, tiny_weights


def pieces(llm: LLM, params: SamplingParams) -> list[str]:
    return [piece for look in llm.generate_async("1234", params, streaming=True) if (piece := look.outputs[0].text_diff)]


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_are_whole_characters_and_together_the_text(text) -> None:
    params = SamplingParams(max_tokens=300)
    with speaking(text) as llm:
        got = pieces(llm, params)
        assert "".join(got) == text == llm.generate("1234", params).outputs[0].text
        assert len(got) <= len(text)


def test_special_tokens_are_no_text() -> None:
    with speaking([72, IM_END, 105]) as llm:
        out = llm.generate("1234", SamplingParams(max_tokens=20)).outputs[0]
        assert (out.text, out.token_ids, out.finish_reason, out.stop_reason) == ("Hi", [72, IM_END, 105, EOS], "stop", EOS)
        out = llm.generate("1234", SamplingParams(max_tokens=20, stop_token_ids=IM_END)).outputs[0]
        assert (out.text, out.token_ids, out.stop_reason) == ("H", [72, IM_END], IM_END)
        out = llm.generate("1234", SamplingParams(max_tokens=20, skip_special_tokens=False)).outputs[0]
        assert out.text == "H<|im_end|>i"


def test_an_error_while_running() -> None:
    with speaking("x") as llm:
        llm._engine._runner._module = lambda b: torch.full((len(b.kv_lens), 264), torch.nan)
        for out in llm.generate(["1234", "1234"]):
            assert (out.outputs[0].finish_reason, out.outputs[0].text) == ("error", "")
            assert "hold no finite number or a NaN" in out.outputs[0].error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def open_tiny(path, **options) -> LLM:
    return LLM(path, **({"device": "cpu", "max_batch_size": 2, "kv_cache_config": KvCacheConfig(max_tokens=640)} | options))


def test_the_chat_template(folder) -> None:
    chat = "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    with open_tiny(folder) as llm:
        ids = llm.encode_chat([{"role": "user", "content": "hé"}])
        assert ids == llm.tokenizer.encode(chat, add_special_tokens=False)
        assert ids.count(IM_END) == 1
        assert llm.generate("hé", SamplingParams(max_tokens=1)).prompt_token_ids == list("hé".encode())
        assert llm._engine.eos_ids == {EOS}
    with open_tiny(folder, skip_tokenizer_init=True) as llm, pytest.raises(ValueError, match="no chat template without"):
        llm.encode_chat([])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("hello", "messages is 'hello', expected a list of objects with role and content"),
        ({"role": "user", "content": "a"}, "messages is {'role': .*, expected a list"),
        (None, "messages is None, expected a list"),
        (["hello"], r"messages\[0\] is 'hello', expected an object with role and content"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] has the role None, expected a text, as user or assistant"),
        ([{"role": 5, "content": "b"}], r"messages\[0\] has the role 5, expected a text"),
        ([{"role": "", "content": "b"}], r"messages\[0\] has the role '', expected a text"),
        ([{"role": "user"}], r"messages\[0\] has the content None, expected a text or a list of parts \(none beside tool_calls\)"),
        ([{"role": "user", "content": 5}], r"messages\[0\] has the content 5, expected a text"),
    ],
)
def test_wrong_conversations(folder, messages, text) -> None:
    with open_tiny(folder) as llm:
        with pytest.raises(ValueError, match=f"LLM.encode_chat: {text}"):
            llm.encode_chat(messages)
        calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
        assert llm.encode_chat(({"role": "user", "content": "a"}, calls))


def test_sizes_and_dtypes(folder) -> None:
    config = KvCacheConfig(max_tokens=320, tokens_per_block=32)
    with open_tiny(folder, dtype="bf16", kv_cache_config=config) as llm:
        assert llm.get_stats()["total_pages"] == 10
        assert {c.k.dtype for c in llm._engine.kv.caches.values()} == {torch.bfloat16}
        assert llm._engine.chunk == 512


def test_a_head_that_differs_from_the_embedding_it_is_tied_to(tmp_path) -> None:
    path, weights = save_tiny(tmp_path / "model"), tiny_weights(0)
    embed = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embed.clone()}, path / "model.safetensors")
    load_parts(path, device="cpu")
    save_file({**weights, "lm_head.weight": embed + 1}, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tie_word_embeddings is set, but lm_head\.weight differs"):
        load_parts(path, device="cpu")


def test_a_warning_is_one_line(tmp_path) -> None:
    path = save_tiny(tmp_path / "model")
    (path / "config.json").write_text(json.dumps({**CONFIG, "foo": 1}))
    out = command("explain", path)
    assert (out.exit_code, out.stderr) == (0, "pyllm: warning: config: fields that are not read: foo\n")


def test_half_precision_on_a_cpu(folder) -> None:
    for dtype in ("bf16", "fp16"):
        with open_tiny(folder, dtype=dtype) as llm:
            done = llm.generate(["hello", "x"], SamplingParams(max_tokens=5, ignore_eos=True))
            assert [d.outputs[0].length for d in done] == [5, 5]


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
    with open_tiny(folder) as llm:
        want = llm.generate(llm.encode_chat([{"role": "user", "content": "hello"}]), SamplingParams(max_tokens=12))
    assert out.stdout == want.outputs[0].text + "\n"
    speeds, where = out.stderr.strip().splitlines()
    assert speeds.startswith(f"prefill {len(want.prompt_token_ids)} tokens, ")
    assert f"; decode {want.outputs[0].length} tokens, " in speeds
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
    assert command("explain", folder / "config.json").stdout == command("explain", folder).stdout  # no weights are asked for
    assert "lm_head" in command("explain", "llama-3.1-8b").stdout
    out = command("generate", "llama-3.1-8b", "x")
    assert (out.exit_code, "a shape without weights: load_format='dummy'" in out.stderr) == (2, True)
    out = command("env")
    assert torch.__version__ in out.stdout
    assert "kernels" in out.stdout
    out = command("--help")
    assert all(word in out.stdout for word in ("generate", "explain", "env", "demo"))
