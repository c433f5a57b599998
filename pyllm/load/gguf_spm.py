"""SentencePiece vocabularies in GGUF: tokens with scores, "▁" for a space, <0xNN> for bytes that have no token of their own.

A file has no merges, a score for each token instead: of two neighbours whose join is a token, the best join goes first. The merges are
recovered by cutting every token in two everywhere. Gemma's scores are not those of its merges: there the order of the tokens is.

With `add_space_prefix` one space goes before every stretch of text between special tokens, whatever the stretch begins with. That is
what SentencePiece, llama.cpp and the tokenizer.json of Llama 2, Mistral and Phi-3 do. (transformers' own reading of a Llama GGUF adds
none before a text that begins with a space.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers

from .errors import CheckpointError, show
from .gguf_file import GgufFile

SPACE = "\u2581"
MAX_PIECE = 256  # characters of a token that can be a merge: SentencePiece's default is 16, Gemma has runs of up to 62
MAX_CUTS = 1 << 23  # over the whole vocabulary: a quarter of a million tokens of seven characters have a fifth of it
GEMMA = ("gemma", "gemma2", "gemma3")


def _scores(file: GgufFile, tokens: Sequence[str], gemma: bool) -> list[float]:
    if gemma:
        return [float(-i) for i in range(len(tokens))]
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.dtype.kind != "f" or len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.scores' is not one finite number for each of the {len(tokens)} tokens")
    return [float(s) for s in scores]


def _merges(file: GgufFile, vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to cut a token into two tokens, best score first; of equal ones, those with the longer left part first."""
    cuts = sum(len(token) - 1 for token in vocab if 1 < len(token) <= MAX_PIECE)
    if cuts > MAX_CUTS:
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.tokens': {cuts} places to cut tokens at, more than {MAX_CUTS}")
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in vocab.items():
        if len(token) > MAX_PIECE:
            continue
        halves = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = sorted((vocab[a], vocab[b], a, b) for a, b in halves if a in vocab and b in vocab)
        found += [(scores[i], len(a), len(b), a, b) for _, _, a, b in pairs]
    found.sort(key=lambda cut: cut[:3], reverse=True)
    return [(a, b) for *_, a, b in found]


def _unknown(file: GgufFile, tokens: Sequence[str]) -> str:
    value = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(value) is not int or not 0 <= value < len(tokens):
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.unknown_token_id' is {show(value)}, expected a token's id")
    return tokens[value]


def _check_normalizer(file: GgufFile) -> None:
    for name in ("precompiled_charsmap", "remove_extra_whitespaces"):
        value = file.metadata.get(f"tokenizer.ggml.{name}")
        if value is not None and np.size(value) > 0 and np.any(value):
            raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.{name}' is set, which is not supported")


def spm_spelling(tokens: Sequence[str], architecture: object) -> list[str]:
    """Gemma's runs of spaces are stored as spaces, where the rest of the vocabulary has "▁"."""
    gemma = architecture in GEMMA
    return [SPACE * len(t) if gemma and len(t) > 1 and not t.strip(" ") else t for t in tokens]


def spm_tokenizer(
    file: GgufFile, tokens: Sequence[str], vocab: dict[str, int], merges: list[tuple[str, str]] | None, prefix: bool
) -> Tokenizer:
    """The pipeline without its added tokens. `merges`: the file's own, where it has them; `prefix`: a space goes before the text."""
    _check_normalizer(file)
    gemma = file.metadata.get("general.architecture") in GEMMA
    merges = _merges(file, vocab, _scores(file, tokens, gemma)) if merges is None else merges
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=_unknown(file, tokens), fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
