"""What `pyllm inspect` says of a model that opens: whether its tensors are those that the declaration reads, as `bind` would say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from pyllm.api.dummy import DummyWeights
from pyllm.cli import app
from pyllm.layers import bind
from pyllm.load.fit import misfit
from pyllm.load.tensors import TensorMap
from pyllm.models import spec_from_config

from .builders import safetensors
from .test_checkpoint import model

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 8,
}
LLAMA: dict[str, Any] = SIZES | {"architectures": ["LlamaForCausalLM"]}
GPT_OSS: dict[str, Any] = SIZES | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 16}
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
Q = "model.layers.0.self_attn.q_proj.weight"


class Held(TensorMap):
    """Tensors in memory behind the face of a file."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Mapping[str, torch.Tensor]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str, stager: object = None) -> torch.Tensor:
        return self.tensors[name]


def mxfp4(t: torch.Tensor) -> dict[str, torch.Tensor]:
    experts, inputs, rows = t.shape
    blocks = torch.zeros(experts, rows, inputs // 32, 16, dtype=torch.uint8)
    return {f"{EXPERTS}_blocks": blocks, f"{EXPERTS}_scales": blocks[..., 0] + 127}


def case(name: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config = GPT_OSS if "mxfp4" in name else LLAMA
    state = dict(DummyWeights(spec_from_config(config)))
    if "mxfp4" in name:
        state |= mxfp4(state.pop(EXPERTS))
    if "e4m3" in name:
        state |= {Q: torch.zeros(32, 32, dtype=torch.float8_e4m3fn), f"{Q}_scale_inv": torch.ones(1, 1)}
    if "missing" in name:
        state.pop(next(n for n in (f"{EXPERTS}_scales", Q) if n in state))
    if "shape" in name:
        wrong = next(n for n in (f"{EXPERTS}_blocks", Q) if n in state)
        state[wrong] = state[wrong].repeat(1, 2, *[1] * (state[wrong].dim() - 2))
    return config, state | ({"other.weight": torch.zeros(1)} if "extra" in name else {})


CASES = {
    "plain": None,
    "e4m3": None,
    "mxfp4": None,
    "missing": f"tensor '{Q}' is missing",
    "shape": f"tensor '{Q}' has shape (32, 64), where the declaration expects (32, 32)",
    "extra": "tensor 'other.weight' has no place in the model",
    "mxfp4 missing": f"tensor '{EXPERTS}_scales' is missing",
    "mxfp4 shape": f"tensor '{EXPERTS}_blocks' has shape (2, 32, 128), where the declaration expects (2, 32, 64)",
}


@pytest.mark.parametrize("name", CASES)
def test_it_says_what_bind_says(name: str) -> None:
    config, state = case(name)
    spec = spec_from_config(config)
    assert misfit(spec, Held(state)) == CASES[name]
    if CASES[name] is None:
        bind(spec, state)
    else:
        with pytest.raises(ValueError, match="checkpoint"):
            bind(spec, state)


@pytest.mark.parametrize(("field", "value"), [("intermediate_size", 1 << 20), ("vocab_size", 1 << 20), ("num_attention_heads", 4)])
def test_a_config_that_contradicts_the_tensors_does_not_run(tmp_path: Path, field: str, value: int) -> None:
    _, state = case("plain")
    header, body = {}, b""
    for name, t in state.items():
        data = t.contiguous().numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    files: dict[str, Any] = {"model.safetensors": safetensors(header, body), "tokenizer.json": None}
    runner = CliRunner()
    assert "runs here    yes" in runner.invoke(app, ["inspect", str(model(tmp_path, files | {"config.json": LLAMA}))]).output
    out = runner.invoke(app, ["inspect", str(model(tmp_path, files | {"config.json": LLAMA | {field: value}}))]).output
    assert "runs here    no: " in out and "has shape" in out


@pytest.mark.parametrize("names", ["LlamaForCausalLM", []])
def test_an_architecture_that_is_not_named_does_not_run(tmp_path: Path, names: object) -> None:
    root = model(tmp_path, {"config.json": LLAMA | {"architectures": names}, "tokenizer.json": None})
    assert "runs here    no: config: architectures is" in CliRunner().invoke(app, ["inspect", str(root)]).output


def test_an_error_does_not_grow_with_the_file(tmp_path: Path) -> None:
    root = model(tmp_path, {"config.json": LLAMA | {"architectures": ["Y" * 1_000_000]}})
    out = CliRunner().invoke(app, ["explain", str(root)])
    assert out.exit_code == 2 and out.stderr.startswith("pyllm: config: architectures is ['YYY") and len(out.stderr) < 2100
