"""`pyllm inspect`: what it prints of good files, what it finds odd in strange ones, and that nothing of a file reaches a terminal raw."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pyllm.cli import app
from pyllm.load.inspection import inspect

from .builders import F32, I32, STRING, array, entry, gguf, info, safetensors, value, write
from .test_checkpoint import model
from .test_gguf_model import KEYS, tiny

RED = "\x1b[31m"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    return result.exit_code, result.output


def test_the_demo_model(demo_path: Path) -> None:
    code, out = run(str(demo_path), "--tensors")
    assert code == 0
    for part in ("GGUF file, 93.8 MiB", "LlamaForCausalLM", "272, 134.5 million numbers", "runs here    yes", "suspicions   none"):
        assert part in out
    assert "blk.29.attn_q.weight" in out and "llama.context_length                     8192" in out
    code, out = run(str(demo_path), "--json")
    found = json.loads(out)
    assert code == 0 and len(found["tensors"]) == 272
    assert found["types"]["Q4_1"] == [210, 106168320, 66355200]
    assert found["suspicions"] == [] and found["refused"] is None and found["not_served"] is None


def test_a_directory_with_everything_odd(tmp_path: Path) -> None:
    names = {"../../etc/x": entry("F32", [2], 0, 8), "n\u00f6rm": entry("F32", [1], 8, 12)}
    config = {"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoModel": "evil.Model"}, "quantization_config": {"quant_method": "x"}}
    template = "{{ ''.__class__.__mro__ }}{% include 'x' %}"
    files: dict[str, Any] = {
        "config.json": config,
        "model.safetensors": safetensors(names, struct.pack("<3f", 1.0, float("nan"), 0.0)),
        "tokenizer_config.json": {"chat_template": template, "custom_pipelines": {"a": "b"}},
        "tokenizer.json": None,
        "evil.py": "import os",
        "pytorch_model.bin": b"x",
        ".hidden": b"x",
    }
    root = model(tmp_path, files)
    (root / "lost").symlink_to("nowhere")
    found = inspect(root, values=True)
    assert found.refused is None
    assert found.not_served is not None and "vocab_size" in found.not_served
    for part in (
        "'evil.py' is code",
        "'pytorch_model.bin' may hold code (pickle)",
        "'.hidden' is hidden",
        "'lost' is a link that leads nowhere",
        "tensor '../../etc/x' is named like a path",
        r"tensor 'n\xf6rm' has letters outside ASCII",
        "config: auto_map names code",
        "config: quantization_config is set",
        "tokenizer_config: custom_pipelines names code",
        "the chat template uses '__class__', '__mro__', '{% include'",
        "a user's message alone does not render: ",
        "there is no tokenizer",
        "tensor '../../etc/x': 1 of 2 numbers are infinite or not numbers",
        r"tensor 'n\xf6rm' is all zeros",
    ):
        assert any(part in s for s in found.suspicions), part
    assert len(found.suspicions) == 14


def test_a_gguf_file_with_hidden_bytes(tmp_path: Path) -> None:
    keys = [("general.architecture", value(STRING, "llama")), ("notes", value(STRING, "x" * 70_000)), ("some", array(I32, [1, 2, 3]))]
    tensors = [info("a", (8,), 0, 64), info("b", (256,), 19, 128)]
    raw = gguf(keys, tensors, bytes(128) + bytes(50) + bytes(100))
    found = inspect(write(tmp_path / "m.gguf", raw))
    assert found.refused is not None and "'token_embd.weight' is missing" in found.refused
    path = tiny(tmp_path, dict(keys[1:]) | {"tokenizer.ggml.model": value(STRING, "gpt2")})
    path.write_bytes(path.read_bytes() + bytes(500))
    found = inspect(path)
    for part in ("key 'notes' holds 70000 characters", "500 bytes after the last tensor", "no usable tokenizer: "):
        assert any(part in s for s in found.suspicions), part
    assert found.not_served is None
    assert found.metadata["some"] == "3 of int32: 1, 2, 3" and found.metadata["llama.block_count"] == "1"


def test_gaps_between_tensors_are_counted(tmp_path: Path) -> None:
    from pyllm.load.gguf_file import GgufFile

    def gaps(offsets: list[int], data: int) -> int:
        tensors = [info(f"t{i}", (8,), 0, at) for i, at in enumerate(offsets)]
        return GgufFile(write(tmp_path / "g.gguf", gguf([], tensors, bytes(data)))).gaps()

    assert gaps([0, 32, 64], 96) == 0
    assert gaps([32, 64], 96) == 32
    assert gaps([128, 0], 160) == 96


@pytest.mark.parametrize("flags", [(), ("--tensors",), ("--json",), ("--values",)])
def test_nothing_of_a_file_reaches_the_terminal_raw(tmp_path: Path, flags: tuple[str, ...]) -> None:
    keys = dict(KEYS) | {"general.name": value(STRING, f"a{RED}\u202eb"), "x": array(STRING, [RED, "\u2028"]), "y": value(F32, 1.0)}
    keys["tokenizer.chat_template"] = value(STRING, "{{ raise_exception('" + RED + "') }}")
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    config = {"architectures": ["LlamaForCausalLM"], f"x{RED}\u202e": RED, RED: 1, **sizes}
    other = tmp_path / "other"
    other.mkdir()
    paths = (
        tiny(tmp_path, keys),
        model(tmp_path, {"config.json": {"architectures": [RED], "a": RED}}),
        model(other, {"config.json": config}),
    )
    assert any("fields that are not read" in s for s in inspect(paths[2]).suspicions)
    for path in paths:
        code, out = run(str(path), *flags)
        assert code == 0
        assert out.isascii() and "\x1b" not in out and all(c.isprintable() or c == "\n" for c in out)


def test_single_files_and_refusals(tmp_path: Path) -> None:
    good = write(tmp_path / "a.safetensors", safetensors({"w": entry("BF16", [2, 3], 0, 12), "__metadata__": {"k": "v"}}, bytes(12)))
    code, out = run(str(good), "--tensors")
    assert code == 0 and "BF16" in out and "[2, 3]" in out and "k " in out
    index = write(tmp_path / "model.safetensors.index.json", json.dumps({"weight_map": {"w": "a.safetensors"}}))
    assert run(str(index))[0] == 0 and inspect(index).types() == {"BF16": (1, 6, 12)}
    for name, data in (("m.gguf", b"GGUF"), ("m.safetensors", bytes(20)), ("m.bin", b"x"), ("none.gguf", None)):
        path = tmp_path / name if data is None else write(tmp_path / name, data)
        code, out = run(str(path))
        assert code == 1 and out.splitlines()[-1].startswith("refused      "), name
        assert json.loads(run(str(path), "--json")[1])["refused"]
