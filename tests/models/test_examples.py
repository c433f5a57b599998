"""The examples run, and what they say of themselves holds."""

from __future__ import annotations

import inspect
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pyllm.api.dummy import DummyWeights
from pyllm.layers import MLP, Attn, MoE, bind, walk
from pyllm.load.safetensors_file import open_safetensors
from tests.models.paged import Paged
from tools.digest import ROOT

EXAMPLES = ROOT / "examples"


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [name])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)


def test_all_are_here() -> None:
    assert sorted(p.stem for p in EXAMPLES.glob("*.py")) == ["custom_model", "own_layer", "rewrite_mlp"]


def test_custom_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = example("custom_model", monkeypatch)
    tokens = names["main"](tmp_path)
    assert [len(t) for t in tokens] == [8, 8]
    spec = names["model"]()
    attns = [a for _, a in spec.attns()]
    assert [a.window for a in attns] == [32, 32, 32, None] * 2 and [a.rope is None for a in attns] == [False, False, False, True] * 2
    assert [(a.kv, a.own_kv) for a in attns[3::4]] == [(3, True), (3, False)] and all(a.qk_norm for a in attns)
    assert [isinstance(s.body.branches[1], MoE) for s in spec.subs] == [False, True] * 4
    lines = inspect.getsource(names["model"]).strip().splitlines()
    assert len([line for line in lines if line]) <= 20


def test_the_saved_custom_model_gives_the_same_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, ids = example("custom_model", monkeypatch)["model"](), torch.arange(40)
    state = dict(DummyWeights(spec))
    save_file(state, tmp_path / "model.safetensors")
    rows = [bind(spec, s)(Paged(spec, 1, 40).step([ids])) for s in (state, open_safetensors(tmp_path))]
    assert torch.equal(*rows) and rows[0].isfinite().all()


def test_own_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    plain, off, on = example("own_layer", monkeypatch)["main"]()
    assert plain == off != on and len(on) == 8
    assert capsys.readouterr().out.startswith("[('model.layers.0', 'Bottleneck', 'forward()'), ")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """A Llama on disk, without a tokenizer."""

    def make() -> Path:
        names = example("own_layer", monkeypatch)
        save_file(dict(DummyWeights(names["spec_from_config"](names["LLAMA"]))), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(names["LLAMA"]))
        return tmp_path

    return make


def test_rewrite_mlp(folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    names, path = example("rewrite_mlp", monkeypatch), str(folder())
    all_kept, some = names["main"](path, 1.0, [1, 2, 3]), names["main"](path, 0.02, [1, 2, 3])
    assert all_kept[0] == all_kept[1] == some[0] != some[1]
    spec = names["spec_from_config"](names["open_model_files"](path).config)
    swapped = names["sparse"](spec, 0.25)
    mlps = [s for _, s in walk(swapped) if isinstance(s, MLP)]
    assert len(mlps) == 4 and all(type(s) is names["TopMLP"] and s.keep == 48 for s in mlps)
    assert [s for _, s in walk(swapped) if isinstance(s, Attn)] == [s for _, s in walk(spec) if isinstance(s, Attn)]


def test_top_mlp_against_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The activations that are not among the largest of their token add nothing."""
    top = example("rewrite_mlp", monkeypatch)["TopMLP"]("mlp", 16, 24, keep=5)
    state, x = dict(DummyWeights(top)), torch.randn(7, 16)
    gate, up, down = (state[f"mlp.{n}_proj.weight"].double() for n in ("gate", "up", "down"))
    for got, row in zip(bind(top, state)(x, None), x.double(), strict=True):
        h = torch.nn.functional.silu(gate @ row) * (up @ row)
        chosen = h.abs().argsort(descending=True)[:5]
        torch.testing.assert_close(got.double(), down[:, chosen] @ h[chosen], rtol=1e-5, atol=1e-5)
