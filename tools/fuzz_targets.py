"""What the fuzzers feed with mutated files: one function of bytes for each kind of file.

A target may raise nothing but the error that the loaders promise; where a file is accepted, what it gives is checked against another
reader or against the rules of the format. `accepted` says whether the file was.
"""

from __future__ import annotations

import json
import struct
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from pyllm.load.chat import MAX_OUTPUT, ChatTemplateError, render_chat
from pyllm.load.checkpoint import MAX_CONFIG
from pyllm.load.errors import MAX_MESSAGE, CheckpointError
from pyllm.load.gguf_file import GgufFile
from pyllm.load.gguf_model import gguf_config
from pyllm.load.gguf_shards import open_gguf
from pyllm.load.gguf_tensors import GgufTensors
from pyllm.load.jsonfile import read_json_object
from pyllm.load.safetensors_file import INDEX_NAME, SafetensorsFile, open_safetensors
from pyllm.load.tokenizer import Tokenizer
from pyllm.models import spec_from_config

Target = Callable[[bytes], bool]
SHM = Path("/dev/shm")
MAX_DECODED = 4 << 20  # numbers: what the largest good file of a few kilobytes can hold, many times over


def _check_message(error: Exception) -> None:
    message = str(error)
    assert "\n" not in message and len(message) <= MAX_MESSAGE + 3 and message.isprintable(), ascii(message)


class Files:
    """One folder of scratch files, in memory where the system has such a place."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None, prefix="pyllm-fuzz-")
        self.root = Path(self._folder.name)

    def put(self, name: str, data: bytes) -> Path:
        path = self.root / name
        path.write_bytes(data)
        return path


def safetensors_target(files: Files) -> Target:
    """Accepted files: every tensor as the reference library has it, name by name and byte by byte."""
    import safetensors

    def run(data: bytes) -> bool:
        try:
            file = SafetensorsFile(files.put("m.safetensors", data))
        except CheckpointError as error:
            _check_message(error)
            return False
        want = dict(safetensors.deserialize(data))
        assert set(want) == set(file)
        for name in file:
            t = file[name]
            assert list(t.shape) == want[name]["shape"]
            raw = bytes(want[name]["data"])
            raw = bytes(b != 0 for b in raw) if t.dtype == torch.bool else raw  # any other byte than 0 is true
            assert bytes(t.flatten().view(torch.uint8).numpy()) == raw, name
        return True

    return run


def index_target(files: Files) -> Target:
    """Two shards that stay as they are beside a mutated index: every tensor comes from the shard that the index names."""
    for name, tensor in (("a-00001.safetensors", "x"), ("a-00002.safetensors", "y")):
        header = json.dumps({tensor: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        files.put(name, struct.pack("<Q", len(header)) + header + struct.pack("<2f", ord(tensor), 1))

    def run(data: bytes) -> bool:
        files.put(INDEX_NAME, data)
        try:
            tensors = open_safetensors(files.root)
        except CheckpointError as error:
            _check_message(error)
            return False
        assert set(tensors) <= {"x", "y"}  # an index may leave a file out
        assert all(tensors[name].tolist() == [float(ord(name)), 1.0] for name in tensors)
        return True

    return run


def config_target(files: Files) -> Target:
    """JSON, then the declaration that the config asks for."""

    def run(data: bytes) -> bool:
        try:
            config = read_json_object(files.put("config.json", data), MAX_CONFIG)
        except CheckpointError as error:
            _check_message(error)
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                spec_from_config(config)
        except ValueError:
            return False
        return True

    return run


def gguf_target(files: Files) -> Target:
    """Accepted files: extents inside the file and apart, every readable tensor decoded, config, names and tokenizer made of it."""

    def run(data: bytes) -> bool:
        try:
            file = open_gguf(files.put("m.gguf", data))
        except CheckpointError as error:
            _check_message(error)
            return False
        _check_extents(file, data)
        _check_reference(file)
        for make in (lambda: _check_model(file), lambda: Tokenizer.from_gguf(file).encode("ab 12")):
            try:
                make()
            except CheckpointError as error:
                _check_message(error)
        return True

    return run


def _check_extents(file: GgufFile, data: bytes) -> None:
    at = file.header_end
    for info in sorted((file.info(name) for name in file), key=lambda info: info.begin):
        assert info.begin >= at and info.begin + info.nbytes <= len(data)
        at = info.begin + info.nbytes
    for name in file:
        info = file.info(name)
        if info.type.dtype is not None:
            t = file[name]
            assert tuple(t.shape) == info.shape and t.numel() <= MAX_DECODED
            if info.type.decode is None:
                assert bytes(t.flatten().view(torch.uint8).numpy()) == data[info.begin : info.begin + info.nbytes]


def _check_reference(file: GgufFile) -> None:
    """The same tensors in the same places as the reference reader finds them."""
    try:
        from gguf import GGUFReader
    except ImportError:
        return
    want = {t.name: ([int(n) for n in reversed(t.shape)], int(t.data_offset), int(t.n_bytes)) for t in GGUFReader(file.path).tensors}
    assert want == {name: (list(file.shape(name)), file.info(name).begin, file.info(name).nbytes) for name in file}


def _check_model(file: GgufFile) -> None:
    tensors = GgufTensors(file, gguf_config(file))
    for name in tensors:
        if file.info(tensors.recipe(name).tensors[0]).type.dtype is not None:
            assert tuple(tensors[name].shape) == tensors.shape(name)


def tokenizer_target(files: Files) -> Target:
    """Accepted files: any text is encoded and the ids are decoded, without a panic of the library and without a hang."""

    def run(data: bytes) -> bool:
        try:
            tokenizer = Tokenizer.from_file(files.put("tokenizer.json", data))
        except CheckpointError as error:
            _check_message(error)
            return False
        try:
            tokenizer.decode(tokenizer.encode("a b<s> 12 \u00e9"))
        except (CheckpointError, ValueError):
            return False
        return True

    return run


def template_target(files: Files) -> Target:
    """A template renders within its budget, or its error is the promised one."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "x" * 50}]

    def run(data: bytes) -> bool:
        try:
            text = render_chat(data.decode("utf-8", "replace"), messages, bos_token="<s>", eos_token="</s>")
        except ChatTemplateError as error:
            _check_message(error)
            return False
        assert len(text) <= MAX_OUTPUT
        return True

    return run


TARGETS: dict[str, tuple[Callable[[Files], Target], int]] = {  # and how many of a hundred files each gets
    "gguf": (gguf_target, 35),
    "safetensors": (safetensors_target, 30),
    "index": (index_target, 10),
    "config": (config_target, 10),
    "tokenizer": (tokenizer_target, 10),
    "template": (template_target, 5),
}
