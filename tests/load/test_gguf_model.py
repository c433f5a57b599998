"""A llama GGUF under Hugging Face names: the demo model against transformers, small files for what may go wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from pyllm.load import CheckpointError, open_checkpoint

from .builders import BOOL, F32, STRING, U32, array, gguf, info, value, write

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 16, 4, 2, 8, 24, 10
SHAPES = {
    "token_embd.weight": (HIDDEN, VOCAB),
    "output_norm.weight": (HIDDEN,),
    "blk.0.attn_norm.weight": (HIDDEN,),
    "blk.0.ffn_norm.weight": (HIDDEN,),
    "blk.0.attn_q.weight": (HIDDEN, HEADS * HEAD_DIM),
    "blk.0.attn_k.weight": (HIDDEN, KV_HEADS * HEAD_DIM),
    "blk.0.attn_v.weight": (HIDDEN, KV_HEADS * HEAD_DIM),
    "blk.0.attn_output.weight": (HEADS * HEAD_DIM, HIDDEN),
    "blk.0.ffn_gate.weight": (HIDDEN, FFN),
    "blk.0.ffn_up.weight": (HIDDEN, FFN),
    "blk.0.ffn_down.weight": (FFN, HIDDEN),
}
KEYS: dict[str, bytes] = {
    "general.architecture": value(STRING, "llama"),
    "general.name": value(STRING, "tiny"),
    "llama.block_count": value(U32, 1),
    "llama.context_length": value(U32, 64),
    "llama.embedding_length": value(U32, HIDDEN),
    "llama.feed_forward_length": value(U32, FFN),
    "llama.attention.head_count": value(U32, HEADS),
    "llama.attention.head_count_kv": value(U32, KV_HEADS),
    "llama.attention.key_length": value(U32, HEAD_DIM),
    "llama.attention.layer_norm_rms_epsilon": value(F32, 1e-5),
    "tokenizer.ggml.bos_token_id": value(U32, 1),
    "tokenizer.ggml.eos_token_id": value(U32, 2),
    "tokenizer.ggml.eot_token_id": value(U32, 3),
}


def tiny(
    root: Path,
    keys: dict[str, bytes | None] | None = None,
    tensors: dict[str, tuple[int, ...] | None] | None = None,
    data: dict[str, bytes] | None = None,
) -> Path:
    """A one-layer file; None takes a key or tensor out. Values are 0, 1, 2, ... in each tensor unless `data` has them."""
    all_keys = {k: v for k, v in (KEYS | (keys or {})).items() if v is not None}
    shapes = {k: v for k, v in (SHAPES | (tensors or {})).items() if v is not None}
    infos, body = [], b""
    for name, sizes in shapes.items():
        body += b"\0" * (-len(body) % 32)
        infos.append(info(name, sizes, 0, len(body)))
        count = torch.Size(sizes).numel()
        body += (data or {}).get(name) or struct.pack(f"<{count}f", *range(count))
    return write(root / "tiny.gguf", gguf(all_keys.items(), infos, body))


def test_config_and_names(tmp_path: Path) -> None:
    model = open_checkpoint(tiny(tmp_path))
    want: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
    }
    assert {k: model.config[k] for k in want} == want
    assert (model.name, model.bos_id, model.eos_ids, model.chat_template, model.tokenizer) == ("tiny", 1, (2, 3), None, None)
    assert set(model.tensors) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"model.layers.0.{n}_layernorm.weight" for n in ("input", "post_attention")),
        *(f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkvo"),
        *(f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down")),
    }
    assert model.tensors.shape("model.layers.0.self_attn.k_proj.weight") == (KV_HEADS * HEAD_DIM, HIDDEN)
    assert model.tensors.dtype("model.norm.weight") == torch.float32
    with pytest.raises(KeyError, match=r"no tensor 'lm_head.weight'"):
        model.tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match="the checkpoint has no chat template"):
        model.render_chat([])


def test_rows_of_q_and_k_and_their_biases_are_put_back(tmp_path: Path) -> None:
    """Row r of a head of d rows goes to position 2 * (r mod d/2) + r // (d/2) in the file; values count up, so rows tell where they sat."""
    biases = {"blk.0.attn_q.bias": (HEADS * HEAD_DIM,), "blk.0.attn_v.bias": (KV_HEADS * HEAD_DIM,)}
    model = open_checkpoint(tiny(tmp_path, tensors=biases))
    half = HEAD_DIM // 2
    for name, heads, width in (("q_proj.weight", HEADS, HIDDEN), ("k_proj.weight", KV_HEADS, HIDDEN), ("q_proj.bias", HEADS, 1)):
        got = model.tensors[f"model.layers.0.self_attn.{name}"].view(heads * HEAD_DIM, -1)[:, 0] / width
        want = [h * HEAD_DIM + 2 * (r % half) + r // half for h in range(heads) for r in range(HEAD_DIM)]
        assert got.tolist() == want
    assert model.tensors["model.layers.0.self_attn.v_proj.bias"].tolist() == list(range(KV_HEADS * HEAD_DIM))
    assert model.config["attention_bias"] is True


def test_untied_and_rope_scaling(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": value(STRING, "linear"), "llama.rope.scaling.factor": value(F32, 4.0)}
    model = open_checkpoint(tiny(tmp_path, linear, {"output.weight": (HIDDEN, VOCAB)}))
    assert model.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in model.tensors
    assert model.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    yarn = linear | {"llama.rope.scaling.type": value(STRING, "yarn"), "llama.rope.scaling.original_context_length": value(U32, 32)}
    scaling = open_checkpoint(tiny(tmp_path, yarn)).config["rope_scaling"]
    assert scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def test_llama3_divisors_become_the_rule_behind_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule |= {"original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        head_dim=128,
        rope_parameters=rule | {"rope_theta": 500000.0},
        max_position_embeddings=131072,
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = (500000.0 ** (-torch.arange(0, 128, 2) / 128) / scaled).float()
    keys = {"llama.attention.key_length": value(U32, 128), "llama.rope.freq_base": value(F32, 500000.0)}
    shapes = {
        "rope_freqs.weight": (64,),
        "blk.0.attn_q.weight": (HIDDEN, HEADS * 128),
        "blk.0.attn_k.weight": (HIDDEN, KV_HEADS * 128),
    }
    raw = divisors.numpy().tobytes()
    model = open_checkpoint(tiny(tmp_path, keys, shapes, {"rope_freqs.weight": raw}))
    assert model.config["rope_scaling"] == rule
    assert not any("rope" in name for name in model.tensors)
    wrong = struct.pack("<64f", *range(1, 65))
    with pytest.raises(CheckpointError, match=r"tensor 'rope_freqs.weight' does not follow the llama3 rule"):
        open_checkpoint(tiny(tmp_path, keys, shapes, {"rope_freqs.weight": wrong}))


BAD_KEYS: dict[str, tuple[dict[str, bytes | None], str]] = {
    "architecture": ({"general.architecture": value(STRING, "mamba")}, "key 'general.architecture' is 'mamba', supported: llama"),
    "no architecture": ({"general.architecture": None}, "key 'general.architecture' is None"),
    "missing": ({"llama.embedding_length": None}, "key 'llama.embedding_length' is missing"),
    "zero heads": ({"llama.attention.head_count": value(U32, 0)}, "key 'llama.attention.head_count' is 0, expected an integer"),
    "kv heads": ({"llama.attention.head_count_kv": value(U32, 5)}, "'llama.attention.head_count_kv' is 5, expected an integer within 1..4"),
    "heads per layer": ({"llama.attention.head_count": array(U32, [4])}, "'llama.attention.head_count' is array"),
    "layers": ({"llama.block_count": value(U32, 1 << 31)}, "'llama.block_count' is 2147483648, expected an integer within 1..1024"),
    "odd head": ({"llama.attention.key_length": value(U32, 7)}, "gives 7, expected an even size"),
    "partial rotary": ({"llama.rope.dimension_count": value(U32, 4)}, "'llama.rope.dimension_count' is 4, only 8 is supported"),
    "value heads": ({"llama.attention.value_length": value(U32, 4)}, "'llama.attention.value_length' is 4, only 8"),
    "vocab": ({"llama.vocab_size": value(U32, 11)}, "'llama.vocab_size' is 11, only 10"),
    "theta NaN": ({"llama.rope.freq_base": value(F32, float("nan"))}, "'llama.rope.freq_base' is nan, expected a positive number"),
    "eps": ({"llama.attention.layer_norm_rms_epsilon": value(F32, -1)}, "'llama.attention.layer_norm_rms_epsilon' is -1.0"),
    "scaling type": (
        {"llama.rope.scaling.type": value(STRING, "su")},
        "'llama.rope.scaling.type' is 'su', expected none or linear or yarn",
    ),
    "scaling factor": ({"llama.rope.scaling.type": value(STRING, "linear")}, "'llama.rope.scaling.factor' is missing"),
    "experts": ({"llama.expert_count": value(U32, 8)}, "'llama.expert_used_count' is missing"),
    "experts per layer": ({"llama.expert_count": array(U32, [8, 8])}, "'llama.expert_count' is array.*, which is not supported"),
    "eos": ({"tokenizer.ggml.eos_token_id": value(U32, 10)}, "'tokenizer.ggml.eos_token_id' is 10, expected an id below 10"),
    "template": ({"tokenizer.chat_template": value(U32, 1)}, "key 'tokenizer.chat_template' is not a string"),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_bad_metadata(tmp_path: Path, case: str) -> None:
    keys, message = BAD_KEYS[case]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny(tmp_path, keys))


def test_keys_that_say_nothing_are_accepted(tmp_path: Path) -> None:
    keys = {"llama.expert_count": value(U32, 0), "llama.use_parallel_residual": value(BOOL, False)}
    assert open_checkpoint(tiny(tmp_path, keys | {"llama.tensor_data_layout": value(STRING, "Meta AI original pth")})).name == "tiny"


BAD_TENSORS: dict[str, tuple[dict[str, tuple[int, ...] | None], str]] = {
    "no embedding": ({"token_embd.weight": None}, "tensor 'token_embd.weight' is missing"),
    "unknown": ({"blk.0.ffn_gate_exps.weight": (4, 4)}, "tensor 'blk.0.ffn_gate_exps.weight' has no place in a 'llama' model of 1 layers"),
    "layer too high": ({"blk.1.attn_q.weight": (4, 4)}, "tensor 'blk.1.attn_q.weight' has no place"),
    "layer 00": ({"blk.00.attn_q.weight": (4, 4)}, "tensor 'blk.00.attn_q.weight' has no place"),
    "top name in a layer": ({"blk.0.token_embd.weight": (4, 4)}, "tensor 'blk.0.token_embd.weight' has no place"),
    "rows of q": ({"blk.0.attn_q.weight": (HIDDEN, 31)}, r"tensor 'blk.0.attn_q.weight': shape \(31, 16\), expected 4 heads of 8 rows"),
    "divisors": ({"rope_freqs.weight": (3,)}, r"tensor 'rope_freqs.weight': shape \(3,\), expected \(4,\)"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors(tmp_path: Path, case: str) -> None:
    tensors, message = BAD_TENSORS[case]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tiny(tmp_path, tensors=tensors))


def test_demo_model_equals_transformers(demo_path: Path) -> None:
    """Every tensor bitwise: the decoded blocks, the names, the rows of q and k."""
    pytest.importorskip("gguf", reason="transformers reads GGUF through the gguf package, which is not installed")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(str(demo_path.parent), gguf_file=demo_path.name)
    with torch.device("meta"):
        skeleton = transformers.LlamaForCausalLM(config)
    want = load_gguf_checkpoint(str(demo_path), return_tensors=True, model_to_load=skeleton)["tensors"]
    model = open_checkpoint(demo_path)
    assert set(model.tensors) == set(want) - {"lm_head.weight"}
    for name, tensor in model.tensors.items():
        assert tensor.dtype == torch.float32
        assert model.tensors.shape(name) == tuple(tensor.shape)
        assert torch.equal(tensor, want[name]), name
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size"):
        assert model.config[field] == getattr(config, field), field
    assert model.config["rope_theta"] == config.rope_parameters["rope_theta"] == 100000.0
    assert model.config["rms_norm_eps"] == pytest.approx(config.rms_norm_eps, rel=1e-7)
    assert model.config["tie_word_embeddings"] is True
    assert (model.bos_id, model.eos_ids) == (1, (2,))
