"""Each GGUF architecture: a tiny random model saved by transformers as safetensors and written as GGUF gives the same logits from both
files, bitwise, and those of transformers itself.

Weights are multiples of 2^-8, so that storing a norm as w + 1 rounds nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pyllm.layers import bind
from pyllm.load import Checkpoint, CheckpointError, open_checkpoint
from pyllm.models import spec_from_config
from tests.models import oracle
from tests.models.paged import Paged

from .hf_to_gguf import write_gguf

pytest.importorskip("gguf", reason="the reference writer is not installed: pip install gguf")
pytest.importorskip("transformers")

YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0, 1.1, 1.25, 1.5], long_factor=[1.0, 2.0, 3.5, 4.2])
LINEAR = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0), sliding_attention=dict(rope_type="default", rope_theta=1e4)
)
MOE = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
OSS = dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=12, rope_parameters=YARN | dict(truncate=False))
GEMMA = dict(sliding_window=12, query_pre_attn_scalar=16, hidden_activation="gelu_pytorch_tanh", tie_word_embeddings=True)
# test name -> (GGUF architecture, transformers' kind, changes of the tiny config)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "Llama", dict(tie_word_embeddings=True)),
    "llama-untied-yarn": ("llama", "Llama", dict(rope_parameters=YARN, num_key_value_heads=4)),
    "mixtral": ("llama", "Mixtral", dict(num_local_experts=6, num_experts_per_tok=2)),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen3": ("qwen3", "Qwen3", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen3moe": ("qwen3moe", "Qwen3Moe", MOE),
    "gemma2": ("gemma2", "Gemma2", GEMMA | dict(attn_logit_softcapping=20.0, final_logit_softcapping=10.0)),
    "gemma3": ("gemma3", "Gemma3Text", GEMMA | dict(num_hidden_layers=7, rope_parameters=LINEAR)),
    "phi3": ("phi3", "Phi3", dict(sliding_window=12, original_max_position_embeddings=256)),
    "phi3-long-partial": (
        "phi3",
        "Phi3",
        dict(rope_parameters=LONG | dict(partial_rotary_factor=0.5), original_max_position_embeddings=64),
    ),
    "gpt-oss": ("gpt-oss", "GptOss", OSS),
}


def saved(root: Path, name: str, std: float = 0.3) -> tuple[Any, Path]:
    """The model with weights that are multiples of 2^-8, and the directory that transformers saved it to."""
    import transformers

    _, kind, changes = CASES[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**(oracle.SIZES | changes), attn_implementation="eager")
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval().float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=std if p.dim() > 1 else 0.5)
        p.data = (p.data * 256).round() / 256
    directory = root / "model"
    model.save_pretrained(directory)
    return model, directory


def logits(checkpoint: Checkpoint, ids: torch.Tensor) -> torch.Tensor:
    spec = spec_from_config(checkpoint.config)
    return bind(spec, checkpoint.tensors)(Paged(spec, 1, len(ids)).step([ids]))


@pytest.mark.parametrize("name", CASES)
def test_logits_from_gguf_and_safetensors(tmp_path: Path, name: str) -> None:
    model, directory = saved(tmp_path, name)
    file = open_checkpoint(write_gguf(directory, tmp_path / "m.gguf", CASES[name][0]))
    ids = torch.randint(0, oracle.SIZES["vocab_size"], (70,), generator=torch.Generator().manual_seed(1))
    want, got = logits(open_checkpoint(directory), ids), logits(file, ids)
    assert torch.isfinite(want).all() and want.std() > 0.1
    assert torch.equal(got, want)
    oracle.assert_logits(got, oracle.expected(model, ids))
    for tensor, t in file.tensors.items():
        assert (file.tensors.shape(tensor), file.tensors.dtype(tensor)) == (tuple(t.shape), t.dtype), tensor


@pytest.mark.parametrize(("kind", "least"), [("Q8_0", 0.999), ("Q5_1", 0.99), ("MXFP4", 0.7)])
def test_quantized_experts_are_near(tmp_path: Path, kind: str, least: float) -> None:
    """Experts stored in blocks are put back in the same places: the logits correlate, which those of shuffled experts do not (< 0.5)."""
    _, directory = saved(tmp_path, "gpt-oss", std=0.2)
    ids = torch.arange(40)
    want = logits(open_checkpoint(directory), ids).flatten()
    path = write_gguf(directory, tmp_path / "m.gguf", "gpt-oss", {"exps.weight": kind})
    got = logits(open_checkpoint(path), ids).flatten()
    assert torch.corrcoef(torch.stack([got, want]))[0, 1] > least


def test_rules_that_files_leave_out(tmp_path: Path) -> None:
    """Gemma's 27B sizes, known by their number of layers, scale scores by hidden size / heads."""
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        CASES["big"] = (name, CASES[name][1], CASES[name][2] | dict(num_hidden_layers=layers, head_dim=8))
        _, directory = saved(tmp_path / name, "big")
        config = open_checkpoint(write_gguf(directory, tmp_path / f"{name}.gguf", name)).config
        assert config["query_pre_attn_scalar"] == oracle.SIZES["hidden_size"] // oracle.SIZES["num_attention_heads"] == 16
    del CASES["big"]


def patched(path: Path, old: str, new: str) -> Path:
    """The file with one name in place of another of the same length."""
    data = path.read_bytes()
    assert data.count(old.encode()) == 1 and len(old) == len(new)
    path.write_bytes(data.replace(old.encode(), new.encode()))
    return path


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("gpt-oss", "blk.0.ffn_up_exps.weight", "blk.9.ffn_up_exps.weight", "'blk.0.ffn_gate_exps.weight': there is no blk.0.ffn_up_exps"),
        ("qwen3moe", "qwen3moe.expert_count", "qwen3moe.expert_cuont", "key 'qwen3moe.expert_count' is missing"),
        ("qwen3moe", "blk.0.attn_q_norm.weight", "blk.0.attn_q_nrom.weight", "'blk.0.attn_q_nrom.weight' has no place in a 'qwen3moe'"),
        ("gemma2", "gemma2.attention.sliding_window", "gemma2.attention.slidingwindows", "slidingwindows' is 12, which is not supported"),
        ("phi3-long-partial", "rope_factors_short.weight", "rope_factors_shrot.weight", "'rope_factors_short.weight': shape missing"),
        ("qwen2", "qwen2.attention.value_length", "qwen2.attention.value_lenght", "'qwen2.attention.value_lenght' is 16, which is not"),
    ],
)  # fmt: skip
def test_damaged_files(tmp_path: Path, name: str, old: str, new: str, message: str) -> None:
    _, directory = saved(tmp_path, name)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(patched(write_gguf(directory, tmp_path / "m.gguf", CASES[name][0]), old, new))


def test_the_demo_model_converted_to_safetensors_gives_the_same_logits(tmp_path: Path, demo_path: Path) -> None:
    """Every tensor of SmolLM2 written as safetensors: the same numbers, so the same logits, bitwise."""
    import json

    from safetensors.torch import save_file

    file = open_checkpoint(demo_path)
    save_file({name: t.contiguous() for name, t in file.tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(file.config))
    ids = torch.tensor([504, 3575, 282, 4649, 314])  # "The capital of France is"
    want, got = logits(file, ids), logits(open_checkpoint(tmp_path), ids)
    assert torch.equal(got, want)
    assert file.tokenizer is not None
    assert file.tokenizer.decode([int(want[-1].argmax())]) == " Paris"
