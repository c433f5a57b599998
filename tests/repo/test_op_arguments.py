"""Every argument of every op, given something of the wrong kind, is an error that names the op and the argument."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pyllm import ops
from tests.repo.op_calls import CALLS

OTHER_DTYPES = (torch.complex64, torch.float64, torch.int16)  # no op takes one
NUMBERS = np.ones((2, 3), np.float32)


def wrong_tensors(t: Tensor) -> Iterator[tuple[str, Any]]:
    """Of the wrong rank, dtype or device."""
    yield "rank + 1", t[None]
    yield "rank 0", t.flatten()[0] if t.numel() else t.sum()
    if t.dim() > 1:
        yield "rank 1", t.flatten()
    if t.dim() > 2:
        yield "rank - 1", t.flatten(0, 1)
    yield from ((str(dtype), torch.ones(t.shape, dtype=dtype)) for dtype in OTHER_DTYPES if dtype != t.dtype)


def wrong_values(value: Any, hint: str, others: bool) -> Iterator[tuple[str, Any]]:
    """What is no value of an argument with this type hint, by a good one. others: there are other tensors in the call."""
    if "None" not in hint:
        yield "None", None
    yield "text", "no such thing"
    yield "array", NUMBERS
    yield "object", object()
    if "str" not in hint and "Mapping" not in hint:
        yield "dict", {}
    if "Sequence" not in hint:
        yield "list", [1.5]
    if not re.search(r"\b(int|float|bool)\b", hint):
        yield "int", 3
    if "float" not in hint and "bool" not in hint:
        yield "float", 1.5
    if not re.search(r"\bTensor\b", hint):
        yield "tensor", torch.ones(2, 3)
    if isinstance(value, Tensor):
        yield from wrong_tensors(value)
    if isinstance(value, Tensor) and others:
        yield "meta", value.to("meta")
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        yield from ((f"{what} inside", [wrong]) for what, wrong in (("None", None), ("array", NUMBERS), *wrong_tensors(value[0])))
        yield "one more", [*value, value[0]]


BLAMED = {
    ("linear_fp8", "x_scale"): "weight_scale",  # whose shape follows from it
    ("norm_linear", "norm_weight"): "rms_norm: weight|layer_norm: weight",
    ("norm_linear", "norm_bias"): "layer_norm: bias",
}
"""What an error may name in place of an argument: another one that it no longer fits, or the same in the words of the op that takes it."""


def cases() -> list[Any]:
    out = []
    for name, calls in CALLS.items():
        for i, make in enumerate(calls):
            out += [pytest.param(name, i, argument, id=f"{name}-{i}-{argument}") for argument in make()]
    return out


def test_every_public_op_has_its_calls() -> None:
    assert set(CALLS) == set(ops.__all__), "tests/repo/op_calls.py has a good call of each"
    for name, calls in CALLS.items():
        given = {argument for make in calls for argument in make()}
        assert given == set(inspect.signature(getattr(ops, name)).parameters), name


@pytest.mark.parametrize(("name", "i"), [(name, i) for name, calls in CALLS.items() for i in range(len(calls))])
def test_the_calls_are_good(name: str, i: int) -> None:
    getattr(ops, name)(**CALLS[name][i]())


@pytest.mark.parametrize(("name", "i", "argument"), cases())
def test_a_wrong_argument_is_named(name: str, i: int, argument: str) -> None:
    hint = str(getattr(ops, name).__annotations__[argument])
    failed = []
    call = CALLS[name][i]()
    others = any(isinstance(value, Tensor) for other, value in call.items() if other != argument)
    for what, wrong in wrong_values(call[argument], hint, others):
        try:
            getattr(ops, name)(**call | {argument: wrong})
        except (TypeError, ValueError) as error:
            if not re.match(rf"{name}: .*\b({argument}|{BLAMED.get((name, argument), argument)})\b", str(error), re.DOTALL):
                failed.append(f"{what}: says {type(error).__name__}: {error}")
        except Exception as error:
            failed.append(f"{what}: raises {type(error).__name__}: {error}")
        else:
            failed.append(f"{what}: is taken")
    assert not failed, "\n".join(failed)


def test_an_op_inside_another_names_both() -> None:
    call = CALLS["norm_linear"][0]() | {"x": torch.ones(2, 12, dtype=torch.bfloat16), "weight": torch.ones(16, 12, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"^norm_linear: rms_norm: x \.size\(1\) is 12, expected a multiple of 8"):
        ops.norm_linear(**call | {"norm_weight": torch.ones(12)})


def test_too_few_arguments_are_pythons_own_error() -> None:
    with pytest.raises(TypeError, match=r"rms_norm\(\) missing 1 required positional argument: 'eps'"):
        ops.rms_norm(torch.ones(2, 8), torch.ones(8))  # type: ignore[call-arg]


def test_numbers_of_other_libraries_are_numbers() -> None:
    """torch takes them, so no error about another argument may blame them."""
    x, weight = torch.ones(2, 16), torch.ones(16)
    for eps in (np.float32(1e-5), np.float64(1e-5), torch.tensor(1e-5), 0):
        ops.rms_norm(x, weight, eps)
        with pytest.raises(ValueError, match="^rms_norm: quant is 'no'"):
            ops.rms_norm(x, weight, eps, quant="no")


def test_a_meta_tensor_beside_others_is_no_call_of_the_fake() -> None:
    with pytest.raises(ValueError, match=r"^rms_norm: weight is on meta, expected cpu \(from x\)"):
        torch.ops.pyllm.rms_norm(torch.ones(2, 16), torch.ones(16, device="meta"), 1e-5)
