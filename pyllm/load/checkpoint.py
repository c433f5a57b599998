"""A model's files behind one object, whether it is a Hugging Face directory or a single `.gguf` file. Nothing is fetched or executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from .chat import MAX_TEMPLATE, render_chat
from .confine import confined
from .errors import CheckpointError, show
from .gguf_model import gguf_config, gguf_eos_ids
from .gguf_shards import open_gguf
from .gguf_tensors import GgufTensors
from .jsonfile import read_bytes, read_json_object
from .safetensors_file import open_safetensors
from .tensors import TensorMap
from .tokenizer import Tokenizer

MAX_CONFIG = 4 << 20  # quantized models list every layer that was left out
MAX_TOKENIZER_CONFIG = 16 << 20


class Checkpoint:
    """What both kinds of checkpoint offer; see `open_checkpoint`."""

    name: str
    path: Path
    config: dict[str, Any]  # in Hugging Face's words
    tensors: TensorMap  # by Hugging Face's names, read on access
    chat_template: str | None
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return self._read_tokenizer()

    def _read_tokenizer(self) -> Tokenizer | None:
        raise NotImplementedError

    def _text_of(self, token_id: int | None) -> str:
        token = self.tokenizer.token(token_id) if self.tokenizer is not None and token_id is not None else None
        return token or ""

    @property
    def bos_token(self) -> str:
        return self._text_of(self.bos_id)

    @property
    def eos_token(self) -> str:
        return self._text_of(self.eos_ids[0] if self.eos_ids else None)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt that the model's own chat template makes of `messages`."""
        if self.chat_template is None:
            raise CheckpointError(f"{self.path}: the checkpoint has no chat template")
        if isinstance(messages, str) or not all(isinstance(m, Mapping) for m in messages):
            raise ValueError(f"render_chat: messages is {show(messages)}, expected a list of objects with role and content")
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        return render_chat(self.chat_template, messages, add_generation_prompt, **{**tokens, **variables})


class GgufCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = open_gguf(path)
        self.config = gguf_config(self.file)
        self.tensors = GgufTensors(self.file, self.config)
        self.bos_id = self.config["bos_token_id"]
        self.eos_ids = gguf_eos_ids(self.file, self.config["vocab_size"])
        name = self.file.metadata.get("general.name")
        self.name = name if isinstance(name, str) and name else path.stem
        template = self.file.metadata.get("tokenizer.chat_template")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{path}: key 'tokenizer.chat_template' is not a string")
        self.chat_template = template

    def _read_tokenizer(self) -> Tokenizer | None:
        return Tokenizer.from_gguf(self.file) if "tokenizer.ggml.model" in self.file.metadata else None


def _ids(where: str, value: Any) -> tuple[int, ...]:
    """A token id, a list of them, or nothing, as config files have it."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int and 0 <= i < 1 << 32 for i in ids):
        raise CheckpointError(f"{where} is {show(value)}, expected a token id or a list of them")
    return tuple(dict.fromkeys(ids))


class DirectoryCheckpoint(Checkpoint):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        config = self._json("config.json", MAX_CONFIG)
        if config is None:
            raise CheckpointError(f"{path}: no config.json: not a Hugging Face model directory")
        self.config = config
        self.tensors = open_safetensors(path)
        self._generation = self._json("generation_config.json", MAX_CONFIG) or {}
        self.tokenizer_config = self._json("tokenizer_config.json", MAX_TOKENIZER_CONFIG) or {}
        self.chat_template = self._read_template()
        self.eos_ids = self._special_ids("eos")
        self.bos_id = next(iter(self._special_ids("bos")), None)

    def _has(self, name: str) -> Path | None:
        return confined(self.path, name, str(self.path)) if (self.path / name).exists() else None

    def _json(self, name: str, limit: int) -> dict[str, Any] | None:
        found = self._has(name)
        return None if found is None else read_json_object(found, limit)

    def _special_ids(self, kind: str) -> tuple[int, ...]:
        """generation_config.json rules, then config.json (a multimodal model keeps it in text_config), then the tokenizer's own token."""
        key = f"{kind}_token_id"
        inner = self.config.get("text_config")
        sources = [("generation_config.json", self._generation), ("config.json", self.config)]
        sources += [("config.json: text_config", inner)] if isinstance(inner, dict) else []
        for where, source in sources:
            if source.get(key) is not None:
                return _ids(f"{self.path / where}: {key}", source[key])
        token = self._config_token(kind)
        found = self.tokenizer.token_id(token) if token and self.tokenizer is not None else None
        return () if found is None else (found,)

    def _config_token(self, kind: str) -> str:
        token = self.tokenizer_config.get(f"{kind}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(token, str):
            raise CheckpointError(f"{self.path / 'tokenizer_config.json'}: {kind}_token is {show(token)}, expected a string")
        return token or ""

    @property
    def bos_token(self) -> str:
        return self._config_token("bos") or super().bos_token

    @property
    def eos_token(self) -> str:
        return self._config_token("eos") or super().eos_token

    def _read_template(self) -> str | None:
        found = self._has("chat_template.jinja")
        if found is not None:
            try:
                return read_bytes(found, 4 * MAX_TEMPLATE).decode("utf-8")
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{found}: not UTF-8 at byte {error.start}") from None
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict) and isinstance(t.get("name"), str)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{self.path / 'tokenizer_config.json'}: chat_template is {show(template)}, expected a string")
        return template

    def _read_tokenizer(self) -> Tokenizer | None:
        found = self._has("tokenizer.json")
        if found is not None:
            return Tokenizer.from_file(found)
        if self._has("tokenizer.model") is not None:
            raise CheckpointError(f"{self.path}: tokenizer.model alone is not supported: save the tokenizer as tokenizer.json")
        return None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face directory (config.json and safetensors) or a `.gguf` file. Every problem is a `CheckpointError` of one line."""
    where = Path(path)
    if where.is_dir():
        return DirectoryCheckpoint(where)
    if where.suffix == ".gguf":
        return GgufCheckpoint(where)
    if not where.exists():
        raise CheckpointError(f"{where}: no such file or directory")
    raise CheckpointError(f"{where}: neither a model directory nor a .gguf file")
