"""The README's numbers are what the records say, and its Python runs."""

from __future__ import annotations

import re

from tools import readme_numbers


def test_numbers_are_those_of_the_records() -> None:
    text = readme_numbers.README.read_text(encoding="utf-8")
    assert readme_numbers.fresh(text) == text, "run python -m tools.readme_numbers"
    assert readme_numbers.BLOCK.search(text)


def test_snippets_run() -> None:
    found = re.findall(r"^```python\n(.*?)^```$", readme_numbers.README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(found) >= 2
    for snippet in found:
        exec(snippet, {})  # noqa: S102
