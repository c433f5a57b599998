"""Text to token ids and back, over the `tokenizers` library, and decoding of a stream of ids that never splits a character."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from .errors import CheckpointError, show
from .gguf_file import GgufFile
from .gguf_tokenizer import gguf_tokenizer
from .jsonfile import read_bytes
from .patterns import check_patterns

MAX_TOKENIZER_BYTES = 256 << 20


T = TypeVar("T")


def _guard(what: str, run: Callable[[], T]) -> T:
    """Run something of the Rust library. A panic there arrives as a BaseException that `except Exception` would let through; a file may
    also hold rules that only fail on a text, such as an unknown token that is not in the vocabulary."""
    try:
        return run()
    except (KeyboardInterrupt, SystemExit, MemoryError, CheckpointError):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {error}") from None


def _byte_level_table() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte: printable Latin-1 as itself, the other 68 from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


BYTE_OF = _byte_level_table()


def _check_ids(where: str, ids: list[int]) -> None:
    for i in ids:
        if not 0 <= i < 1 << 32:
            raise ValueError(f"{where}: {i} is not a token id, expected 0 <= id < 2**32")


def _decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    if backend.decoder is None:
        return []
    spec: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    parts = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    return [part["type"] for part in parts]


class _ByteLevelStream:
    """Byte-level tokens are bytes: an incremental UTF-8 decoder holds back exactly an incomplete character."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str, token_id: int) -> str:
        known = all(c in BYTE_OF for c in token)  # an added token may hold characters outside the table: then it stands for itself
        return self._utf8.decode(bytes(BYTE_OF[c] for c in token) if known else token.encode())

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Any other decoder: what decoding a window of ids adds to decoding its already sent part. A space that a decoder strips from the
    start of a text is so kept within it. Tokens like <0xE4> are bytes: held back until they complete a character."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._sent = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str, token_id: int) -> str:
        self._ids.append(token_id)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                self._utf8.decode(bytes([int(token[3:5], 16)]))
            except ValueError:
                self._utf8.reset()
            if self._utf8.getstate()[0]:
                return ""
        self._utf8.reset()
        return self._emit()

    def _emit(self) -> str:
        before = self._decode(self._ids[: self._sent])
        text = self._decode(self._ids)[len(before) :]
        if text:
            self._ids = self._ids[self._sent :]
            self._sent = len(self._ids)
        return text

    def flush(self) -> str:
        self._utf8.reset()
        return self._emit()


class StreamDecoder:
    """`push(id)` gives the text that became certain with this id (often "" inside a character); `flush()` the rest, at the end.

    All pushes and the flush together are `Tokenizer.decode` of the ids. One difference: byte-fallback tokens (<0xNN>) that are not valid
    UTF-8 make `decode` replace the whole run of them, also the good characters before the bad byte, which a stream has sent by then.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        kinds = _decoder_kinds(self._backend)
        if "ByteLevel" in kinds and len(kinds) > 1:
            raise CheckpointError(f"tokenizer: decoder {' + '.join(kinds)} cannot be streamed")
        self._stream: _ByteLevelStream | _WindowStream
        if kinds == ["ByteLevel"]:
            self._stream = _ByteLevelStream()
        else:
            self._stream = _WindowStream(self._decode)

    def _decode(self, ids: list[int]) -> str:
        return _guard("StreamDecoder", lambda: self._backend.decode(ids, skip_special_tokens=False))

    def push(self, token_id: int) -> str:
        _check_ids("StreamDecoder.push", [token_id])
        token = None if token_id in self._skip else self._backend.id_to_token(token_id)
        return "" if token is None else self._stream.push(token, token_id)

    def flush(self) -> str:
        return self._stream.flush()


class Tokenizer:
    """One tokenizer, from `tokenizer.json` or from a GGUF file's metadata."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        backend.no_truncation()  # a file may ask for both; a prompt is never cut or padded behind its owner's back
        backend.no_padding()
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        data = read_bytes(Path(path), MAX_TOKENIZER_BYTES)
        backend = _guard(f"{path}: not a tokenizer", lambda: tokenizers.Tokenizer.from_str(data.decode("utf-8")))
        try:
            check_patterns(backend)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        return cls(backend)

    @classmethod
    def from_gguf(cls, file: GgufFile) -> Tokenizer:
        return cls(_guard(f"{file.path}: not a tokenizer", lambda: gguf_tokenizer(file)))

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def token(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text. `add_special_tokens` puts what the model wants around it (BOS); special tokens inside the text always count."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"Tokenizer.encode: text[{error.start}] is {show(text[error.start])}, half of a surrogate pair") from None
        return list(_guard("Tokenizer.encode", lambda: self.backend.encode(text, add_special_tokens=add_special_tokens).ids))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of the ids; an id that has no token (the padding rows of an embedding) adds nothing."""
        numbers = [int(i) for i in ids]
        _check_ids("Tokenizer.decode", numbers)
        return _guard("Tokenizer.decode", lambda: self.backend.decode(numbers, skip_special_tokens=skip_special_tokens))

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens)
