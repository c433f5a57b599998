"""A Hugging Face style config from the metadata of a GGUF file. What a file says and this does not understand is an error."""

from __future__ import annotations

import math
from typing import Any

import torch

from .errors import CheckpointError, show
from .gguf_arch import ARCHS, WITH_EXPERTS, Arch, has_bias
from .gguf_file import GgufFile
from .gguf_keys import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Keys, shortest

ROPE_FREQS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (ROPE_FREQS, LONG, SHORT)  # become the config's rope_scaling


def _rope_scaling(keys: Keys, arch: Arch, rotary: int, theta: float, longest: int) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    keys.get("rope.scaling.finetuned")  # a note on how the model was made
    named = [k for k in arch.scaling if k in ("linear", "yarn")]
    if not isinstance(kind, str | None) or kind not in (None, "none", *named):
        raise keys.fail("rope.scaling.type", f"is {show(kind)}, expected {' or '.join(['none', *named])}")
    for tensor, rule in ((ROPE_FREQS, "llama3"), (LONG, "longrope")):
        if tensor in keys.file and rule in arch.scaling:
            if kind not in (None, "none"):
                raise keys.fail("rope.scaling.type", f"is {show(kind)} although there is a tensor '{tensor}'")
            return _llama3_scaling(keys.file, rotary, theta) if rule == "llama3" else _longrope(keys, rotary, longest)
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length", MAX_CONTEXT)
        for name in ("beta_fast", "beta_slow"):
            if keys.get(f"rope.scaling.yarn_{name}") is not None:
                scaling[name] = keys.number(f"rope.scaling.yarn_{name}")
    return scaling


def _longrope(keys: Keys, rotary: int, longest: int) -> dict[str, Any]:
    """Two tensors of divisors, one for short and one for long texts, and the factor of q and k, which is left out where it is the usual
    sqrt(1 + ln(longest / original) / ln(original))."""
    divisors: dict[str, list[float]] = {}
    for name, tensor in (("long_factor", LONG), ("short_factor", SHORT)):
        if tensor not in keys.file or keys.file.shape(tensor) != (rotary // 2,):
            shape = keys.file.shape(tensor) if tensor in keys.file else "missing"
            raise CheckpointError(f"{keys.file.path}: tensor '{tensor}': shape {shape}, expected ({rotary // 2},)")
        divisors[name] = [shortest(x) for x in keys.file[tensor].float().tolist()]
        if not all(0 < x < math.inf for x in divisors[name]):
            raise CheckpointError(f"{keys.file.path}: tensor '{tensor}': has numbers that are not positive")
    scaling: dict[str, Any] = {"rope_type": "longrope", **divisors}
    original = keys.size("rope.scaling.original_context_length", MAX_CONTEXT, default=longest)
    usual = math.sqrt(1 + math.log(longest / original) / math.log(original)) if 1 < original < longest else 1.0
    factor = keys.number("rope.scaling.attn_factor", usual)
    return scaling if math.isclose(factor, usual, rel_tol=1e-6) else scaling | {"attention_factor": factor}


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """Llama 3 files carry the divisors of the rotary frequencies alone. The four numbers behind them are recovered, then checked."""
    if file.shape(ROPE_FREQS) != (head_dim // 2,):
        raise CheckpointError(f"{file.path}: tensor '{ROPE_FREQS}': shape {file.shape(ROPE_FREQS)}, expected ({head_dim // 2},)")
    got = file[ROPE_FREQS].double()
    factor, low, high, original = float(got.max()), 1.0, 4.0, 8192
    inv_freq = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original * inv_freq / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(got, expected, rtol=1e-4, atol=0):
        raise CheckpointError(f"{file.path}: tensor '{ROPE_FREQS}' does not follow the llama3 rule (1, 4, 8192) with factor {factor:g}")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _float_type(file: GgufFile) -> str:
    """The type that loses nothing: that of the plain matrices if they agree, else fp32, which is what blocks decode to."""
    kinds = {file.dtype(name) for name in file if len(file.shape(name)) > 1}
    return str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")


def _token_id(file: GgufFile, name: str, vocab: int) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is not None and (type(value) is not int or not 0 <= value < vocab):
        raise CheckpointError(f"{file.path}: key 'tokenizer.ggml.{name}_token_id' is {show(value)}, expected an id below {vocab}")
    return value


def gguf_arch(file: GgufFile) -> tuple[str, Arch]:
    """The architecture's GGUF name and its row."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHS:
        raise CheckpointError(f"{file.path}: key 'general.architecture' is {show(name)}, supported: {' '.join(ARCHS)}")
    experts = file.metadata.get(f"{name}.expert_count")
    return name, WITH_EXPERTS[name] if type(experts) is int and experts > 0 and name in WITH_EXPERTS else ARCHS[name]


def _sizes(keys: Keys, arch: Arch, rows: int) -> dict[str, Any]:
    """What every architecture has, and the part of a head that is rotated."""
    hidden = keys.size("embedding_length", MAX_WIDTH)
    heads = keys.size("attention.head_count", MAX_WIDTH)
    head_dim = keys.size("attention.key_length", MAX_WIDTH, default=max(hidden // heads, 1))
    for key, expected in (("attention.value_length", head_dim), ("vocab_size", rows)):
        if keys.size(key, MAX_VOCAB, default=expected) != expected:
            raise keys.fail(key, f"is {show(keys.get(key))}, only {expected} is supported here")
    rotary = keys.size("rope.dimension_count", head_dim if arch.partial_rotary else MAX_WIDTH, default=head_dim)
    if rotary != head_dim and not arch.partial_rotary:
        raise keys.fail("rope.dimension_count", f"is {rotary}, only {head_dim} is supported here")
    if rotary % 2:
        raise keys.fail("rope.dimension_count" if rotary != head_dim else "attention.key_length", f"gives {rotary}, expected an even size")
    expert = keys.size("expert_feed_forward_length", MAX_WIDTH, default=0) if arch.experts else 0
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length", MAX_WIDTH, default=expert or None),
        "num_hidden_layers": keys.size("block_count", MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.size("attention.head_count_kv", heads, default=heads),
        "head_dim": head_dim,
        "vocab_size": rows,
        "max_position_embeddings": keys.size("context_length", MAX_CONTEXT),
    }
    return sizes | ({"partial_rotary_factor": rotary / head_dim} if rotary != head_dim else {})


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """A Hugging Face style config from the metadata."""
    name, arch = gguf_arch(file)
    keys = Keys(file, name)
    if "token_embd.weight" not in file or len(file.shape("token_embd.weight")) != 2:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing or is not a matrix")
    rows = file.shape("token_embd.weight")[0]
    sizes = _sizes(keys, arch, rows)
    keys.get("tensor_data_layout")  # how the file was made, not what is in it
    theta = keys.number("rope.freq_base", default=10000.0)
    rotary = int(sizes["head_dim"] * sizes.get("partial_rotary_factor", 1.0))
    base: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        **sizes,
        "hidden_act": arch.act,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, arch, rotary, theta, sizes["max_position_embeddings"]),
        "attention_bias": has_bias(file, "attn_q"),
        "tie_word_embeddings": "output.weight" not in file,
        "torch_dtype": _float_type(file),
        "bos_token_id": _token_id(file, "bos", rows),
        "eos_token_id": _token_id(file, "eos", rows),
        "pad_token_id": _token_id(file, "padding", rows),
    }
    config = base | arch.fields(keys, base)
    keys.check_all_read()
    return config


def gguf_eos_ids(file: GgufFile, vocab: int) -> tuple[int, ...]:
    """The ids that end a text: end of sequence, and end of turn or message where the file names them apart."""
    ids = [_token_id(file, name, vocab) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
