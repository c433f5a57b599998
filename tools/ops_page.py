"""docs/ops.md, from the registry and the public docstrings alone.

python -m tools.ops_page            writes the page
python -m tools.ops_page --check    exits with 1 when it is stale
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pyllm.ops  # noqa: F401 (defines the ops)
from pyllm.ops.registry import OPS, OpInfo
from tools.digest import ROOT

PAGE = ROOT / "docs" / "ops.md"
WIDTH = 100  # a signature longer than this has one line per parameter
FAMILIES = {
    "norm": "Norms and quantization",
    "fused": "Element-wise and fused ops",
    "gemm": "Matrix products",
    "attention": "Attention",
    "moe": "Mixture of experts",
    "step": "A whole decode step",
    "sampling": "Sampling",
}
"""Folder of csrc -> title, in the order of the page; a folder that is not here comes last, under its own name."""

HEAD = """# Ops

Generated from the op registry and the docstrings by `python -m tools.ops_page`; do not edit.

Every op is a documented function of `pyllm.ops` over `torch.ops.pyllm.<name>`. On a CPU tensor it runs its reference in plain
PyTorch, on a CUDA tensor the kernel named here, or what its text says where Python chooses. All of them work under
`torch.compile(fullgraph=True)`:

```python
import torch

from pyllm import ops

x = torch.randn(4, 2 * 64)
y = ops.act_mul(x, "silu")
assert torch.equal(y, torch.ops.pyllm.act_mul(x, 0))  # the op itself: strings are numbers there, see the end of this page


@torch.compile(fullgraph=True, backend="aot_eager")
def step(x: torch.Tensor) -> torch.Tensor:
    return ops.act_mul(x * 2, "silu")


step(x)
try:
    ops.act_mul(x, "tanh")
except ValueError as error:
    print(error)
```

```output
act_mul: act is 'tanh', expected one of silu, gelu, gelu_tanh, relu2
```

Letters: T tokens, B sequences, H query heads, K KV heads, D head dim, E experts, F ffn, V vocab, P page size, N width of a row
(in a matrix product M, N and K are its sizes). Indices are int32. *Rows* may be strided; their last dimension is dense. Bad arguments
raise `ValueError` on CPU and fake tensors and `RuntimeError` on CUDA tensors, in the same words: op, argument, what came, what was
expected.
"""


def public_function(op: OpInfo) -> Callable[..., Any]:
    module, name = op.public.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def type_text(hint: Any) -> str:
    """A type as a reader writes it, whatever the Python version: `tuple[Tensor, Tensor | None]`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint in (None, type(None)):
        return "None"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is not None:
        return f"{origin.__name__}[{', '.join(map(type_text, arguments))}]"
    return getattr(hint, "__name__", str(hint))


def signature(function: Callable[..., Any], name: str) -> str:
    """`name(x: Tensor, act: str = 'silu') -> Tensor`, with the aliases of its module written out."""
    hints, shown, keyword_only = typing.get_type_hints(function), [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            shown.append("*")
            keyword_only = True
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{parameter.name}: {type_text(hints[parameter.name])}{default}")
    result = f") -> {type_text(hints['return'])}"
    line = f"{name}({', '.join(shown)}{result}"
    return line if len(line) <= WIDTH else f"{name}(\n" + "".join(f"    {text},\n" for text in shown) + result


def block(text: str) -> str:
    return f"```text\n{text}\n```"


def op_section(op: OpInfo) -> str:
    function = public_function(op)
    summary, _, rest = (inspect.getdoc(function) or "").partition("\n\n")
    source = op.public.rsplit(".", 1)[0].replace(".", "/") + ".py"
    kernel = "chosen in Python: another op, or torch" if op.composition else f"[csrc/{op.stem}.cuh](../csrc/{op.stem}.cuh)"
    name = op.public.rsplit(".", 1)[1]
    parts = [
        f"### {name}",
        summary,
        block(signature(function, f"pyllm.ops.{name}")),
        block(rest) if rest else "",
        f"Schema: `{op.schema}`",
        f"CUDA: {kernel}. CPU reference: [{source}](../{source}).",
    ]
    return "\n\n".join(part for part in parts if part)


def by_family() -> dict[str, list[OpInfo]]:
    found: dict[str, list[OpInfo]] = {folder: [] for folder in FAMILIES}
    for op in sorted(OPS.values(), key=lambda op: op.name):
        found.setdefault(op.stem.split("/")[0], []).append(op)
    return {folder: ops for folder, ops in found.items() if ops}


def enums() -> list[str]:
    """A line per string argument of the public functions: its values and their numbers in the schemas."""
    lines = {}
    for op in OPS.values():
        module = importlib.import_module(op.public.rsplit(".", 1)[0])
        for name, value in vars(module).items():
            if name.isupper() and isinstance(value, dict) and value and all(type(number) is int for number in value.values()):
                numbers = ", ".join(f"{key} {number}" for key, number in value.items())
                lines.setdefault(name, f"* `{module.__name__}.{name}`: {numbers}")
    return [lines[name] for name in sorted(lines)]


def page() -> str:
    families = by_family()
    contents = []
    for folder, ops in families.items():
        contents.append(f"* {FAMILIES.get(folder, folder)}: " + ", ".join(f"[{op.name}](#{op.public.rsplit('.', 1)[1]})" for op in ops))
    sections = [HEAD.rstrip(), "\n".join(contents)]
    for folder, ops in families.items():
        sections.append(f"## {FAMILIES.get(folder, folder)}")
        modules = dict.fromkeys(op.public.rsplit(".", 1)[0] for op in ops)
        sections += [inspect.getdoc(importlib.import_module(module)) or "" for module in modules]
        sections += [op_section(op) for op in ops]
    sections += ["## Numbers of the string arguments", "\n".join(enums())]
    return "\n\n".join(sections) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="write docs/ops.md from the op registry")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when the page is stale")
    options = parser.parse_args()
    text = page()
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/ops.md is stale: python -m tools.ops_page writes it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
