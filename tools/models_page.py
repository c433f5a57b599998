"""Writes docs/models.md from the registry: `python -m tools.models_page [--check]`; --check writes nothing and fails when it is stale."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from pyllm.models import REGISTRY
from tools.digest import ROOT

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

Generated from the registry by `python -m tools.models_page`; do not edit.

Every architecture of this table is checked against transformers on a CPU with tiny random models (fp32, largest difference of a logit at
most 1e-4 of the largest logit): whole prompts, chunked prefill and token-by-token decode through the paged cache, in a ragged batch. A new
one is a file like these: [add-a-model.md](add-a-model.md).

| `architectures` in config.json | declared by | lines of the file | what it is |
|---|---|---|---|
"""


def page() -> str:
    rows = []
    for name, make in sorted(REGISTRY.items(), key=lambda item: item[0].lower()):
        file = Path(inspect.getfile(make))
        module = inspect.getmodule(make)
        about = (module.__doc__ or "").strip().splitlines()[0] if module else ""
        where = file.relative_to(ROOT).as_posix()
        rows.append(f"| {name} | [`{make.__name__}`](../{where}) | {len(file.read_text(encoding='utf-8').splitlines())} | {about} |\n")
    return HEAD + "".join(rows)


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
