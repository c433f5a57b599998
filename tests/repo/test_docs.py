"""The documentation says what is so: its Python runs and prints what is shown, its quotes, paths, links and commands exist, and
docs/ops.md is what `python -m tools.ops_page` writes.

Fences: ```python is run, all of a page in one process; ```output is what the block above it prints (`pytest --update-golden`
rewrites it); ```<language> file=<path> is quoted from that file and not run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import pyllm.ops
from pyllm import cli
from tests.repo.sources import ALL_OPS, name
from tools import ops_page
from tools.digest import ROOT

PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = "@@ block {} @@"
every_page = pytest.mark.parametrize("page", PAGES, ids=name)


@dataclass(frozen=True)
class Block:
    info: str
    text: str
    line: int  # of the first line of text, from 1


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m[1], m[2], text.count("\n", 0, m.start(2)) + 1) for m in FENCE.finditer(text)]


def runnable(page: Path) -> list[Block]:
    return [b for b in blocks(page) if b.info == "python"]


def script(page: Path) -> str:
    """The page's Python at the line numbers it has in the page, so that a traceback points into the page."""
    lines: list[str] = []
    for number, b in enumerate(runnable(page)):
        # The mark takes the line of the opening fence.
        lines += [""] * (b.line - 2 - len(lines)) + [f"print({MARK.format(number)!r}, flush=True)", *b.text.splitlines()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=name)
def test_the_python_of_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    file = tmp_path / f"{page.stem}.py"
    file.write_text(script(page), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # finds pyllm where it is not installed
    done = subprocess.run([sys.executable, str(file)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{name(page)}, at the line numbers of the page:\n{done.stderr}"
    printed = re.split(re.escape(MARK).replace(r"\{\}", r"\d+") + "\n", done.stdout)[1:]
    wrong = []
    for b, got in zip(runnable(page), printed, strict=True):  # the list is made before the page changes
        shown = output_of(page, b)
        if shown is not None and shown.text != got and request.config.getoption("update_golden"):
            lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
            lines[shown.line - 1 : shown.line - 1 + shown.text.count("\n")] = [got]
            page.write_text("".join(lines), encoding="utf-8")
        elif got != (shown.text if shown else ""):
            wrong.append(f"{name(page)}:{b.line}: the block prints\n{got}")
    assert not wrong, "\n".join(wrong)


def output_of(page: Path, block: Block) -> Block | None:
    """What the page shows under a block, if the next block is an output."""
    found = blocks(page)
    following = found[[b.text for b in found].index(block.text) + 1 :]
    return following[0] if following and following[0].info == "output" else None


@every_page
def test_quotes_are_in_their_files(page: Path) -> None:
    for b in blocks(page):
        if " file=" in b.info:
            quoted = ROOT / b.info.split(" file=")[1]
            assert b.text in quoted.read_text(encoding="utf-8"), f"{name(page)}:{b.line}: not in {name(quoted)}"
        elif b.info.split(" ")[0] not in ("python", "output", "text", "sh"):
            pytest.fail(f"{name(page)}:{b.line}: a block in {b.info!r} is neither run nor quoted; use text")


@every_page
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" not in target and not ((page.parent / file).exists() if file else anchor in anchors):
            missing.append(target)
    paths = re.findall(r"`((?:csrc|pyllm|tests|tools|bench|docs|examples)/[\w./-]*)`", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"{name(page)}: {', '.join(missing)}"


@every_page
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    verbs = {command.name or command.callback.__name__ for command in cli.app.registered_commands if command.callback}
    verbs |= {group.name for group in cli.app.registered_groups}
    text = page.read_text(encoding="utf-8")
    shell = "\n".join([b.text for b in blocks(page) if b.info == "sh"] + re.findall(r"`([^`\n]+)`", text))
    unknown = [f"make {t}" for t in re.findall(r"^make ([a-z-]+)", shell, re.MULTILINE) if t not in targets]
    unknown += [f"pyllm {v}" for v in re.findall(r"^pyllm ([a-z]+)", shell, re.MULTILINE) if v not in verbs]
    modules = re.findall(r"^python -m ([\w.]+)", shell, re.MULTILINE)
    unknown += [f"python -m {m}" for m in modules if importlib.util.find_spec(m) is None]
    assert not unknown, f"{name(page)}: {', '.join(unknown)}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert not [name(p) for p in PAGES if p.name != "README.md" and f"({p.relative_to(ROOT / 'docs').as_posix()})" not in index]


def test_the_page_of_ops_is_fresh() -> None:
    assert ops_page.PAGE.read_text(encoding="utf-8") == ops_page.page(), "docs/ops.md is stale: python -m tools.ops_page writes it"


def test_every_public_op_is_on_the_page() -> None:
    page = ops_page.page()
    assert not [function for function in pyllm.ops.__all__ if f"\n### {function}\n" not in page]
    assert not [op.name for op in ALL_OPS if f"Schema: `{op.schema}`" not in page]


def test_types_are_written_out() -> None:
    assert ops_page.type_text(tuple[int, str | None]) == "tuple[int, str | None]"
    assert ops_page.signature(ops_page.block, "block") == "block(text: str) -> str"
