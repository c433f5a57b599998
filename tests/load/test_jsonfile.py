"""Strict JSON: what it accepts is what Python's parser reads; what another reader could read otherwise is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllm.load import CheckpointError
from pyllm.load.jsonfile import parse_json_object, read_json_object

from .builders import write

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT)
VALUES = st.recursive(LEAVES, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)), max_leaves=12)
OBJECTS = st.dictionaries(TEXT, VALUES, max_size=4)


def depth(value: Any) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max(map(depth, children), default=0)


@given(value=OBJECTS, spaced=st.booleans(), limit=st.integers(1, 8))
@settings(max_examples=200, deadline=None)
def test_objects_come_back_and_depth_is_limited(value: dict[str, Any], spaced: bool, limit: int) -> None:
    data = json.dumps(value, indent=2 if spaced else None, ensure_ascii=spaced).encode()
    if depth(value) <= limit:
        assert parse_json_object(data, "f", limit) == value
    else:
        with pytest.raises(CheckpointError, match=f"^f: JSON is nested deeper than {limit}$"):
            parse_json_object(data, "f", limit)


@given(value=OBJECTS, key=TEXT, at=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_a_key_twice_is_refused_at_any_level(value: dict[str, Any], key: str, at: int) -> None:
    name = json.dumps(key)
    inner = f"{{{name}: 1, {name}: {json.dumps(value)}}}"
    for _ in range(at):
        inner = f'{{"x": [{inner}]}}'
    with pytest.raises(CheckpointError, match="appears twice"):
        parse_json_object(inner.encode(), "f", 32)


@given(data=st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_an_object_or_the_promised_error(data: bytes) -> None:
    try:
        got = parse_json_object(data, "f", 8)
    except CheckpointError as error:
        assert str(error).startswith("f: ") and "\n" not in str(error)
    else:
        assert got == json.loads(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"[" * 100_000, "nested deeper than 8"),
        (b'{"a": ' + b"[" * 100_000, "nested deeper than 8"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": 1} {}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": 01}', "not valid JSON"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_json_object(data, "f", 8)


def test_numbers_too_large_for_a_float_are_infinite_and_no_field_takes_them(tmp_path: Path) -> None:
    from pyllm.models import spec_from_config

    config = read_json_object(write(tmp_path / "config.json", b'{"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e999}'), 1000)
    assert config["rms_norm_eps"] == math.inf
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    with pytest.raises(ValueError, match="rms_norm_eps is inf, expected a positive number"):
        spec_from_config(config | sizes)


def test_size_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing
    with pytest.raises(CheckpointError, match=r"config.json: 1099511627776 bytes, more than the 4194304 allowed"):
        read_json_object(path, 4 << 20)
