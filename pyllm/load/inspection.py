"""What is inside a model file or directory, and what is odd about it, without running or trusting any of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .chat import ChatTemplateError, render_chat
from .checkpoint import Checkpoint, DirectoryCheckpoint, GgufCheckpoint, open_checkpoint
from .errors import CheckpointError, show
from .fit import misfit
from .gguf_file import GgufFile
from .safetensors_file import DTYPES, INDEX_NAME, SafetensorsFile, ShardedSafetensors
from .tensors import TensorMap

LONG_VALUE = 64 << 10  # of a metadata string: longer ones than this are templates and vocabularies, or hide something
CODE = (".py", ".so", ".dll", ".dylib", ".sh", ".bat", ".ps1", ".exe", ".js", ".jar", ".wasm", ".ipynb", ".pth")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npz", ".npy", ".joblib", ".h5", ".keras", ".msgpack", ".engine")
CODE_FIELDS = ("auto_map", "custom_pipelines", "trust_remote_code", "custom_generate")
TEMPLATE_TRICKS = re.compile(
    r"__\w+__|\b(?:mro|subclasses|lipsum|cycler|joiner|popen|builtins|globals)\b|\|\s*attr\b|{%-?\s*(?:import|include|extends|from)\b"
)
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class Tensor:
    """One tensor as it is stored."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class Inspection:
    """Everything `pyllm inspect` prints. Texts that come from the file are escaped (ASCII, no control characters) and cut."""

    path: str
    kind: str
    bytes: int = 0
    name: str | None = None
    architecture: str | None = None
    refused: str | None = None  # why pyllm does not open it
    not_served: str | None = None  # why it opens but does not run
    tensors: list[Tensor] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    suspicions: list[str] = field(default_factory=list)

    def types(self) -> dict[str, tuple[int, int, int]]:
        """Type -> (tensors, numbers, bytes), the largest first."""
        out: dict[str, tuple[int, int, int]] = {}
        for t in self.tensors:
            n, numbers, size = out.get(t.type, (0, 0, 0))
            out[t.type] = n + 1, numbers + int(np.prod(t.shape, dtype=object)), size + t.bytes
        return dict(sorted(out.items(), key=lambda item: -item[1][2]))

    def json(self) -> dict[str, Any]:
        return asdict(self) | {"types": self.types()}


def plain(text: object, limit: int = 160) -> str:
    """A text of the file as escaped ASCII without quotes."""
    if not isinstance(text, str):
        return show(text, limit)
    shown = ascii(text[: limit + 1])[1:-1]
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def _value(value: Any) -> str:
    if isinstance(value, list):
        first = ", ".join(show(v, 24) for v in value[:4])
        return f"{len(value)} strings: {first}{', ...' if len(value) > 4 else ''}"
    if isinstance(value, np.ndarray):
        first = ", ".join(str(v) for v in value[:6].tolist())
        return f"{len(value)} of {value.dtype}: {first}{', ...' if len(value) > 6 else ''}"
    return f"{show(value, 100)} ({len(value)} characters)" if isinstance(value, str) and len(value) > 100 else show(value, 200)


def _gguf_tensors(file: GgufFile) -> list[Tensor]:
    return [Tensor(plain(n), i.type.name, i.shape, i.nbytes) for n, i in ((n, file.info(n)) for n in file)]


def _plain_tensors(tensors: TensorMap) -> list[Tensor]:
    rows = ((n, tensors.dtype(n), tensors.shape(n)) for n in tensors)
    return [Tensor(plain(n), NAMES[d], s, d.itemsize * int(np.prod(s, dtype=object))) for n, d, s in rows]


def _odd_names(tensors: TensorMap) -> Iterator[str]:
    for name in tensors:
        if re.search(r"[/\\]|\.\.", name):
            yield f"tensor {show(name)} is named like a path"
        elif not name.isascii():
            yield f"tensor {show(name)} has letters outside ASCII in its name"


def _gguf_oddities(file: GgufFile) -> Iterator[str]:
    for key, value in file.metadata.items():
        if isinstance(value, str) and len(value) > LONG_VALUE and key != "tokenizer.chat_template":
            yield f"key {show(key)} holds {len(value)} characters"
    unreadable = sorted({file.info(n).type.name for n in file if file.info(n).type.dtype is None})
    if unreadable:
        yield f"tensors of types that are not read: {' '.join(unreadable)}"
    for one in file.files():
        end = max((one.info(n).begin + one.info(n).nbytes for n in one), default=one.header_end)
        if one.size - end >= one.alignment:
            yield f"{show(one.path.name)}: {one.size - end} bytes after the last tensor belong to no tensor"
        if (hidden := one.gaps()) > 0:
            yield f"{show(one.path.name)}: {hidden} bytes between the tensors belong to no tensor and are more than the alignment needs"


def _directory_oddities(root: Path) -> Iterator[str]:
    for path in sorted(root.iterdir()):
        suffix = path.suffix.lower()
        if path.is_symlink() and not path.exists():
            yield f"{show(path.name)} is a link that leads nowhere"
        elif path.is_dir():
            continue
        elif suffix in CODE:
            yield f"{show(path.name)} is code: it is never run or read"
        elif suffix in PICKLES:
            yield f"{show(path.name)} may hold code (pickle): it is never read"
        elif path.name.startswith(".") and path.name != ".gitattributes":
            yield f"{show(path.name)} is hidden"


def _config_oddities(config: dict[str, Any], where: str = "config") -> Iterator[str]:
    for key in CODE_FIELDS:
        if config.get(key):
            yield f"{where}: {key} names code, which is never loaded: {show(config[key])}"
    if config.get("quantization_config"):
        yield f"{where}: quantization_config is set"


def _template_oddities(checkpoint: Checkpoint) -> Iterator[str]:
    template = checkpoint.chat_template
    if template is None:
        return
    tricks = sorted({m.group(0) for m in TEMPLATE_TRICKS.finditer(template)})
    if tricks:
        yield f"the chat template uses {', '.join(show(t, 40) for t in tricks[:8])}"
    try:
        render_chat(template, [{"role": "user", "content": "hi"}], bos_token="<s>", eos_token="</s>")
    except ChatTemplateError as error:
        yield f"a user's message alone does not render: {plain(str(error))}"


def _tokenizer_oddities(checkpoint: Checkpoint) -> Iterator[str]:
    try:
        tokenizer = checkpoint.tokenizer
    except CheckpointError as error:
        yield f"no usable tokenizer: {plain(str(error))}"
        return
    rows = checkpoint.config.get("vocab_size")
    if tokenizer is None:
        yield "there is no tokenizer"
    elif type(rows) is int and tokenizer.vocab_size > rows:
        yield f"the tokenizer has {tokenizer.vocab_size} tokens, more than the {rows} rows of the embedding"


def _not_served(checkpoint: Checkpoint, suspicions: list[str]) -> str | None:
    """Why the declaration of this config does not fit, if it does not: an unknown architecture, a tensor that is missing, has another
    shape or is one too many. What it only warns of is a suspicion."""
    from pyllm.models import spec_from_config

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spec = spec_from_config(checkpoint.config)
        suspicions += [plain(str(w.message), 300) for w in caught]
        return misfit(spec, checkpoint.tensors)
    except ValueError as error:
        return plain(str(error), 300)


def _values(tensors: TensorMap) -> Iterator[str]:
    """Reads every number: non-finite ones, and tensors of nothing but zeros."""
    for name in tensors:
        t = tensors[name]
        if t.is_floating_point() and t.numel():
            wide = t.float() if t.dtype.itemsize == 1 else t
            bad = int((~torch.isfinite(wide)).sum())
            if bad:
                yield f"tensor {show(name)}: {bad} of {t.numel()} numbers are infinite or not numbers"
            elif not wide.any():
                yield f"tensor {show(name)} is all zeros"


def _describe(out: Inspection, checkpoint: Checkpoint) -> TensorMap:
    out.name = plain(checkpoint.name)
    names = checkpoint.config.get("architectures")
    out.architecture = plain(names[0]) if isinstance(names, list) and names else None
    if isinstance(checkpoint, GgufCheckpoint):
        out.bytes, stored = checkpoint.file.size, checkpoint.file
        out.tensors = _gguf_tensors(stored)
        out.metadata = {plain(k): _value(v) for k, v in stored.metadata.items()}
        out.suspicions += [*_odd_names(stored), *_gguf_oddities(stored)]
    else:
        out.tensors = _plain_tensors(checkpoint.tensors)
        out.bytes = sum(t.bytes for t in out.tensors)
        out.metadata = {plain(k): _value(v) for k, v in checkpoint.config.items() if not isinstance(v, list)}
        out.suspicions += [*_odd_names(checkpoint.tensors), *_config_oddities(checkpoint.config)]
    out.suspicions += [*_template_oddities(checkpoint), *_tokenizer_oddities(checkpoint)]
    out.not_served = _not_served(checkpoint, out.suspicions)
    return checkpoint.tensors


def _weights_alone(out: Inspection, tensors: SafetensorsFile | ShardedSafetensors) -> TensorMap:
    out.tensors = _plain_tensors(tensors)
    out.bytes = sum(t.bytes for t in out.tensors)
    if isinstance(tensors, SafetensorsFile):
        out.metadata = {plain(k): _value(v) for k, v in tensors.metadata.items()}
    out.suspicions += _odd_names(tensors)
    return tensors


def inspect(path: str | Path, values: bool = False) -> Inspection:
    """A `.gguf` or `.safetensors` file, an index of shards, or a model directory. values: look at every number, which reads it all."""
    where = Path(path)
    kinds = {".gguf": "GGUF file", ".safetensors": "safetensors file"}
    kind = "model directory" if where.is_dir() else "index of safetensors" if where.name == INDEX_NAME else kinds.get(where.suffix, "file")
    out = Inspection(plain(str(path), 300), kind)
    if where.is_dir():
        out.suspicions += _directory_oddities(where)
    try:
        if where.suffix == ".safetensors":
            tensors = _weights_alone(out, SafetensorsFile(where))
        elif where.name == INDEX_NAME:
            tensors = _weights_alone(out, ShardedSafetensors(where))
        else:
            checkpoint = open_checkpoint(where)
            if isinstance(checkpoint, DirectoryCheckpoint):
                out.suspicions += _config_oddities(checkpoint.tokenizer_config, "tokenizer_config")
            tensors = _describe(out, checkpoint)
        if values:
            out.suspicions += _values(tensors)
    except CheckpointError as error:
        out.refused = plain(str(error), 500)
    return out
