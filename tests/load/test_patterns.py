"""Patterns of tokenizers: those in use are taken, those that take exponential time are refused before they meet a text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from pyllm.load import CheckpointError, Tokenizer
from pyllm.load.gguf_tokenizer import GPT4O_SPLIT, LLAMA3_SPLIT, QWEN2_SPLIT
from pyllm.load.patterns import pattern_danger

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
GOOD = [
    GPT2,
    LLAMA3_SPLIT,
    QWEN2_SPLIT,
    GPT4O_SPLIT,
    DEEPSEEK,
    BLOOM,
    THOUSANDS,
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"(?:\r\n)+",
    "",
    "(",
]

BAD = {
    "nested": (r"(a+)+$", "repeats a group that holds a repetition or a choice"),
    "nested deep": (r"((?:[ab]x*)?y)*z", "repeats a group"),
    "choice": (r"(?:a|a)*b", "repeats a group"),
    "optional": (r"(a?){70}a", "repeats a group"),
    "named": (r"(?<x>\s*)+", "repeats a group"),
    "look": (r"(?=(\w+)*)", "repeats a group"),
    "hidden by classes": (r"[](](?:[^]]+[)])+", "repeats a group"),
    "hidden by an escape": (r"\((a*\))*", "repeats a group"),
    "twice": (r"a+*b", "repeats a repetition"),
    "in a row": ("a*" * 5 + "b", "more than 4 repetitions without an end in a row"),
    "in a row, in groups": ("(a*a*)(a*)(a{2,}a{,999})b", "more than 4 repetitions"),
    "back reference": (r"(a*)\1b", "refers back to a group"),
    "recursion": (r"(a\g<0>?b)", "refers back to a group"),
    "long": ("a" * 5000, "has 5000 characters"),
}


@pytest.mark.parametrize("pattern", GOOD)
def test_patterns_in_use(pattern: str) -> None:
    assert pattern_danger(pattern) is None


@pytest.mark.parametrize("case", BAD)
def test_dangerous_patterns(case: str) -> None:
    pattern, message = BAD[case]
    assert message in (pattern_danger(pattern) or "")


def saved(root: Path, part: str, spec: dict[str, Any]) -> Path:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    raw = json.loads(backend.to_str()) | {part: spec}
    path = root / "tokenizer.json"
    path.write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("part", ["normalizer", "pre_tokenizer", "decoder"])
def test_a_file_with_one_is_refused_at_once(tmp_path: Path, part: str, nested: bool) -> None:
    spec: dict[str, Any] = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "x"}
    if part == "pre_tokenizer":
        spec = {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False}
    lists = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    if nested:
        spec = {"type": "Sequence", lists[part]: [spec]}
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=rf"tokenizer.json: {part}: pattern '\(a\+\)\+b' repeats a group"):
        Tokenizer.from_file(saved(tmp_path, part, spec)).encode("a" * 40)
    assert time.monotonic() - started < 2
