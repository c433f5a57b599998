"""GGUF: the parser's errors, the block decoders against known bytes and the reference package, names and config of a llama model."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllm.load.errors import CheckpointError
from pyllm.load.gguf_file import GgufFile
from pyllm.load.gguf_types import TYPES

from .builders import (
    ARRAY,
    BOOL,
    F32,
    I32,
    Q4_0_BLOCK,
    Q4_1_BLOCK,
    Q8_0_BLOCK,
    STRING,
    U32,
    U64,
    array,
    gguf,
    info,
    string,
    value,
    write,
)

KEYS = [
    ("general.architecture", value(STRING, "llama")),
    ("an.int", value(I32, -3)),
    ("a.flag", value(BOOL, True)),
    ("a.float", value(F32, 0.5)),
    ("a.u64", value(U64, 1 << 40)),
    ("words", array(STRING, ["a", "", "\u00e9"])),
    ("numbers", array(I32, [1, -2, 3])),
    ("flags", array(BOOL, [True, False])),
    ("none", array(F32, [])),
]
TENSORS = [info("m", (3, 2), 0, 0), info("v", (32,), 8, 32), info("h", (2,), 1, 96)]
DATA = struct.pack("<6f", *range(6)) + bytes(8) + Q8_0_BLOCK + bytes(30) + struct.pack("<2e", 1.0, -2.0)
GOOD = gguf(KEYS, TENSORS, DATA)


@pytest.mark.parametrize("version", [2, 3])
def test_reads(tmp_path: Path, version: int) -> None:
    file = GgufFile(write(tmp_path / "m.gguf", gguf(KEYS, TENSORS, DATA, version=version)))
    meta = file.metadata
    assert [meta[k] for k in ("general.architecture", "an.int", "a.flag", "a.float", "a.u64")] == ["llama", -3, True, 0.5, 1 << 40]
    assert meta["words"] == ["a", "", "\u00e9"]
    assert meta["numbers"].tolist() == [1, -2, 3]
    assert meta["flags"].tolist() == [True, False]
    assert meta["none"].tolist() == []
    assert file["m"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file["v"].tolist() == pytest.approx(list(range(-16, 16)), abs=0.07)
    assert (file["h"].dtype, file["h"].tolist()) == (torch.float16, [1, -2])
    assert (file.shape("v"), file.dtype("v")) == ((32,), torch.float32)
    with pytest.raises(KeyError, match="no tensor 'x'"):
        file["x"]


@pytest.mark.parametrize(("kind", "block"), [(2, Q4_0_BLOCK), (3, Q4_1_BLOCK), (8, Q8_0_BLOCK)])
def test_known_blocks(kind: int, block: bytes) -> None:
    """-16..15 in one block. The rounding step is the block's scale: 2 for Q4_0, 31/15 for Q4_1, 16/127 for Q8_0."""
    step = {2: 2.0, 3: 31 / 15, 8: 16 / 127}[kind]
    decode = TYPES[kind].decode
    assert decode is not None
    got = decode(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, -1))
    assert got.shape == (1, 32)
    assert (got[0] - torch.arange(-16, 16)).abs().max() <= step * 0.51
    assert len(set(got[0].tolist())) == {2: 16, 3: 16, 8: 32}[kind]


@pytest.mark.parametrize("kind", [kind for kind, block in TYPES.items() if block.decode is not None or kind in (0, 1, 30)])
@pytest.mark.parametrize("seed", [0, 1])
def test_decodes_like_the_reference_package(tmp_path: Path, kind: int, seed: int) -> None:
    """Random bytes, so every fp16 scale: subnormal, infinite and NaN too. Bitwise equal, NaN standing for NaN."""
    quants = pytest.importorskip("gguf.quants", reason="the reference decoder is not installed: pip install gguf")
    from gguf import GGMLQuantizationType

    block = TYPES[kind]
    columns, rows = 2048, 3000  # 6 million numbers: 24 chunks of the decoders
    nbytes = rows * columns // block.values * block.nbytes
    raw = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    path = write(tmp_path / "m.gguf", gguf([], [info("t", (columns, rows), kind, 0)], raw.tobytes()))
    with np.errstate(invalid="ignore", over="ignore"):
        want = quants.dequantize(raw.reshape(rows, -1), GGMLQuantizationType(kind))
    got = GgufFile(path)["t"].float().numpy()
    assert got.shape == want.shape == (rows, columns)
    nan = np.isnan(want)
    assert (np.isnan(got) == nan).all()
    assert (got.view(np.uint32) == want.view(np.uint32))[~nan].all()
    assert (~nan).any()
    part = GgufFile(path).part("t", rows - 1).float().numpy()
    assert (part.view(np.uint32) == got[-1].view(np.uint32))[~nan[-1]].all()
    with pytest.raises(IndexError, match=r"tensor 't': no part 3000 in shape \(3000, 2048\)"):
        GgufFile(path).part("t", rows)


def test_type_sizes_match_the_reference_package() -> None:
    gguf_package = pytest.importorskip("gguf", reason="the reference package is not installed: pip install gguf")
    sizes = {int(kind): size for kind, size in gguf_package.GGML_QUANT_SIZES.items()}
    for kind, block in TYPES.items():
        if kind in sizes:
            assert sizes[kind] == (block.values, block.nbytes), block.name
            assert gguf_package.GGMLQuantizationType(kind).name == block.name
    assert len(sizes.keys() & TYPES.keys()) >= 28


def test_a_type_without_a_decoder_is_named(tmp_path: Path) -> None:
    file = GgufFile(write(tmp_path / "m.gguf", gguf([], [info("blk.0.w", (256, 2), 19, 0)], bytes(100))))
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.w': type IQ1_S is not supported, only F32 F16 Q4_0 Q4_1 Q5_0"):
        file["blk.0.w"]


def key(raw: bytes, name: str | bytes = "k") -> bytes:
    return gguf(counts=(0, 1), data=string(name) + raw + bytes(64), alignment=1)


def one(*args: Any, data: bytes = bytes(128)) -> bytes:
    return gguf([], [info("t", *args)], data)


def align(raw: bytes) -> bytes:
    return gguf([("general.alignment", raw)], [], bytes(64))


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "magic": (b"GGML" + GOOD[4:], "magic: expected b'GGUF', got b'GGML'"),
    "short magic": (b"GG", "magic: needs 4 bytes at byte 0, where the file has only 2 left"),
    "version 1": (gguf(version=1), "version: 1 is not supported, only 2 and 3"),
    "big-endian": (gguf(version=3 << 24), "a big-endian file"),
    "many tensors": (gguf(counts=(1 << 60, 0)), "tensor count: 1152921504606846976 is more than"),
    "tensors past the end": (gguf(counts=(3, 0)), "tensor count: 3 is more than"),
    "many keys": (gguf(counts=(0, 1 << 60)), "key count: 1152921504606846976 is more than"),
    "keys past the end": (gguf(counts=(0, 3)), "key count: 3 is more than"),
    "long key": (key(value(U32, 1), "k" * 513), "key 0: a string of 513 bytes, more than 512"),
    "no key": (key(value(U32, 1), ""), "key 0: '' is not a printable name"),
    "key with a newline": (key(value(U32, 1), "a\nb"), r"key 0: 'a\\nb' is not a printable name"),
    "key not UTF-8": (key(value(U32, 1), b"\xff"), "key 0: not UTF-8 at byte 0"),
    "same key": (gguf([("k", value(U32, 1))] * 2), "key 'k' appears twice"),
    "value type": (key(struct.pack("<I", 13)), "key 'k': unknown value type 13"),
    "string size": (key(struct.pack("<IQ", STRING, 1 << 40)), "key 'k': a string of 1099511627776 bytes, more than"),
    "string end": (key(struct.pack("<IQ", STRING, 1000)), "key 'k': needs 1000 bytes at byte"),
    "string UTF-8": (key(value(STRING, b"a\xc3(")), "key 'k': not UTF-8 at byte 1"),
    "bool": (key(struct.pack("<IB", BOOL, 2)), "key 'k': 2 is not a bool"),
    "array size": (key(struct.pack("<IIQ", ARRAY, U32, 1 << 62)), "key 'k': an array of 4611686018427387904, more than 4194304"),
    "array end": (key(struct.pack("<IIQ", ARRAY, U32, 1000)), "key 'k': needs 4000 bytes"),
    "strings end": (key(struct.pack("<IIQ", ARRAY, STRING, 1000)), "key 'k': 1000 strings do not fit the"),
    "array type": (key(struct.pack("<IIQ", ARRAY, 13, 1)), "key 'k': unknown array element type 13"),
    "array of arrays": (key(struct.pack("<IIQ", ARRAY, ARRAY, 1)), "key 'k': arrays of arrays are not supported"),
    "rank 0": (one((), 0, 0), "tensor 't': rank 0 is not within 1..4"),
    "rank 5": (one((1,) * 5, 0, 0), "tensor 't': rank 5 is not within 1..4"),
    "size 0": (one((0,), 0, 0), r"tensor 't': sizes \[0\] are not within"),
    "overflowing sizes": (one((1 << 32, 1 << 32), 0, 0), "tensor 't': sizes .* are not within"),
    "tensor type": (one((32,), 4, 0), "tensor 't': unknown tensor type 4"),
    "part of a block": (one((33,), 8, 0), "tensor 't': rows of 33 are not whole Q8_0 blocks of 32"),
    "unaligned": (one((1,), 0, 4), "tensor 't': offset 4 is not a multiple of the alignment 32"),
    "outside": (one((32,), 0, 32), "tensor 't': bytes .* are outside the file"),
    "far outside": (one((32,), 0, (1 << 64) - 32), "tensor 't': bytes .* are outside the file"),
    "no name": (gguf([], [info("", (1,), 0, 0)], bytes(64)), "tensor 0: name '' is not printable"),
    "same tensor": (gguf([], [info("t", (1,), 0, 0), info("t", (1,), 0, 32)], bytes(64)), "tensor 't' appears twice"),
    "overlap": (gguf([], [info("t", (16,), 0, 0), info("u", (8,), 0, 32)], bytes(64)), "tensor 'u': offset 32 overlaps tensor 't'"),
    "alignment 0": (align(value(U32, 0)), "key 'general.alignment': 0 is not a power of 2"),
    "alignment 24": (align(value(U32, 24)), "key 'general.alignment': 24 is not a power of 2"),
    "alignment string": (align(value(STRING, "32")), "key 'general.alignment': type 8, expected 4 .u32."),
    "alignment u64": (align(value(U64, 32)), "key 'general.alignment': type 10, expected 4 .u32."),
    "alignment i32": (align(value(I32, 32)), "key 'general.alignment': type 5, expected 4 .u32."),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file(tmp_path: Path, case: str) -> None:
    data, message = BAD[case]
    path = write(tmp_path / "m.gguf", data)
    with pytest.raises(CheckpointError, match=message) as raised:
        GgufFile(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    keys = [("general.alignment", value(U32, 64))]
    tensors = [info("t", (1,), 0, 0), info("u", (1,), 0, 64)]
    data = gguf(keys, tensors, struct.pack("<f60xf", 1, 2), alignment=64)
    file = GgufFile(write(tmp_path / "m.gguf", data))
    assert (file["t"].item(), file["u"].item()) == (1, 2)


def check_opens_or_raises(path: Path, data: bytes, limit: int) -> None:
    write(path, data)
    message = ""
    tracemalloc.start()
    try:
        file = GgufFile(path)
        for name in file:
            if file.info(name).type.dtype is not None:
                assert file[name].numel() <= 8 * len(data)
    except CheckpointError as error:
        message = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "\n" not in message
    assert peak < limit


def test_every_truncation_is_an_error(tmp_path: Path) -> None:
    for end in range(len(GOOD)):
        path = write(tmp_path / "m.gguf", GOOD[:end])
        with pytest.raises(CheckpointError):
            GgufFile(path)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mutated_files_raise_nothing_else_and_allocate_little(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 8))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            raw[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 255, 1 << 20, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1])))
    check_opens_or_raises(tmp_path / "m.gguf", bytes(raw), 1 << 20)


def test_equals_the_reference_reader_on_the_demo_model(demo_path: Path) -> None:
    reader = pytest.importorskip("gguf", reason="the reference package is not installed: pip install gguf").GGUFReader(str(demo_path))
    file = GgufFile(demo_path)
    assert list(file) == [t.name for t in reader.tensors]
    for tensor in reader.tensors:
        assert file.shape(tensor.name) == tuple(int(n) for n in reversed(tensor.shape))
        assert (file.info(tensor.name).begin, file.info(tensor.name).nbytes) == (tensor.data_offset, tensor.n_bytes)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            got = file.metadata[name]
            assert (got.tolist() if isinstance(got, np.ndarray) else got) == field.contents(), name
