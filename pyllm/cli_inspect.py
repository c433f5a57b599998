"""`pyllm inspect`: what is in a model file, and what is odd about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pyllm.load.inspection import Inspection


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _lines(found: Inspection, tensors: bool) -> list[str]:
    numbers = sum(n for _, n, _ in found.types().values())
    lines = [f"{found.path}: {found.kind}" + (f", {_size(found.bytes)}" if found.bytes else "")]
    if found.name or found.architecture:
        lines.append(f"model        {found.name or '-'}, {found.architecture or 'no architecture named'}")
    if found.tensors:
        lines.append(f"tensors      {len(found.tensors)}, {numbers / 1e6:,.1f} million numbers")
        lines += [f"  {kind:<10} {n:>6} tensors  {_size(size):>10}" for kind, (n, _, size) in found.types().items()]
    if found.metadata:
        lines.append("metadata")
        lines += [f"  {key:<40} {value}" for key, value in found.metadata.items()]
    if tensors and found.tensors:
        width = min(max(len(t.name) for t in found.tensors), 80)
        lines += ["tensor list", *(f"  {t.name:<{width}}  {t.type:<8} {_size(t.bytes):>10}  {list(t.shape)}" for t in found.tensors)]
    if not found.refused and (found.architecture or found.not_served):
        lines.append("runs here    " + (f"no: {found.not_served}" if found.not_served else "yes"))
    lines += [f"suspicion    {text}" for text in found.suspicions] or ([] if found.refused else ["suspicions   none"])
    return lines + ([f"refused      {found.refused}"] if found.refused else [])


def inspect(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A .gguf or .safetensors file, an index of shards, a directory, or demo.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    values: Annotated[bool, typer.Option("--values", help="Look for infinite and missing numbers: reads the whole file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs (all tensors).")] = False,
) -> None:
    """Show what is in a model file, safely: architecture, tensors, types, sizes, metadata, and what is odd. Exit code 1: refused."""
    from pyllm.load.demo import demo_model_path
    from pyllm.load.inspection import inspect as look

    found = look(demo_model_path() if str(path) == "demo" else path, values)
    typer.echo(json.dumps(found.json(), indent=1) if as_json else "\n".join(_lines(found, tensors)))
    if found.refused:
        raise typer.Exit(1)
