"""GGUF models in several files, as the gguf package writes them; files that do not belong together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pyllm.load import CheckpointError, open_checkpoint
from pyllm.load.gguf_shards import GgufShards, open_gguf
from pyllm.load.inspection import inspect
from pyllm.load.staging import OnDevice

from .builders import U32, gguf, info, value, write
from .test_gguf_archs import logits, saved, write_gguf


def test_a_split_file_is_the_whole_one(tmp_path: Path) -> None:
    """The same model written whole and in three files or more: the same tensors, config and logits."""
    writer_module = pytest.importorskip("gguf", reason="the reference writer is not installed: pip install gguf")
    pytest.importorskip("transformers")
    _, directory = saved(tmp_path, "qwen3moe")
    whole = write_gguf(directory, tmp_path / "whole.gguf", "qwen3moe")
    original = writer_module.GGUFWriter
    try:
        writer_module.GGUFWriter = lambda path, arch: original(path, arch, split_max_tensors=15)
        write_gguf(directory, tmp_path / "parts.gguf", "qwen3moe")
    finally:
        writer_module.GGUFWriter = original
    files = sorted(tmp_path.glob("parts-*.gguf"))
    assert len(files) >= 3
    one, many = open_checkpoint(whole), open_checkpoint(files[0])
    assert set(one.tensors) == set(many.tensors) and one.config == many.config
    staged = OnDevice(many.tensors, "cpu")
    for name, tensor in one.tensors.items():
        assert torch.equal(many.tensors[name], tensor) and torch.equal(staged[name], tensor), name
        assert many.tensors.shape(name) == tuple(tensor.shape)
    ids = torch.arange(20)
    assert torch.equal(logits(many, ids), logits(one, ids))
    found = inspect(files[0])
    assert (
        found.refused is None and len(found.tensors) == len(inspect(whole).tensors) and found.bytes == sum(f.stat().st_size for f in files)
    )
    with pytest.raises(CheckpointError, match=r"parts-00002-of-0000\d.gguf: key 'split.count' is \d: expected the first file"):
        open_checkpoint(files[1])
    files[-1].unlink()
    with pytest.raises(CheckpointError, match=r"parts-0000\d-of-0000\d.gguf: cannot be opened: No such file"):
        open_checkpoint(files[0])


def part(root: Path, number: int, count: int = 2, tensors: tuple[str, ...] = ("a",), no: int | None = None, total: int = 2) -> Path:
    keys = [("split.no", value(U32, number if no is None else no)), ("split.count", value(U32, count))]
    keys += [("split.tensors.count", value(U32, total))]
    infos = [info(name, (8,), 0, i * 32) for i, name in enumerate(tensors)]
    data = np.arange(8 * len(tensors), dtype=np.float32).tobytes()
    return write(root / f"m-{number + 1:05d}-of-{count:05d}.gguf", gguf(keys, infos, data))


def test_files_that_belong_together(tmp_path: Path) -> None:
    first = part(tmp_path, 0)
    part(tmp_path, 1, tensors=("b",))
    file = open_gguf(first)
    assert isinstance(file, GgufShards) and set(file) == {"a", "b"} and file.shape("b") == (8,)
    assert file["b"].tolist() == list(range(8))
    assert [f.path.name for f in file.files()] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    with pytest.raises(KeyError, match="no tensor 'c'"):
        file["c"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (dict(tensors=("a",)), "m-00002-of-00002.gguf: tensor 'a' is also in m-00001-of-00002.gguf"),
        (dict(tensors=("b", "c")), "key 'split.tensors.count' is 2, but the files hold 3 tensors"),
        (dict(tensors=("b",), no=0), "m-00002-of-00002.gguf: key 'split.no' is 0, expected 1"),
    ],
)
def test_files_that_do_not(tmp_path: Path, second: dict[str, object], message: str) -> None:
    first = part(tmp_path, 0)
    part(tmp_path, 1, **second)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        open_gguf(first)


def test_names_and_counts(tmp_path: Path) -> None:
    keys = [("split.count", value(U32, 3))]
    with pytest.raises(
        CheckpointError, match=r"m.gguf: key 'split.count' is 3: expected the first file of 3, named ...-00001-of-00003.gguf"
    ):
        open_gguf(write(tmp_path / "m.gguf", gguf(keys)))
    with pytest.raises(CheckpointError, match="key 'split.count' is 4294967295: expected the first file"):
        open_gguf(write(tmp_path / "m-00001-of-00002.gguf", gguf([("split.count", value(U32, 2**32 - 1))])))
    with pytest.raises(CheckpointError, match="key 'split.count' is 'x': expected a number of files"):
        open_gguf(write(tmp_path / "m.gguf", gguf([("split.count", value(8, "x"))])))
    assert not isinstance(open_gguf(write(tmp_path / "m.gguf", gguf([("split.count", value(U32, 1))]))), GgufShards)
    (tmp_path / "m-00001-of-00002.gguf").unlink()
    first = part(tmp_path, 0)
    outside = part(tmp_path.parent, 1, tensors=("b",))
    (tmp_path / "m-00002-of-00002.gguf").symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out of the model directory"):
        open_gguf(first)
