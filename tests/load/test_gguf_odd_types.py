"""Every key that is read, with a value of each type that a file can give it: it opens, or one error names the file and the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pyllm.load import CheckpointError, open_checkpoint
from pyllm.load.gguf_shards import open_gguf
from pyllm.load.inspection import inspect

from .builders import BOOL, F32, I32, STRING, U32, U64, array, gguf, value, write
from .test_gguf_model import KEYS, tiny
from .test_tokenizer import GGUF_KEYS

TOKENIZER = {f"tokenizer.ggml.{k}": v for k, v in GGUF_KEYS.items()}
MORE = [
    "split.count",
    "split.no",
    "split.tensors.count",
    "general.alignment",
    "llama.rope.scaling.type",
    "llama.rope.scaling.factor",
    "llama.rope.freq_base",
    "llama.rope.scaling.finetuned",
    "llama.vocab_size",
    "llama.rope.dimension_count",
    "llama.expert_count",
    "llama.expert_used_count",
    "llama.tensor_data_layout",
    "tokenizer.chat_template",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.unknown_token_id",
    "tokenizer.ggml.precompiled_charsmap",
    "tokenizer.ggml.remove_extra_whitespaces",
]
VALUES = {
    "integers": array(I32, [1, 2]),
    "one integer": array(I32, [1]),
    "no integers": array(I32, []),
    "bools": array(BOOL, [True, False]),
    "floats": array(F32, [float("nan"), 1.0]),
    "strings": array(STRING, ["a", "\x1b[31m"]),
    "nan": value(F32, float("nan")),
    "infinity": value(F32, float("inf")),
    "negative": value(I32, -1),
    "huge": value(U64, 2**64 - 1),
    "text": value(STRING, "\x1b[31m\n\u202e"),
    "bool": value(BOOL, True),
    "zero": value(U32, 0),
}


@pytest.mark.parametrize("key", sorted({*KEYS, *TOKENIZER, *MORE}))
def test_any_type_of_value(tmp_path: Path, key: str) -> None:
    for odd in VALUES.values():
        path = tiny(tmp_path, {**TOKENIZER, key: odd})
        try:
            assert open_checkpoint(path).tokenizer is not None
        except CheckpointError as error:
            message = str(error)
            assert str(path) in message and message.isprintable() and "ambiguous" not in message
        assert inspect(path).kind == "GGUF file"


ARRAYS = {
    "split.count": "is array([1, 2], dtype=int32): expected a number of files",
    "llama.rope.scaling.type": "is array([1, 2], dtype=int32), expected none or linear or yarn",
    "tokenizer.ggml.model": "is array([1, 2], dtype=int32), supported: gpt2",
    "tokenizer.ggml.pre": "is array([1, 2], dtype=int32), supported: gpt-2",
}


@pytest.mark.parametrize("key", ARRAYS)
def test_an_array_in_place_of_a_word(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"key '{key}' {ARRAYS[key]}")):
        assert open_checkpoint(tiny(tmp_path, {**TOKENIZER, key: VALUES["integers"]})).tokenizer


@pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
def test_an_array_in_place_of_a_number_of_a_split_file(tmp_path: Path, key: str) -> None:
    numbers = {"split.no": value(U32, 0), "split.count": value(U32, 2), "split.tensors.count": value(U32, 0)}
    second = numbers | {"split.no": value(U32, 1)}
    first, second = (numbers | {key: VALUES["integers"]}, second) if "tensors" in key else (numbers, second | {key: VALUES["integers"]})
    path = write(tmp_path / "m-00001-of-00002.gguf", gguf(first.items()))
    write(tmp_path / "m-00002-of-00002.gguf", gguf(second.items()))
    with pytest.raises(CheckpointError, match=re.escape(f"key '{key}' is array([1, 2], dtype=int32)")):
        open_gguf(path)


@pytest.mark.parametrize(
    ("key", "odd"), [("add_sep_token", value(BOOL, True)), ("normalizer", value(STRING, "x")), ("ids", VALUES["no integers"])]
)
def test_a_key_of_the_tokenizer_that_nobody_understands(tmp_path: Path, key: str, odd: bytes) -> None:
    off = {"tokenizer.ggml.add_sep_token": value(BOOL, False), "tokenizer.ggml.fim_pre_token_id": value(U32, 3)}
    assert open_checkpoint(tiny(tmp_path, TOKENIZER | off)).tokenizer is not None
    model = open_checkpoint(tiny(tmp_path, TOKENIZER | {f"tokenizer.ggml.{key}": odd}))
    assert len(model.tensors) == 11
    with pytest.raises(CheckpointError, match=f"key 'tokenizer.ggml.{key}' is .*, which is not supported"):
        assert model.tokenizer
