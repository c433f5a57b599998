"""docs/models.md is what the registry says, and no architecture is in it without a case against transformers."""

from __future__ import annotations

import importlib

import pytest

from pyllm.models import REGISTRY
from tools import models_page
from tools.digest import ROOT

CASE_FILES = sorted(p.stem for p in (ROOT / "tests" / "models").glob("test_*.py") if "CASES" in p.read_text(encoding="utf-8"))


def test_page_is_fresh() -> None:
    assert models_page.PAGE.read_text(encoding="utf-8") == models_page.page(), "run python -m tools.models_page"


@pytest.mark.parametrize("architecture", sorted(REGISTRY))
def test_architecture_is_checked_against_transformers(architecture: str) -> None:
    pytest.importorskip("transformers")
    kinds = {case[0] for stem in CASE_FILES for case in getattr(importlib.import_module(f"tests.models.{stem}"), "CASES", {}).values()}
    assert architecture.removesuffix("ForCausalLM").removesuffix("LMHeadModel") in kinds
