"""What every op has: a schema that says the truth about aliasing, a CPU reference, a fake, CUDA code, and a documented public function."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
import torch

import pyllm.ops
from pyllm.ops.registry import OpInfo, check, define
from tests.repo.sources import ALL_OPS

every_op = pytest.mark.parametrize("op", ALL_OPS, ids=lambda op: op.name)


def test_there_are_ops() -> None:
    assert ALL_OPS


@every_op
def test_schema(op: OpInfo) -> None:
    schema = torch._C.parse_schema(f"pyllm::{op.schema}")
    assert schema.name == f"pyllm::{op.name}"
    assert str(getattr(torch.ops.pyllm, op.name).default._schema) == str(schema)
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.pyllm, op.name).default.tags
    assert all(value.alias_info is None for value in schema.returns), "a returned tensor must not alias an argument"
    strings = [argument.name for argument in schema.arguments if "str" in str(argument.type)]
    assert not strings, f"string arguments leak in the stable ABI, use an int enum: {strings}"


@every_op
def test_reference_and_fake_are_registered(op: OpInfo) -> None:
    for key in ("CPU", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pyllm::{op.name}", key), f"{op.name} has no {key} implementation"
    if op.composition:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"pyllm::{op.name}", "CUDA"), f"{op.name} has no CUDA composition"


@every_op
def test_stem_and_public_name(op: OpInfo) -> None:
    assert re.fullmatch(r"[a-z0-9]+/[a-z0-9_]+", op.stem)
    assert re.fullmatch(r"pyllm\.ops\.[a-z0-9_]+\.[a-z0-9_]+", op.public)
    module, function = op.public.rsplit(".", 1)
    public = getattr(importlib.import_module(module), function)
    assert inspect.unwrap(getattr(pyllm.ops, function)) is public, f"pyllm.ops does not export {function}"
    assert function in pyllm.ops.__all__


@every_op
def test_the_docstring_names_every_argument(op: OpInfo) -> None:
    module, function = op.public.rsplit(".", 1)
    public = getattr(importlib.import_module(module), function)
    doc = inspect.getdoc(public) or ""
    missing = [parameter for parameter in inspect.signature(public).parameters if not re.search(rf"\b{parameter}\b", doc)]
    assert not missing, f"{op.public}: the docstring says nothing of {', '.join(missing)}"
    hints = inspect.signature(public)
    assert hints.return_annotation is not inspect.Signature.empty
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in hints.parameters.values())


def test_check_names_op_argument_and_message() -> None:
    check(True, "op", "x", "is wrong")
    with pytest.raises(ValueError, match=r"^act_mul: x is wrong$"):
        check(False, "act_mul", "x", "is wrong")


def test_an_op_is_defined_once() -> None:
    with pytest.raises(ValueError, match="defined twice"):
        define(ALL_OPS[0].schema, stem="a/b", public="p", reference=print, fake=print)
