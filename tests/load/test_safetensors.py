"""safetensors: equal to the reference library on what it writes, and one clear error for everything else."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllm.load.errors import CheckpointError
from pyllm.load.safetensors_file import DTYPES, INDEX_NAME, SafetensorsFile, ShardedSafetensors, open_safetensors

from .builders import entry, safetensors, write

GOOD = safetensors({"a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [3], 16, 22)}, bytes(range(22)))


@pytest.mark.parametrize("seed", [0, 1])
def test_equals_the_reference_writer(tmp_path: Path, seed: int) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    g = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, dtype in enumerate(DTYPES.values()):
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (3, 5 * dtype.itemsize), dtype=torch.uint8, generator=g)
        tensors[f"t{i}.{dtype}"] = raw.view(dtype)
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "rank4": torch.randn(1, 2, 3, 4, generator=g)}
    path = tmp_path / "m.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file = SafetensorsFile(path)
    assert file.metadata == {"format": "pt"}
    assert set(file) == set(tensors)
    assert len(file) == len(tensors)
    for name, want in tensors.items():
        got = file[name]
        assert (file.shape(name), file.dtype(name)) == (tuple(want.shape), want.dtype) == (tuple(got.shape), got.dtype)
        assert got.contiguous().reshape(-1).view(torch.uint8).equal(want.contiguous().reshape(-1).view(torch.uint8)), name


def test_unaligned_data_and_odd_bools(tmp_path: Path) -> None:
    header = {"b": entry("BOOL", [3], 0, 3), "f": entry("F32", [1], 3, 7)}
    file = SafetensorsFile(write(tmp_path / "m.safetensors", safetensors(header, bytes([0, 1, 255]) + struct.pack("<f", 1.5))))
    assert file["b"].tolist() == [False, True, True]
    assert file["f"].tolist() == [1.5]


def test_writing_into_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", GOOD)
    SafetensorsFile(path)["a"].fill_(7)
    assert path.read_bytes() == GOOD


def test_a_file_larger_than_the_memory_of_the_host(tmp_path: Path) -> None:
    """Of holes, so that the disk need not have it."""
    size = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    path = write(tmp_path / "m.safetensors", safetensors({"a": entry("U8", [size], 0, size)}))
    os.truncate(path, path.stat().st_size + size)
    file = SafetensorsFile(path)
    assert file["a"][-1].item() == 0 and file.shape("a") == (size,)


def test_a_file_that_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("pyllm.load.mapped.mmap.mmap", refuse)
    with pytest.raises(CheckpointError, match=r"m.safetensors: \d+ bytes cannot be mapped: Cannot allocate memory"):
        SafetensorsFile(write(tmp_path / "m.safetensors", GOOD))


def test_a_file_that_shrinks_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", GOOD)
    file = SafetensorsFile(path)
    os.truncate(path, len(GOOD) - 4)
    with pytest.raises(CheckpointError, match="the file shrank from"):
        file["a"]


def test_unknown_name_is_a_key_error(tmp_path: Path) -> None:
    file = SafetensorsFile(write(tmp_path / "m.safetensors", GOOD))
    assert "c" not in file
    for read in (file.__getitem__, file.shape, file.dtype):
        with pytest.raises(KeyError, match="no tensor 'c'"):
            read("c")


F32 = entry("F32", [1], 0, 4)
BAD = {
    "empty file": (b"", "the file is empty"),
    "too short": (b"\0" * 9, "too few for a safetensors header"),
    "header past the end": (safetensors({}, length=100), "header length 100 is not within"),
    "header length 2**63": (safetensors({}, length=1 << 63), "header length 9223372036854775808 is not within"),
    "leading space": (safetensors(b" {}"), "starts with b' ', expected '{'"),
    "not JSON": (safetensors(b"{]"), "header: not valid JSON"),
    "not UTF-8": (safetensors(b'{"\xff": 1}'), "header: not UTF-8 at byte 2"),
    "NaN": (safetensors(b'{"a": NaN}'), "NaN is not JSON"),
    "deep": (safetensors(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested deeper than 3"),
    "a bit deep": (safetensors({"a": {"dtype": [[]], "shape": [], "data_offsets": [0, 0]}}), "nested deeper than 3"),
    "same key": (safetensors(b'{"a": %s, "a": %s}' % ((json.dumps(F32).encode(),) * 2), b"1234"), "key 'a' appears twice"),
    "same field": (safetensors(b'{"a": {"dtype": "F32", "dtype": "I32"}}'), "key 'dtype' appears twice"),
    "name with a newline": (safetensors({"a\nb": F32}, b"1234"), "is not 1..512 printable characters"),
    "long name": (safetensors({"a" * 513: F32}, b"1234"), "is not 1..512 printable characters"),
    "metadata": (safetensors({"__metadata__": {"a": 1}}), "__metadata__: expected an object of strings"),
    "not an object": (safetensors({"a": 3}), "tensor 'a': expected the fields data_offsets, dtype, shape, got 3"),
    "extra field": (safetensors({"a": F32 | {"x": 1}}, b"1234"), "tensor 'a': expected the fields"),
    "dtype": (safetensors({"a": F32 | {"dtype": "F33"}}, b"1234"), "tensor 'a': dtype 'F33' is not one of BOOL"),
    "dtype list": (safetensors({"a": F32 | {"dtype": ["F32"]}}, b"1234"), "tensor 'a': dtype"),
    "negative size": (safetensors({"a": F32 | {"shape": [-1]}}, b"1234"), "is not a list of at most 8 sizes"),
    "bool size": (safetensors({"a": F32 | {"shape": [True]}}, b"1234"), "is not a list of at most 8 sizes"),
    "float size": (safetensors({"a": F32 | {"shape": [1.0]}}, b"1234"), "is not a list of at most 8 sizes"),
    "rank 9": (safetensors({"a": F32 | {"shape": [1] * 9}}, b"1234"), "is not a list of at most 8 sizes"),
    "one offset": (safetensors({"a": F32 | {"data_offsets": [0]}}, b"1234"), "is not a list of two positions"),
    "backwards": (safetensors({"a": F32 | {"data_offsets": [4, 0]}}, b"1234"), "are outside the 4 bytes of data"),
    "outside": (safetensors({"a": entry("F32", [2], 0, 8)}, b"1234"), "are outside the 4 bytes of data"),
    "overflowing shape": (safetensors({"a": entry("F32", [1 << 62] * 8, 0, 4)}, b"1234"), "data_offsets span 4"),
    "size mismatch": (safetensors({"a": entry("F32", [2], 0, 4)}, b"1234"), r"\[2\] of F32 is 8 bytes, data_offsets span 4"),
    "overlap": (safetensors({"a": F32, "b": F32}, b"1234"), "tensor 'b': .* overlaps the tensor before it"),
    "hole": (safetensors({"a": F32, "b": entry("F32", [1], 8, 12)}, b"1" * 12), "tensor 'b': .* leaves a hole before it"),
    "trailing": (safetensors({"a": F32}, b"12345"), "1 bytes after the last tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(tmp_path: Path, case: str) -> None:
    data, message = BAD[case]
    path = write(tmp_path / "m.safetensors", data)
    with pytest.raises(CheckpointError, match=message) as raised:
        SafetensorsFile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@given(data=st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_raise_nothing_else_and_allocate_little(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(GOOD[: data.draw(st.integers(0, len(GOOD)))] if data.draw(st.booleans()) else GOOD)
    for _ in range(data.draw(st.integers(0, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = write(tmp_path / "m.safetensors", bytes(raw))
    message = ""
    tracemalloc.start()
    try:
        file = SafetensorsFile(path)
        assert sum(t.numel() * t.element_size() for t in file.values()) <= len(raw)
    except CheckpointError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < 1 << 20


# Shards


def shards(root: Path, weight_map: object, files: dict[str, bytes] | None = None) -> Path:
    defaults = {"x-1.safetensors": safetensors({"a": F32}, b"1234"), "x-2.safetensors": safetensors({"b": F32}, b"5678")}
    for name, raw in (defaults if files is None else files).items():
        write(root / name, raw)
    body = weight_map if isinstance(weight_map, str) else json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map})
    return write(root / INDEX_NAME, body)


GOOD_MAP = {"a": "x-1.safetensors", "b": "x-2.safetensors"}


def test_shards(tmp_path: Path) -> None:
    shards(tmp_path, GOOD_MAP)
    model = open_safetensors(tmp_path)
    assert sorted(model) == ["a", "b"]
    assert bytes(model["b"].view(torch.uint8).tolist()) == b"5678"
    assert (model.shape("a"), model.dtype("a")) == ((1,), torch.float32)
    with pytest.raises(KeyError, match="no tensor 'c'"):
        model["c"]


BAD_MAPS = {
    "parent": ({"a": "../x-1.safetensors"}, "'../x-1.safetensors' is not a plain file name"),
    "absolute": ({"a": "/etc/x.safetensors"}, "is not a plain file name"),
    "backslash": ({"a": "..\\x.safetensors"}, "is not a plain file name"),
    "nul": ({"a": "x\0.safetensors"}, "is not a plain file name"),
    "hidden": ({"a": ".x.safetensors"}, "is not a plain file name"),
    "other type": ({"a": "x-1.bin"}, "'x-1.bin' is not a .safetensors file"),
    "missing file": (GOOD_MAP | {"c": "x-3.safetensors"}, "x-3.safetensors: cannot be opened: No such file"),
    "not in shard": (GOOD_MAP | {"c": "x-1.safetensors"}, "tensor 'c' is not in x-1.safetensors"),
    "swapped": ({"a": "x-2.safetensors", "b": "x-1.safetensors"}, "tensor 'a' is not in x-2.safetensors"),
    "unlisted": ({"a": "x-1.safetensors", "z": "x-2.safetensors"}, "tensor 'z' is not in x-2.safetensors"),
    "empty": ({}, "names 0 files"),
    "not an object": ([], "weight_map: expected an object"),
    "numbers": ({"a": 1}, "weight_map: expected an object"),
    "same key": ('{"weight_map": {"a": "x-1.safetensors", "a": "x-2.safetensors"}}', "key 'a' appears twice"),
    "no object": ("[]", "expected a JSON object, got list"),
}


@pytest.mark.parametrize("case", BAD_MAPS)
def test_bad_index(tmp_path: Path, case: str) -> None:
    weight_map, message = BAD_MAPS[case]
    with pytest.raises(CheckpointError, match=message):
        ShardedSafetensors(shards(tmp_path, weight_map))


def test_tensor_in_two_shards_or_in_no_index(tmp_path: Path) -> None:
    files = {"x-1.safetensors": safetensors({"a": F32}, b"1234"), "x-2.safetensors": BAD["hole"][0]}
    two = safetensors({"a": F32, "b": entry("F32", [1], 4, 8)}, b"12345678")
    with pytest.raises(CheckpointError, match=r"tensor 'a' of x-2.safetensors is listed in x-1.safetensors"):
        ShardedSafetensors(shards(tmp_path, GOOD_MAP, files | {"x-2.safetensors": two}))
    with pytest.raises(CheckpointError, match=r"tensor 'b' of x-2.safetensors is not listed"):
        ShardedSafetensors(shards(tmp_path, {"a": "x-2.safetensors"}, {"x-2.safetensors": two}))


def test_links_out_of_the_directory(tmp_path: Path) -> None:
    outside, model = tmp_path / "outside.safetensors", tmp_path / "model"
    model.mkdir()
    write(outside, safetensors({"a": F32}, b"1234"))
    (model / "x-1.safetensors").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"'x-1.safetensors' leads out of the model directory"):
        ShardedSafetensors(shards(model, {"a": "x-1.safetensors"}, {}))
    (model / INDEX_NAME).unlink()
    with pytest.raises(CheckpointError, match="leads out of the model directory"):
        open_safetensors(model)


def test_links_of_the_hub_cache(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write(blobs / "0123", safetensors({"a": F32}, b"1234"))
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert list(open_safetensors(snapshot)) == ["a"]


def test_which_files_a_directory_means(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no .safetensors file$"):
        open_safetensors(tmp_path)
    write(tmp_path / "pytorch_model.bin", b"x")
    with pytest.raises(CheckpointError, match=r"'pytorch_model.bin' may hold code \(pickle\) and is never read"):
        open_safetensors(tmp_path)
    write(tmp_path / "p.safetensors", GOOD)
    assert len(open_safetensors(tmp_path)) == 2
    write(tmp_path / "q.safetensors", GOOD)
    with pytest.raises(CheckpointError, match=r"2 .safetensors files but no model.safetensors.index.json"):
        open_safetensors(tmp_path)
    write(tmp_path / "model.safetensors", GOOD)
    assert len(open_safetensors(tmp_path)) == 2
    shards(tmp_path, GOOD_MAP)
    with pytest.raises(CheckpointError, match=r"has both model.safetensors and"):
        open_safetensors(tmp_path)


def test_fifo_and_directory_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"not a regular file|cannot be opened"):
        SafetensorsFile(tmp_path)
