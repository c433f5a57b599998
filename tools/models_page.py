"""Writes docs/models.md from the registry: `python -m tools.models_page [--check]`; --check writes nothing and fails when it is stale."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from pyllm.models import REGISTRY, TEXT_PARTS, text_part
from tools.digest import ROOT

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Models

Generated from the registry by `python -m tools.models_page`; do not edit.

Every architecture of this table is checked against transformers on a CPU with tiny random models (fp32, largest difference of a logit at
most 1e-4 of the largest logit): whole prompts, chunked prefill and token-by-token decode through the paged cache, in a ragged batch; and
once more through the files that transformers saves, where a field of config.json that is neither read nor known is an error. Positions past
8,192 are checked with each rope scaling, windows and chunks. Checkpoints may be stored plain, as MXFP4 (gpt-oss), or as e4m3 with a scale
for each block of 128 x 128 (DeepSeek V3, MiniMax M2), output channel or tensor (`fp8`, `compressed-tensors`, `modelopt`); they are expanded
as they are read, or, of e4m3, multiplied as they are ([compose.md](compose.md#formats-and-the-quant-plan)). A new architecture is a file
like these:
[add-a-model.md](add-a-model.md).

| `architectures` in config.json | declared by | lines of the file | what it is |
|---|---|---|---|
"""


def page() -> str:
    rows = {}
    for name, make in REGISTRY.items():
        module = inspect.getmodule(make)
        rows[name] = row(name, make.__name__, inspect.getfile(make), (module.__doc__ or "").strip().splitlines()[0] if module else "")
    for name, kinds in TEXT_PARTS.items():
        rows[name] = row(
            name, "text_part", text_part.__file__, f"The text part alone: {' or '.join(kinds.values())}; images are not served."
        )
    return HEAD + "".join(rows[name] for name in sorted(rows, key=str.lower))


def row(name: str, function: str, file: str, about: str) -> str:
    where, lines = Path(file).relative_to(ROOT).as_posix(), len(Path(file).read_text(encoding="utf-8").splitlines())
    return f"| {name} | [`{function}`](../{where}) | {lines} | {about} |\n"


def main() -> int:
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
