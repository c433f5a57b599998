"""Tokenizers: equal to transformers on hard texts; a stream of pushes is the decoded text and never holds half a character."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.load import CheckpointError, Tokenizer, open_checkpoint
from pyllm.load.gguf_file import GgufFile
from pyllm.load.tokenizer import BYTE_OF

from .builders import BOOL, I32, STRING, U32, array, gguf, value, write

HARD = [
    "",
    " ",
    "The capital of France is",
    "  leading and trailing  \n\n\t ",
    "a\r\nb\n\n\n   c\t\td",
    "0 12 345 6789 12345678901234567890 3.14159 ½ ④ ٣٤ Ⅷ",
    "don't can't I'LL we've 'tis 'S",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷 👍🏽 😀😃",
    "漢字かな交じり文。中文没有空格,한국어 텍스트",
    "مرحبا بالعالم שלום עולם नमस्ते ภาษาไทย",
    "e\u0301 \u00e9 \ufb01 \u200b\u200d\ufeff\u00a0\u3000",
    "\ufffd\ufffd real replacement characters \ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|><|endoftext|> <|im_sta",
    "def f(x):\n    return x**2  # comment\n",
    "\x00\x01\x1f\x7f",
    "a" * 300 + "\n" * 50 + " " * 50,
    "\U0010ffff\U00010000",
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def stream(tokenizer: Tokenizer, ids: Iterable[int], skip: bool = True) -> list[str]:
    decoder = tokenizer.stream(skip_special_tokens=skip)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@pytest.fixture(scope="module")
def demo(demo_path: Path) -> Tokenizer:
    tokenizer = open_checkpoint(demo_path).tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def oracle(demo_path: Path) -> Any:
    """transformers' reading of the file; its converter leaves out the rule that digits stand alone, which `smollm` means."""
    pytest.importorskip("gguf", reason="transformers reads GGUF through the gguf package, which is not installed")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(demo_path.parent), gguf_file=demo_path.name)
    parts = [tokenizers.pre_tokenizers.Digits(individual_digits=True), theirs.backend_tokenizer.pre_tokenizer]
    theirs.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    return theirs


def test_known_ids(demo: Tokenizer) -> None:
    assert demo.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert demo.decode([7042, 30, 198, 198, 504]) == " Paris.\n\nThe"
    assert demo.encode("<|im_start|>12<|im_end|>") == [1, 33, 34, 2]
    assert demo.decode([1, 33, 2]) == "1"
    assert demo.decode([1, 33, 2], skip_special_tokens=False) == "<|im_start|>1<|im_end|>"
    assert demo.special_ids == frozenset(range(17))
    assert demo.vocab_size == 49152
    assert (demo.token(1), demo.token_id("<|im_end|>"), demo.token_id("no such token"), demo.token(49152)) == (
        "<|im_start|>",
        2,
        None,
        None,
    )


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_hard_texts_equal_transformers(demo: Tokenizer, oracle: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == oracle.encode(text)
    for skip in (True, False):
        want = oracle.decode(ids, skip_special_tokens=skip)
        assert demo.decode(ids, skip_special_tokens=skip) == want
        assert "".join(stream(demo, ids, skip)) == want


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_any_text_equals_transformers_and_streams_whole_characters(demo: Tokenizer, oracle: Any, text: str) -> None:
    ids = demo.encode(text)
    assert ids == oracle.encode(text)
    streamed = "".join(stream(demo, ids))
    assert streamed == demo.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    if set(text.encode()) <= {BYTE_OF[c] for c in BYTE_OF if demo.token_id(c) is not None}:  # 21 bytes have no token in this vocabulary
        assert streamed == text


@given(ids=st.lists(st.one_of(st.integers(0, 49151), st.integers(0, 300), st.integers(49152, 2**32 - 1)), max_size=40), skip=st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_ids_stream_as_transformers_decodes_them(demo: Tokenizer, oracle: Any, ids: list[int], skip: bool) -> None:
    """Random ids break characters in the middle, and some have no token."""
    assert "".join(stream(demo, ids, skip)) == demo.decode(ids, skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_a_split_character_is_held_back_until_it_is_whole(demo: Tokenizer) -> None:
    ids = demo.encode("𓀀")  # an Egyptian bird: no token of its own, four bytes
    assert len(ids) > 1
    assert stream(demo, ids) == [""] * (len(ids) - 1) + ["𓀀", ""]
    assert stream(demo, ids[:-1])[-1] == "\ufffd"


def test_bad_arguments(demo: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"Tokenizer.encode: text\[1\] is '\\ud800', half of a surrogate pair"):
        demo.encode("a\ud800")
    with pytest.raises(ValueError, match=r"Tokenizer.decode: -1 is not a token id"):
        demo.decode([-1])
    with pytest.raises(ValueError, match=r"StreamDecoder.push: 4294967296 is not a token id"):
        demo.stream().push(1 << 32)


# tokenizer.json


def test_file_with_truncation_and_padding(tmp_path: Path, demo: Tokenizer, oracle: Any) -> None:
    backend = tokenizers.Tokenizer.from_str(oracle.backend_tokenizer.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json")
    for text in HARD:
        assert ours.encode(text) == demo.encode(text)


def byte_fallback(tmp_path: Path) -> Tokenizer:
    """A SentencePiece-like tokenizer: "▁" for a space, <0xNN> for bytes without a token, a BOS, one leading space stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "é", "▁a", "ab", "\ufffd"]
    vocab = {t: i for i, t in enumerate(tokens)}
    model = tokenizers.models.BPE(vocab, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")])
    d = tokenizers.decoders
    backend.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_fallback(tmp_path_factory.mktemp("fallback"))


@given(text=st.one_of(TEXT, st.text("ab é漢😀\ufffd▁", max_size=40)))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_streams_what_it_decodes(fallback: Tokenizer, text: str) -> None:
    ids = fallback.encode(text)
    pieces = stream(fallback, ids)
    assert "".join(pieces) == fallback.decode(ids) == text.replace("▁", " ")
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    with_special = fallback.decode(ids, skip_special_tokens=False)
    assert "".join(stream(fallback, ids, skip=False)) == with_special


def test_byte_fallback_sends_a_character_as_soon_as_it_is_whole(fallback: Tokenizer) -> None:
    ids = fallback.encode("漢字", add_special_tokens=False)
    assert fallback.encode("漢字")[0] == 1
    assert stream(fallback, ids) == ["", "", "", "漢", "", "", "字", ""]
    assert stream(fallback, ids[:3])[-1] == "\ufffd" * 2


@given(ids=st.lists(st.integers(0, 269), max_size=40))
@settings(max_examples=200, deadline=None)
def test_byte_fallback_takes_any_ids(fallback: Tokenizer, ids: list[int]) -> None:
    """Bytes that are not UTF-8 may be counted differently (see StreamDecoder); everything else is the same."""
    got, want = "".join(stream(fallback, ids)), fallback.decode(ids)
    if "\ufffd" not in want:
        assert got == want
    assert [c for c in got if c in "abé"] == [c for c in want if c in "abé"] or "\ufffd" in want


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a tokenizer"),
        (b"\xff", "not a tokenizer: .*utf-8"),
        (b"{}", "not a tokenizer"),
        (b"[" * 100_000, "not a tokenizer"),
        (b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["x", "y"]]}}', "not a tokenizer"),
    ],
)
def test_bad_tokenizer_file(tmp_path: Path, data: bytes, message: str) -> None:
    path = write(tmp_path / "tokenizer.json", data)
    with pytest.raises(CheckpointError, match=message) as raised:
        Tokenizer.from_file(path)
    assert str(path) in str(raised.value)


def test_a_file_that_makes_the_library_panic_is_an_error_of_the_text(tmp_path: Path) -> None:
    """A template that names a token it does not describe passes the library's own checks and panics on the first text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    template: dict[str, Any] = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    template["single"] = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw = json.loads(backend.to_str()) | {"post_processor": template}
    tokenizer = Tokenizer.from_file(write(tmp_path / "tokenizer.json", json.dumps(raw)))
    with pytest.raises(CheckpointError, match=r"Tokenizer.encode: no entry found for key"):
        tokenizer.encode("a")
    assert tokenizer.encode("a", add_special_tokens=False) == [0]


def test_a_decoder_that_mixes_byte_level_with_others_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), tokenizers.decoders.Strip(" ", 1, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"decoder ByteLevel \+ Strip cannot be streamed"):
        Tokenizer.from_file(tmp_path / "tokenizer.json").stream()


# GGUF metadata

TOKENS = ["<s>", "</s>", "a", "b", "ab", "1", "2", "12", "\u0120", "<user>"]
GGUF_KEYS: dict[str, bytes] = {
    "model": value(STRING, "gpt2"),
    "pre": value(STRING, "smollm"),
    "tokens": array(STRING, TOKENS),
    "token_type": array(I32, [3, 3, 1, 1, 1, 1, 1, 1, 1, 4]),
    "merges": array(STRING, ["a b", "1 2"]),
    "bos_token_id": value(U32, 0),
    "eos_token_id": value(U32, 1),
}


def from_keys(root: Path, changes: dict[str, bytes | None] | None = None) -> Tokenizer:
    keys = {f"tokenizer.ggml.{k}": v for k, v in (GGUF_KEYS | (changes or {})).items() if v is not None}
    return Tokenizer.from_gguf(GgufFile(write(root / "t.gguf", gguf(keys.items()))))


def test_gguf_pre_tokenizers_and_flags(tmp_path: Path) -> None:
    plain = from_keys(tmp_path)
    assert plain.encode("ab12<s><user>") == [4, 5, 6, 0, 9]
    assert plain.decode([0, 4, 9, 1]) == "ab<user>"
    assert from_keys(tmp_path, {"pre": value(STRING, "gpt-2")}).encode("ab12") == [4, 7]
    llama3 = {"pre": value(STRING, "llama-bpe")}
    assert from_keys(tmp_path, llama3).encode("ab12") == [0, 4, 7]
    assert from_keys(tmp_path, llama3 | {"add_bos_token": value(BOOL, False)}).encode("ab12") == [4, 7]
    both = from_keys(tmp_path, {"add_bos_token": value(BOOL, True), "add_eos_token": value(BOOL, True)})
    assert both.encode("a") == [0, 2, 1]
    assert both.encode("a", add_special_tokens=False) == [2]
    assert from_keys(tmp_path, {"token_type": None}).special_ids == frozenset()


def test_llama3_splits() -> None:
    from pyllm.load.gguf_tokenizer import PRE_TOKENIZERS

    splitter = PRE_TOKENIZERS["llama-bpe"].split()
    inverse = {b: c for c, b in BYTE_OF.items()}
    assert (inverse[32], inverse[10]) == ("\u0120", "\u010a")
    got = [piece for piece, _ in splitter.pre_tokenize_str("I'M 1234567 x's!!\n\n  end  ")]
    assert got == ["I", "'M", "Ġ", "123", "456", "7", "Ġx", "'s", "!!ĊĊ", "Ġ", "Ġend", "ĠĠ"]


BAD_KEYS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "model": ({"model": value(STRING, "bert")}, "key 'tokenizer.ggml.model' is 'bert', supported: gpt2"),
    "pre": ({"pre": value(STRING, "x")}, "key 'tokenizer.ggml.pre' is 'x', supported: gpt-2 smollm llama-bpe"),
    "no pre": ({"pre": None}, "key 'tokenizer.ggml.pre' is None"),
    "no tokens": ({"tokens": None}, "key 'tokenizer.ggml.tokens' is not an array of strings"),
    "numbers": ({"tokens": array(I32, [1])}, "key 'tokenizer.ggml.tokens' is not an array of strings"),
    "same token": ({"tokens": array(STRING, [*TOKENS[:-1], "a"])}, "key 'tokenizer.ggml.tokens': 'a' appears twice"),
    "no merges": ({"merges": None}, "key 'tokenizer.ggml.merges' is not an array of strings"),
    "no space": ({"merges": array(STRING, ["ab"])}, "'tokenizer.ggml.merges': entry 0 'ab' does not join two tokens to a third"),
    "no such part": ({"merges": array(STRING, ["a b", "a x"])}, "entry 1 'a x' does not join"),
    "no such result": ({"merges": array(STRING, ["b a"])}, "entry 0 'b a' does not join"),
    "types": ({"token_type": array(I32, [1])}, "'tokenizer.ggml.token_type' is not one integer for each of the 10 tokens"),
    "flag": ({"add_bos_token": value(U32, 1)}, "'tokenizer.ggml.add_bos_token' is 1, expected a bool"),
    "bos": ({"add_bos_token": value(BOOL, True), "bos_token_id": value(U32, 99)}, "'tokenizer.ggml.bos_token_id' is 99"),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_bad_gguf_tokenizer(tmp_path: Path, case: str) -> None:
    changes, message = BAD_KEYS[case]
    with pytest.raises(CheckpointError, match=message):
        from_keys(tmp_path, changes)


def test_gguf_tokenizer_saves_as_the_same_file(tmp_path: Path) -> None:
    ours = from_keys(tmp_path, {"add_bos_token": value(BOOL, True)})
    ours.backend.save(str(tmp_path / "tokenizer.json"))
    again = Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert json.loads(again.backend.to_str()) == json.loads(ours.backend.to_str())
    assert again.encode("ab12<s>") == ours.encode("ab12<s>") == [0, 4, 5, 6, 0]
