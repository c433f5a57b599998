"""GGUF tokenizers of every kind, trained here on a small text, equal to transformers, and SentencePiece equal to its own library."""

from __future__ import annotations

import io
import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.load import CheckpointError, Tokenizer
from pyllm.load.gguf_file import GgufFile
from pyllm.load.gguf_tokenizer import PRE_TOKENIZERS

from .builders import BOOL, F32, I32, STRING, U32, array, gguf, value, write
from .test_tokenizer import HARD, stream

transformers = pytest.importorskip("transformers")

LETTERS = "".join(chr(c) for c in (*range(0x20, 0x7F), *range(0xA1, 0x250), *range(0x391, 0x460), *range(0x4E00, 0x4E40), 0x1F600, 0x301))
TEXTS = [*HARD, "invalid: " + b"a\xff\xc3(\xe2\x82b\xf0\x9f".decode(errors="replace"), "A\u030a\u0301 \u1e69 \ufb01 \u2460"]
ANY = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=60),
    st.text("aeinst AEINST'sdm012 \n\t\r▁éñ漢字😀🇫\u200d\u0301.,/", max_size=80),
)


@cache
def corpus() -> list[str]:
    """Hard texts and the words of this package's own sources."""
    sources = sorted((Path(__file__).parents[2] / "pyllm").glob("load/*.py"))
    return [*HARD * 4, *(line for path in sources for line in path.read_text().splitlines(keepends=True))]


@cache
def trained(pre: str) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE learned behind this split rule."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = PRE_TOKENIZERS[pre].split()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().__getitem__)
    return tokens, [" ".join(pair) for pair in json.loads(backend.to_str())["model"]["merges"]]


def byte_level(root: Path, pre: str) -> Path:
    tokens, merges = trained(pre)
    tokens = [*tokens, "<user>"]
    keys = {
        "general.architecture": value(STRING, "llama"),
        "tokenizer.ggml.model": value(STRING, "gpt2"),
        "tokenizer.ggml.pre": value(STRING, pre),
        "tokenizer.ggml.tokens": array(STRING, tokens),
        "tokenizer.ggml.token_type": array(I32, [3, *[1] * (len(tokens) - 2), 4]),
        "tokenizer.ggml.merges": array(STRING, merges),
        "tokenizer.ggml.eos_token_id": value(U32, 0),
        "tokenizer.ggml.add_bos_token": value(BOOL, False),
    }
    return write(root / f"{pre}.gguf", gguf(keys.items()))


def theirs(path: Path) -> Any:
    """The pipeline that transformers makes of the file."""
    mapping = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    pytest.importorskip("gguf", reason="transformers reads GGUF through the gguf package, which is not installed")
    architecture, fields, _ = mapping.get_gguf_tokenizer(str(path))
    backend, _ = mapping.convert_gguf_tokenizer(architecture, fields)
    return backend


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizers")


def ours(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GgufFile(path))


def check(mine: Tokenizer, want: Any, text: str) -> list[int]:
    ids = mine.encode(text, add_special_tokens=False)
    assert ids == want.encode(text, add_special_tokens=False).ids, text
    for skip in (True, False):
        decoded = want.decode(ids, skip_special_tokens=skip)
        assert mine.decode(ids, skip_special_tokens=skip) == decoded
        if "\ufffd" not in decoded:  # byte-fallback runs that are not UTF-8: see StreamDecoder
            assert "".join(stream(mine, ids, skip)) == decoded
    return ids


BPE = [pre for pre in PRE_TOKENIZERS if pre != "smollm"]  # the demo model's: in test_tokenizer.py


@pytest.mark.parametrize("pre", BPE)
def test_byte_level_equals_transformers(root: Path, pre: str) -> None:
    path = byte_level(root, pre)
    mine, want = ours(path), theirs(path)
    if PRE_TOKENIZERS[pre].nfc:  # what transformers' own class for Qwen 2 does, but not its reading of GGUF
        want.normalizer = transformers.Qwen2Tokenizer().backend_tokenizer.normalizer
    for text in [*TEXTS, *corpus()[-200:], "<|endoftext|>a<user><|endoftext|> <user"]:
        check(mine, want, text)
    assert mine.special_ids == {0}


@pytest.mark.parametrize(("pre", "kind"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")])
def test_byte_level_equals_the_class_of_the_model(root: Path, pre: str, kind: str) -> None:
    tokens, merges = trained(pre)
    pairs = [tuple(m.split(" ")) for m in merges]
    want = getattr(transformers, kind)(vocab={t: i for i, t in enumerate(tokens)}, merges=pairs).backend_tokenizer
    mine = ours(byte_level(root, pre))
    for text in [*TEXTS, *corpus()[-200:]]:
        assert mine.encode(text, add_special_tokens=False) == want.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", BPE)
@given(text=ANY)
@settings(max_examples=60, deadline=None)
def test_any_text_comes_back(root: Path, pre: str, text: str) -> None:
    """All bytes have a token, so that decoding is exact; Qwen 2's normal form apart."""
    path = root / f"{pre}.gguf"
    mine = ours(path if path.exists() else byte_level(root, pre))
    ids = mine.encode(text, add_special_tokens=False)
    assert mine.decode(ids) == (unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text)


# SentencePiece

SPM: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma2", {"add_dummy_prefix": False, "user_defined_symbols": ["<tag>", *("▁" * n for n in range(2, 32))]}),
}


@cache
def sentencepiece_model(name: str) -> Any:
    spm = pytest.importorskip("sentencepiece", reason="the reference library is not installed: pip install sentencepiece")
    out = io.BytesIO()
    settings = dict(model_type="bpe", vocab_size=1500, byte_fallback=True, normalization_rule_name="identity", split_digits=True)
    settings |= dict(remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, character_coverage=0.9995, minloglevel=2)
    lines = [line.strip("\n") for line in corpus() if "\x00" not in line and line.strip()] + [c for c in LETTERS for _ in range(20)]
    spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=out, **(settings | SPM[name][1]))
    return spm.SentencePieceProcessor(model_proto=out.getvalue())


def spm_file(root: Path, name: str, changes: dict[str, bytes | None] | None = None) -> Path:
    """The keys as llama.cpp's converter writes them, by `sentencepiece`'s own account of each token."""
    sp, (architecture, made) = sentencepiece_model(name), SPM[name]
    n = sp.vocab_size()
    user = set(made.get("user_defined_symbols", ()))
    kinds = [
        2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 4 if sp.id_to_piece(i) in user else 1
        for i in range(n)
    ]
    tokens = [sp.id_to_piece(i).replace("▁", " ") if kinds[i] == 4 else sp.id_to_piece(i) for i in range(n)]
    keys: dict[str, bytes | None] = {
        "general.architecture": value(STRING, architecture),
        "tokenizer.ggml.model": value(STRING, "llama"),
        "tokenizer.ggml.pre": value(STRING, "default"),
        "tokenizer.ggml.tokens": array(STRING, tokens),
        "tokenizer.ggml.scores": array(F32, [sp.get_score(i) for i in range(n)]),
        "tokenizer.ggml.token_type": array(I32, kinds),
        "tokenizer.ggml.bos_token_id": value(U32, 1),
        "tokenizer.ggml.eos_token_id": value(U32, 2),
        "tokenizer.ggml.unknown_token_id": value(U32, 0),
        "tokenizer.ggml.add_space_prefix": value(BOOL, made.get("add_dummy_prefix", True)),
    }
    return write(root / f"{name}.gguf", gguf((k, v) for k, v in (keys | (changes or {})).items() if v is not None))


@pytest.mark.parametrize("name", SPM)
def test_sentencepiece_equals_transformers(root: Path, name: str) -> None:
    path = spm_file(root, name)
    mine, want = ours(path), theirs(path)
    texts = [*TEXTS, *corpus()[-200:], "<s>a</s> b<tag>  c   d", "  two", " one"]
    for text in texts:
        if name != "llama" or not (text.startswith(" ") or "<s>" in text):  # see gguf_spm.py; Phi-3's is the same pipeline, in all texts
            check(mine, want, text)
    assert mine.encode("a")[0] == 1
    assert mine.special_ids >= {1, 2}


@pytest.mark.parametrize("name", SPM)
def test_sentencepiece_equals_its_own_library(root: Path, name: str) -> None:
    """The best join first, the leftmost of equal ones: also where merges stand for it. (NUL ends a text in
    `sentencepiece`. A run of more than 31 spaces, Gemma's longest token of them, is cut at 31 there, in halves by merges as in
    Gemma's tokenizer.json.)"""
    mine, sp = ours(spm_file(root, name)), sentencepiece_model(name)
    special = ("<s>", "</s>", "<unk>", "<|")
    texts = [t for t in [*TEXTS, *corpus()[-200:]] if t and "\x00" not in t and " " * 32 not in t and not any(s in t for s in special)]
    assert len(texts) > 150
    different = [t for t in texts if mine.encode(t, add_special_tokens=False) != sp.encode(t)]
    assert not different


BAD: dict[str, tuple[dict[str, bytes | None], str]] = {
    "pre": ({"tokenizer.ggml.pre": value(STRING, "gpt-2")}, "'tokenizer.ggml.pre' is 'gpt-2', supported for SentencePiece: default"),
    "no scores": ({"tokenizer.ggml.scores": None}, "'tokenizer.ggml.scores' is not one finite number for each of the 1500 tokens"),
    "short scores": ({"tokenizer.ggml.scores": array(F32, [0.0])}, "'tokenizer.ggml.scores' is not one finite number for each"),
    "NaN score": ({"tokenizer.ggml.scores": array(F32, [0.0] * 1499 + [float("nan")])}, "'tokenizer.ggml.scores' is not one finite"),
    "unknown": ({"tokenizer.ggml.unknown_token_id": value(U32, 1500)}, "'tokenizer.ggml.unknown_token_id' is 1500, expected a token's id"),
    "flag": ({"tokenizer.ggml.add_space_prefix": value(U32, 1)}, "'tokenizer.ggml.add_space_prefix' is 1, expected a bool"),
    "charsmap": ({"tokenizer.ggml.precompiled_charsmap": array(I32, [1])}, "'tokenizer.ggml.precompiled_charsmap' is set, which is not"),
    "spaces": ({"tokenizer.ggml.remove_extra_whitespaces": value(BOOL, True)}, "'tokenizer.ggml.remove_extra_whitespaces' is set"),
    "twice": ({"tokenizer.ggml.tokens": array(STRING, ["a", "a"])}, "'tokenizer.ggml.tokens': 'a' appears twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_sentencepiece(root: Path, case: str) -> None:
    changes, message = BAD[case]
    with pytest.raises(CheckpointError, match=message):
        ours(spm_file(root, "llama", changes))


def test_a_vocabulary_that_would_take_hours_to_cut_is_refused(root: Path) -> None:
    """300 000 different tokens of 30 letters: a file of 12 MB with 8.7 million places to cut at."""
    tokens = ["<unk>", *(f"{i:030d}" for i in range(300_000))]
    changes = {
        "tokenizer.ggml.tokens": array(STRING, tokens),
        "tokenizer.ggml.scores": array(F32, [0.0] * len(tokens)),
        "tokenizer.ggml.token_type": None,
    }
    with pytest.raises(CheckpointError, match="870000[0-9] places to cut tokens at, more than 8388608"):
        ours(spm_file(root, "llama", changes))
