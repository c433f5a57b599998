"""A Hugging Face directory written as a GGUF file by the `gguf` package (its writer, its key and tensor names), as llama.cpp's converter
stores each architecture: the rows of q and k of a Llama permuted, Gemma's norms as w + 1, experts stacked, gate and up apart.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pyllm.load import open_checkpoint

PLUS_ONE = ("gemma2", "gemma3")


def _rotary_pairs_side_by_side(w: torch.Tensor, heads: int) -> torch.Tensor:
    d = w.shape[0] // heads
    return w.view(heads, 2, d // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def _stored(arch: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face names to what a GGUF file holds, still by names that the gguf package's name map knows."""
    out: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, w in tensors.items():
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.\w+)", name)
        if expert:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", []).append(w)  # experts of a file are sorted below
        elif arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
            out[name] = _rotary_pairs_side_by_side(w, heads)
        elif arch in PLUS_ONE and name.endswith("norm.weight"):
            out[name] = w + 1
        elif name.endswith("self_attn.sinks"):
            out[f"{name}.weight"] = w
        elif ".experts.gate_up_proj" in name:
            ending = ".bias" if name.endswith("_bias") else ".weight"
            w = w if ending == ".bias" else w.mT
            stem = name.removesuffix("_bias")
            out[stem.replace("gate_up_proj", "gate_proj") + ending] = w[:, 0::2]
            out[stem.replace("gate_up_proj", "up_proj") + ending] = w[:, 1::2]
        elif ".experts.down_proj" in name:
            out[name.removesuffix("_bias") + (".bias" if name.endswith("_bias") else ".weight")] = w if "_bias" in name else w.mT
        else:
            out[name] = w
    return out | {name: torch.stack(ws) for name, ws in stacks.items()}


def _keys(writer: Any, arch: str, c: Mapping[str, Any]) -> None:
    import gguf

    rope: dict[str, Any] = c.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch != "phi3":
        writer.add_key_length(c["head_dim"])
        writer.add_value_length(c["head_dim"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if arch in ("gemma2", "gemma3", "gpt-oss"):
        writer.add_sliding_window(c["sliding_window"])
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(c["attn_logit_softcapping"])
    if c.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(c["final_logit_softcapping"])
    if "num_experts_per_tok" in c:
        writer.add_expert_count(c.get("num_experts") or c["num_local_experts"])
        writer.add_expert_used_count(c["num_experts_per_tok"])
    if arch in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(c["intermediate_size"] if arch == "gpt-oss" else c["moe_intermediate_size"])


def _phi3(writer: Any, c: Mapping[str, Any]) -> None:
    rope, heads = c["rope_parameters"], c["num_attention_heads"]
    original = c["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_dimension_count(int(rope.get("partial_rotary_factor", 1.0) * c["hidden_size"]) // heads)
    writer.add_sliding_window(c.get("sliding_window") or 0)
    if rope["rope_type"] == "longrope":
        scale = c["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for name in ("long", "short"):
            writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], dtype=np.float32))


def write_gguf(directory: Path, path: Path, arch: str, quantize: Mapping[str, str] | None = None) -> Path:
    """quantize: part of a GGUF tensor name -> type, for the tensors that are not stored as fp32."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, arch)
    _keys(writer, arch, config)
    if arch == "phi3":
        _phi3(writer, config)
    found = open_checkpoint(directory).tensors
    ordered = {n: found[n] for n in sorted(found, key=lambda n: [int(p) if p.isdigit() else -1 for p in n.split(".")])}
    for name, w in _stored(arch, config, ordered).items():
        to = names.get_name(name, (".weight", ".bias"))
        assert to is not None, name
        kind = next((gguf.GGMLQuantizationType[t] for part, t in (quantize or {}).items() if part in to), None)
        data = w.float().contiguous().numpy()
        writer.add_tensor(to, data if kind is None else gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
