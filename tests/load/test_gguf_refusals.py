"""What a GGUF model may not say: rope factors, experts, flags and vocabularies that are wrong, each with its message."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from pyllm.load import CheckpointError, Tokenizer, open_checkpoint
from pyllm.load import gguf_tokenizer as gguf_tokenizer_module
from pyllm.load.gguf_file import GgufFile
from pyllm.load.inspection import inspect

from .builders import BOOL, F32, I32, STRING, U32, array, gguf, value, write
from .test_gguf_model import HEAD_DIM, HIDDEN, KEYS, SHAPES, VOCAB, tiny
from .test_tokenizer import GGUF_KEYS

HALF = HEAD_DIM // 2


def keys_of(arch: str, **more: bytes) -> dict[str, bytes | None]:
    """The tiny model's keys under another architecture's name."""
    renamed: dict[str, bytes | None] = {k: None for k in KEYS if k.startswith("llama.")}
    renamed |= {k.replace("llama.", f"{arch}."): v for k, v in KEYS.items() if k.startswith("llama.")}
    renamed |= {"general.architecture": value(STRING, arch)} | {f"{arch}.{k}": v for k, v in more.items()}
    return renamed


PHI3 = {"blk.0.attn_qkv.weight": (HIDDEN, 64), "blk.0.ffn_up.weight": (HIDDEN, 48)}
PHI3 |= {name: None for name in SHAPES if name.startswith(("blk.0.attn_q.", "blk.0.attn_k", "blk.0.attn_v", "blk.0.ffn_gate"))}
FACTORS = {"rope_factors_long.weight": (HALF,), "rope_factors_short.weight": (HALF,)}


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_are_positive(tmp_path: Path, bad: float) -> None:
    good = floats(*[1.0] * HALF)
    data = {"rope_factors_long.weight": good, "rope_factors_short.weight": floats(1.0, bad, *[1.0] * (HALF - 2))}
    with pytest.raises(CheckpointError, match=r"tensor 'rope_factors_short.weight': has numbers that are not positive"):
        open_checkpoint(tiny(tmp_path, keys_of("phi3"), PHI3 | FACTORS, data))
    config = open_checkpoint(tiny(tmp_path, keys_of("phi3"), PHI3 | FACTORS, dict.fromkeys(FACTORS, good))).config
    assert config["rope_scaling"] == {"rope_type": "longrope", "long_factor": [1.0] * HALF, "short_factor": [1.0] * HALF}


def test_an_unusual_attention_factor_is_kept(tmp_path: Path) -> None:
    more = {"rope.scaling.attn_factor": value(F32, 1.25), "rope.scaling.original_context_length": value(U32, 16)}
    data = dict.fromkeys(FACTORS, floats(*[1.0] * HALF))
    assert open_checkpoint(tiny(tmp_path, keys_of("phi3", **more), PHI3 | FACTORS, data)).config["rope_scaling"]["attention_factor"] == 1.25


def test_two_rules_for_one_rope(tmp_path: Path) -> None:
    more = {"llama.rope.scaling.type": value(STRING, "linear"), "llama.rope.scaling.factor": value(F32, 2.0)}
    with pytest.raises(CheckpointError, match="'llama.rope.scaling.type' is 'linear' although there is a tensor 'rope_freqs.weight'"):
        open_checkpoint(tiny(tmp_path, more, {"rope_freqs.weight": (HALF,)}))


def test_divisors_that_the_architecture_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tensor 'rope_freqs.weight' has no place in a 'qwen2' model"):
        open_checkpoint(tiny(tmp_path, keys_of("qwen2"), {"rope_freqs.weight": (HALF,)}))


def test_yarn_ranges(tmp_path: Path) -> None:
    yarn = {"type": value(STRING, "yarn"), "factor": value(F32, 2.0), "original_context_length": value(U32, 32)}
    yarn |= {"yarn_beta_fast": value(F32, 16.0), "finetuned": value(BOOL, True)}
    more = {f"llama.rope.scaling.{k}": v for k, v in yarn.items()}
    want = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
    assert open_checkpoint(tiny(tmp_path, more)).config["rope_scaling"] == want
    with pytest.raises(CheckpointError, match="'llama.rope.scaling.yarn_ext_factor' is 1.0, which is not supported"):
        open_checkpoint(tiny(tmp_path, more | {"llama.rope.scaling.yarn_ext_factor": value(F32, 1.0)}))


DENSE = {name: None for name in SHAPES if "ffn_" in name and "norm" not in name}


def moe(**more: bytes) -> dict[str, bytes | None]:
    sizes = {"expert_count": value(U32, 2), "expert_used_count": value(U32, 1), "expert_feed_forward_length": value(U32, 4)}
    return keys_of("qwen3moe", **(sizes | more))


@pytest.mark.parametrize(
    ("more", "shape", "message"),
    [
        ({}, (HIDDEN, 4, 3), r"'blk.0.ffn_up_exps.weight': shape \(3, 4, 16\), expected 3 sizes, 2 experts first"),
        ({}, (HIDDEN, 8), r"'blk.0.ffn_up_exps.weight': shape \(8, 16\), expected 3 sizes"),
        ({"expert_used_count": value(U32, 3)}, None, "'qwen3moe.expert_used_count' is 3, expected an integer within 1..2"),
        ({"expert_count": value(U32, 5000)}, None, "'qwen3moe.expert_count' is 5000, expected an integer within 1..4096"),
        ({"expert_weights_norm": value(U32, 1)}, None, "'qwen3moe.expert_weights_norm' is 1, expected a bool"),
    ],
)
def test_experts(tmp_path: Path, more: dict[str, bytes], shape: tuple[int, ...] | None, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny(tmp_path, moe(**more), DENSE | {"blk.0.ffn_up_exps.weight": shape}))


def test_experts_that_do_not_renormalize(tmp_path: Path) -> None:
    assert open_checkpoint(tiny(tmp_path, moe(), DENSE)).config["norm_topk_prob"] is True
    assert open_checkpoint(tiny(tmp_path, moe(expert_weights_norm=value(BOOL, False)), DENSE)).config["norm_topk_prob"] is False


def test_too_many_marked_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_tokenizer_module, "MAX_ADDED", 2)
    file = write(tmp_path / "t.gguf", gguf((f"tokenizer.ggml.{k}", v) for k, v in GGUF_KEYS.items()))
    with pytest.raises(CheckpointError, match="'tokenizer.ggml.token_type' marks 3 tokens, more than 2"):
        Tokenizer.from_gguf(GgufFile(file))


def test_tokens_too_long_to_be_merged_are_left_whole(tmp_path: Path) -> None:
    words = ["<unk>", "a", "b", "ab", "ab" * 200]
    keys = {
        "model": value(STRING, "llama"),
        "tokens": array(STRING, words),
        "scores": array(F32, [0.0, -1.0, -1.0, -0.5, 9.0]),
        "token_type": array(I32, [2, 1, 1, 1, 1]),
        "add_bos_token": value(BOOL, False),
        "add_space_prefix": value(BOOL, False),
    }
    file = GgufFile(write(tmp_path / "t.gguf", gguf((f"tokenizer.ggml.{k}", v) for k, v in keys.items())))
    assert Tokenizer.from_gguf(file).encode("ab" * 200) == [3] * 200


def test_inspect_says_what_does_not_fit(tmp_path: Path) -> None:
    tokenizer = {f"tokenizer.ggml.{k}": v for k, v in GGUF_KEYS.items()} | {
        "tokenizer.ggml.tokens": array(STRING, [f"t{i}" for i in range(VOCAB + 1)])
    }
    tokenizer |= {"tokenizer.ggml.token_type": None, "tokenizer.ggml.merges": array(STRING, [])}
    found = inspect(tiny(tmp_path, tokenizer, {"blk.0.ffn_up.weight": None, "blk.0.attn_q.bias": (32,)}))
    assert found.not_served is not None and "(and " in found.not_served and found.not_served.endswith("is missing")
    assert "the tokenizer has 11 tokens, more than the 10 rows of the embedding" in found.suspicions
    found = inspect(tiny(tmp_path, {}, {"blk.0.ffn_up.bias": (24,), "blk.0.attn_output.bias": (HIDDEN,)}))
    assert found.not_served is not None
