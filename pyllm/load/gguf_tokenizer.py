"""A `tokenizers` pipeline from GGUF metadata: byte-level BPE, its split rule named by `tokenizer.ggml.pre`, or SentencePiece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .errors import CheckpointError, show
from .gguf_file import GgufFile
from .gguf_spm import spm_spelling, spm_tokenizer

CONTROL_TYPES = (2, 3)  # unknown and control tokens: special, left out of decoded text
USER_TYPE = 4  # whole in the input like a special token, but part of decoded text
MAX_ADDED = 100_000
PREFIX = "tokenizer.ggml."
READ = {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token", "add_space_prefix"}
READ |= {"precompiled_charsmap", "remove_extra_whitespaces"}
INERT = {"token_type_count"}  # of BERT; ids of special tokens (..._token_id) that are not read change no text either

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2_SPLIT = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE, _CASED = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O_SPLIT = f"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDINGS}?|" + r"\p{N}{1,3}" + _CASED
TEKKEN_SPLIT = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|" + r"\p{N}" + _CASED


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _regex(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True)
class Pre:
    """A split rule. `whole_words`: those of the vocabulary skip the merges. `bos`: one is added unless the file says otherwise."""

    split: Callable[[], Any]
    whole_words: bool = False
    bos: bool = False
    nfc: bool = False


_LLAMA3 = Pre(partial(_regex, LLAMA3_SPLIT), whole_words=True, bos=True)
PRE_TOKENIZERS: dict[str, Pre] = {
    "gpt-2": Pre(_gpt2),
    "smollm": Pre(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Pre(partial(_regex, QWEN2_SPLIT), nfc=True),
    "dbrx": Pre(partial(_regex, LLAMA3_SPLIT)),
    "tekken": Pre(partial(_regex, TEKKEN_SPLIT), whole_words=True, bos=True),
    "gpt-4o": Pre(partial(_regex, GPT4O_SPLIT), whole_words=True),
}


def _strings(file: GgufFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise CheckpointError(f"{file.path}: key '{key}' is not an array of strings")
    return value


def _flag(file: GgufFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if type(value) is not bool:
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.{name}' is {show(value)}, expected a bool")
    return value


def _vocab(file: GgufFile, tokens: list[str]) -> dict[str, int]:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.tokens': {show(twice)} appears twice")
    return vocab


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(_strings(file, "tokenizer.ggml.merges")):
        left, space, right = line.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.merges': entry {i} {show(line)} does not join two tokens to a third")
        merges.append((left, right))
    return merges


def _add_marked_tokens(file: GgufFile, backend: Tokenizer, tokens: list[str]) -> None:
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        return
    if not isinstance(kinds, np.ndarray) or kinds.dtype.kind not in "iu" or len(kinds) != len(tokens):
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.token_type' is not one integer for each of the {len(tokens)} tokens")
    marked = np.flatnonzero(np.isin(kinds, (*CONTROL_TYPES, USER_TYPE)))
    if len(marked) > MAX_ADDED:
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.token_type' marks {len(marked)} tokens, more than {MAX_ADDED}")
    special = [bool(kinds[i] != USER_TYPE) for i in marked]
    backend.add_tokens([AddedToken(tokens[i], special=s, normalized=False) for i, s in zip(marked, special, strict=True)])


def _template(file: GgufFile, tokens: list[str], add_bos: bool) -> Any:
    """The post-processor that puts BOS and EOS around a text, or None."""
    around: dict[str, tuple[str, int]] = {}
    for name, wanted in (("bos", _flag(file, "add_bos_token", add_bos)), ("eos", _flag(file, "add_eos_token", False))):
        if wanted:
            value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if type(value) is not int or not 0 <= value < len(tokens):
                raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.{name}_token_id' is {show(value)}, expected a token's id")
            around[name] = (tokens[value], value)
    if not around:
        return None
    text = {name: [f"{token}:0"] for name, (token, _) in around.items()}
    single = [*text.get("bos", []), "$A:0", *text.get("eos", [])]
    return processors.TemplateProcessing(single=single, special_tokens=list(around.values()))


def _byte_level(file: GgufFile, tokens: list[str], pre: Pre) -> Tokenizer:
    vocab = _vocab(file, tokens)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(file, vocab), ignore_merges=pre.whole_words))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.split()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    vocab = _vocab(file, tokens)
    merges = _merges(file, vocab) if "tokenizer.ggml.merges" in file.metadata else None
    return spm_tokenizer(file, tokens, vocab, merges, _flag(file, "add_space_prefix", True))


def _check_all_read(file: GgufFile) -> None:
    """A key that nobody understands may change the ids of a text: an error, unless it is off."""
    for key, value in file.metadata.items():
        name = key.removeprefix(PREFIX)
        known = name == key or name in READ | INERT or name.endswith("_token_id")
        if not known and not (isinstance(value, int | float | str) and not value):
            raise CheckpointError(f"{file.path}: key {show(key)} is {show(value)}, which is not supported")


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes."""
    _check_all_read(file)
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    tokens = _strings(file, "tokenizer.ggml.tokens")
    if isinstance(kind, str) and kind == "llama":
        if not isinstance(pre, str | None) or pre not in (None, "default"):
            raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.pre' is {show(pre)}, supported for SentencePiece: default")
        tokens = spm_spelling(tokens, file.metadata.get("general.architecture"))
        backend, add_bos = _sentencepiece(file, tokens), True
    elif isinstance(kind, str) and kind == "gpt2":
        if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
            raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.pre' is {show(pre)}, supported: {' '.join(PRE_TOKENIZERS)}")
        backend, add_bos = _byte_level(file, tokens, PRE_TOKENIZERS[pre]), PRE_TOKENIZERS[pre].bos
    else:
        known = "gpt2 (byte-level BPE) and llama (SentencePiece)"
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.model' is {show(kind)}, supported: {known}")
    _add_marked_tokens(file, backend, tokens)
    template = _template(file, tokens, add_bos)
    if template is not None:
        backend.post_processor = template
    return backend
