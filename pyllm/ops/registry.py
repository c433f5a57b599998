"""How an op comes to be: one `define` per op gives it a schema, a CPU implementation (the reference) and a fake.

The CUDA implementation of a kernel op is registered by the native library (`csrc/*/bind.cpp`); ops without a kernel of their own
yet name a torch composition, which then serves CUDA as well, and `explain()` says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_LIB = torch.library.Library("pyllm", "FRAGMENT")
OPS: dict[str, OpInfo] = {}


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
    torch.library.register_fake(f"pyllm::{name}", fake, lib=_LIB)
    if composition is not None:
        _LIB.impl(name, composition, "CUDA")
    OPS[name] = OpInfo(name, schema, stem, public, composition is not None, kernel)


def check(ok: bool, op: str, argument: str, message: str) -> None:
    """Raise `ValueError("op: argument message")` unless ok; the native checks use the same wording."""
    if not ok:
        raise ValueError(f"{op}: {argument} {message}")
