"""A `tokenizers` pipeline from GGUF metadata: byte-level BPE, its split rule named by `tokenizer.ggml.pre`."""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from .errors import CheckpointError, show
from .gguf_file import GgufFile

CONTROL_TYPES = (2, 3)  # unknown and control tokens: special, left out of decoded text
USER_TYPE = 4  # whole in the input like a special token, but part of decoded text
MAX_ADDED = 100_000

LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> Any:
    split = pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Name to (split rule, whole words of the vocabulary skip the merges, a BOS is added unless the file says otherwise).
PRE_TOKENIZERS: dict[str, tuple[Any, bool, bool]] = {
    "gpt-2": (_gpt2, False, False),
    "smollm": (_smollm, False, False),
    "llama-bpe": (_llama3, True, True),
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


def _model(file: GgufFile, tokens: list[str], ignore_merges: bool) -> models.BPE:
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if vocab[token] != i)
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.tokens': {show(twice)} appears twice")
    merges: list[tuple[str, str]] = []
    for i, line in enumerate(_strings(file, "tokenizer.ggml.merges")):
        left, space, right = line.partition(" ")
        if not space or left not in vocab or right not in vocab or left + right not in vocab:
            raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.merges': entry {i} {show(line)} does not join two tokens to a third")
        merges.append((left, right))
    return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)


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


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that a GGUF file describes."""
    kind, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.model' is {show(kind)}, supported: gpt2 (byte-level BPE)")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.pre' is {show(pre)}, supported: {' '.join(PRE_TOKENIZERS)}")
    split, ignore_merges, add_bos = PRE_TOKENIZERS[pre]
    tokens = _strings(file, "tokenizer.ggml.tokens")
    backend = Tokenizer(_model(file, tokens, ignore_merges))
    backend.pre_tokenizer = split()
    backend.decoder = decoders.ByteLevel()
    _add_marked_tokens(file, backend, tokens)
    template = _template(file, tokens, add_bos)
    if template is not None:
        backend.post_processor = template
    return backend
