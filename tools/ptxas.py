"""Reads what `ptxas -v` says of each kernel: registers, spills, stack, shared memory."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")


def parse(log: str) -> list[dict[str, int | str]]:
    """One dict per kernel and architecture, in the order of the log.

    The log names a kernel, then the functions it holds (each with a stack line; a kernel that calls functions has several: the
    largest counts), then the registers of the whole.
    """
    kernels: list[dict[str, int | str]] = []
    current: dict | None = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            current = {"symbol": match[1], "arch": match[2], "registers": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0, "smem": 0}
            kernels.append(current)
        elif current is not None and (match := _STACK.search(line)):
            for key, value in zip(("stack", "spill_stores", "spill_loads"), match.groups(), strict=True):
                current[key] = max(current[key], int(value))
        elif current is not None and (match := _USED.search(line)):
            current["registers"] = int(match[1])
            smem = _SMEM.search(line)
            current["smem"] = int(smem[1]) if smem else 0
            current = None
    return kernels


def demangle(symbols: list[str], filters: list[Path | str]) -> dict[str, str]:
    """symbol -> readable name, by the first filter program that is there; the symbol itself where none is."""
    if not symbols:
        return {}
    for program in filters:
        try:
            done = subprocess.run([str(program)], input="\n".join(symbols), capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        names = done.stdout.splitlines()
        if len(names) == len(symbols):
            return dict(zip(symbols, names, strict=True))
    return {symbol: symbol for symbol in symbols}
