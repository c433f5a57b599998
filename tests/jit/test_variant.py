"""AttentionVariant as a declaration: comparable, hashable, printable, with errors that say what was expected. No compiler."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from pyllm.jit import AttentionVariant, Param
from pyllm.jit.params import Params
from pyllm.jit.source import TEMPLATES, generate, template_folder
from pyllm.jit.variant import numbered
from tests.jit.examples import alibi, document_mask, soft_cap
from tools.digest import CSRC, included


def test_equal_declarations_are_one_variant() -> None:
    one, two, other = alibi(4), alibi(4), alibi(8)
    assert one == two and hash(one) == hash(two) and one.number == two.number
    assert one != other and one.number != other.number
    assert numbered(one.number) == one
    assert "alibi" in repr(one) and "slopes[h]" in repr(one) and "number" not in repr(one)


def test_values_are_no_part_of_the_code() -> None:
    assert generate(soft_cap(3.0), 64, 64, torch.float16) == generate(soft_cap(4.0), 64, 64, torch.float16)
    assert generate(soft_cap(3.0), 64, 64, torch.float16) != generate(soft_cap(3.0), 64, 64, torch.bfloat16)


def test_lists_become_tuples() -> None:
    variant = AttentionVariant("v", params=[Param("a", [1.0, 2])])  # type: ignore[arg-type]
    assert variant.params == (Param("a", (1.0, 2)),)
    hash(variant)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "name": ({"name": "two words"}, "name is 'two words', expected an identifier"),
    "quote": ({"name": 'a"b'}, "expected an identifier"),
    "score": ({"score": "  "}, "v: score is '  ', expected C"),
    "mask": ({"mask": None}, "v: mask is None, expected C"),
    "param": ({"params": ("a",)}, "v: params holds 'a', expected a Param"),
    "twice": ({"params": (Param("a", 1.0), Param("a", 2.0))}, "v: params are a, a, expected at most 8 different names"),
    "many": ({"params": tuple(Param(f"a{i}", 1.0) for i in range(9))}, "expected at most 8 different names"),
    "reference": ({"reference": "s"}, "v: reference is 's', expected a function"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case: str) -> None:
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        AttentionVariant(**{"name": "v"} | change)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k_pos", 1.0, "name is 'k_pos', expected an identifier other than"),
        ("a b", 1.0, "name is 'a b', expected an identifier"),
        ("a", "float16", "a: value is 'float16', expected a number"),
        ("a", (), r"a: value is \(\), expected a number"),
        ("a", ("x",), r"a: value is \('x',\), expected a number"),
    ],
)
def test_errors_of_parameters(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Param(name, value)


def test_tensors_of_a_call() -> None:
    variant, good = document_mask(4), torch.zeros(2, 4, dtype=torch.int32)
    assert variant.tensors({"document": good}) == [good]
    for given, message in (
        ({}, "tensors has no 'document', which variant documents takes"),
        ({"document": good.long()}, r"tensors\['document'\] is torch.int64, expected contiguous int32"),
        ({"document": good.T}, "not contiguous, expected contiguous int32"),
        ({"document": good, "width": good}, "tensors has width, which variant documents does not take"),
    ):
        with pytest.raises(ValueError, match=message):
            variant.tensors(given)


def test_the_digest_covers_every_template() -> None:
    found = {path.relative_to(CSRC).as_posix() for path in included(CSRC / TEMPLATES[0])}
    assert found == set(TEMPLATES)


def test_the_mirror_of_the_parameters_agrees_with_the_header() -> None:
    """Names, order and kinds; the generated source asserts the size."""
    text = (template_folder() / "attention/simple_params.cuh").read_text(encoding="utf-8")
    body = re.sub(r"//[^\n]*", "", text[text.index("struct SimpleAttentionParams") :])
    kinds = {"int64_t": "c_long", "int": "c_int", "float": "c_float", "uint64_t": "c_ulong_Array_8"}
    found = [
        (name, "c_void_p" if star else kinds[kind])
        for kind, star, name in re.findall(r"^\s+(?:const )?(\w+)(\*?)\s+(\w+)(?:\[8\])?;", body, re.MULTILINE)
    ]
    assert found == [(name, kind.__name__) for name, kind in Params._fields_]
