"""How an op comes to be: one `define` per op gives it a schema, a CPU implementation (the reference) and a fake.

The CUDA implementation of a kernel op is registered by the native library (`csrc/*/bind.cpp`); ops without a kernel of their own
yet name a torch composition, which then serves CUDA as well, and `explain()` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_LIB = torch.library.Library("pyllm", "FRAGMENT")
OPS: dict[str, OpInfo] = {}
EXPLAIN: dict[str, Callable[..., None]] = {}
"""By public name, for those that call another op: raises what is wrong, in the arguments of this one."""


@dataclass(frozen=True)
class OpInfo:
    """What the rest of the package knows about one op (docs, tests, explain and records read it)."""

    name: str
    schema: str
    stem: str  # "fused/act_mul": csrc/fused/act_mul.cu, tests/fused/test_act_mul.py, bench/fused/bench_act_mul.py
    public: str  # the documented Python function, "pyllm.ops.fused.act_mul"
    composition: bool  # True: Python serves CUDA, with a torch composition or a kernel compiled at run time
    kernel: str = ""  # what explain() calls the latter


def define(
    schema: str,
    *,
    stem: str,
    public: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    composition: Callable[..., Any] | None = None,
    kernel: str = "",
) -> None:
    """Register `torch.ops.pyllm.<name>`.

    reference: the CPU implementation, plain PyTorch, fp32 inside; also the oracle of the tests.
    fake: shapes and dtypes alone, for `torch.compile` and meta tensors; checks the same arguments as the reference.
    composition: a torch implementation for CUDA where no kernel exists, or, with its name as `kernel`, one that compiles a kernel.
    """
    name = schema.split("(", 1)[0]
    if name in OPS:
        raise ValueError(f"define: op {name!r} is defined twice")
    _LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIB.impl(name, reference, "CPU")
    arguments = [a.name for a in torch._C.parse_schema(f"pyllm::{schema}").arguments]

    @wraps(fake)
    def fake_of_one_device(*args: Any) -> Any:
        check_devices(name, zip(arguments, args, strict=False))
        return fake(*args)

    torch.library.register_fake(f"pyllm::{name}", fake_of_one_device, lib=_LIB)
    if composition is not None:
        _LIB.impl(name, composition, "CUDA")
    OPS[name] = OpInfo(name, schema, stem, public, composition is not None, kernel)


def check(ok: bool, op: str, argument: str, message: str) -> None:
    """Raise `ValueError("op: argument message")` unless ok; the native checks use the same wording."""
    if not ok:
        raise ValueError(f"{op}: {argument} {message}")


def check_flag(op: str, argument: str, value: object) -> None:
    """TypeError unless it is a bool: torch takes None for False, which would be no word about a mask that is missing."""
    if value is not True and value is not False and not isinstance(value, (int, torch.SymBool)):
        raise TypeError(f"{op}: {argument} is {value!r:.60}, expected bool")


def check_positive(op: str, **values: float | None) -> None:
    """None, or more than 0."""
    for argument, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{op}: {argument} is {value}, expected more than 0 (or None)")


def check_devices(op: str, arguments: Iterable[tuple[str, Any]]) -> None:
    """ValueError unless all tensors, those in lists too, are on the device of the first. The native checks say so of CUDA tensors; a meta
    tensor beside others goes to the fake, whose results would hold whatever the memory held."""
    first: tuple[str, torch.device] | None = None
    for name, value in arguments:
        for t in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(t, Tensor):
                first = first or (name, t.device)
                check(t.device == first[1], op, name, f"is on {t.device}, expected {first[1]} (from {first[0]})")
