"""Every architecture through its files: a tiny random model, saved as transformers saves it, loaded by both, compared.

transformers writes the names of published checkpoints, so the declarations are held to those, and a field of a saved config that is
neither read nor known to change nothing is a warning, here an error."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pyllm.layers import bind
from pyllm.load.checkpoint import open_checkpoint
from pyllm.load.fit import misfit
from pyllm.models import REGISTRY, spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

pytest.importorskip("transformers")


def families() -> Iterator[tuple[ModuleType, str]]:
    """The cases of every test file beside this one that has architectures of the registry."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        module = importlib.import_module(f"tests.models.{file.stem}") if file.stem not in (Path(__file__).stem, "test_text_part") else None
        if module is not None:
            yield from ((module, name) for name in getattr(module, "CASES", {}))


CASES_OF_ALL = list(families())


@pytest.mark.filterwarnings("error:config")
@pytest.mark.parametrize(("module", "name"), CASES_OF_ALL, ids=[name for _, name in CASES_OF_ALL])
def test_saved_files_give_the_same_logits(module: ModuleType, name: str, tmp_path: Path) -> None:
    make = getattr(module, "make", None)
    model = make(name)[0] if make else oracle.make(name, *module.CASES[name])[0]
    model.save_pretrained(tmp_path)
    how, checkpoint = model.config._attn_implementation, open_checkpoint(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation=how).eval()
    assert checkpoint.config["architectures"][0] in REGISTRY
    spec = spec_from_config(checkpoint.config)
    assert misfit(spec, checkpoint.tensors) is None
    bound, ids, pages = bind(spec, checkpoint.tensors), torch.arange(33) * 7 % checkpoint.config["vocab_size"], Paged(spec, 1, 33)
    rows = [bound(pages.step([ids[a:b]], known=[33])) for a, b in ((0, 16), (16, 17), (17, 33))]
    oracle.assert_logits(torch.cat(rows), oracle.expected(again, ids))
