"""Hugging Face config.json -> one flat namespace with canonical names, and what all model functions share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from pyllm.layers import Decoder, DynamicNtk, Embedding, Linear, LinearScaling, Llama3, LongRope, Norm, Part, Rope, Split, Sub, Yarn
from pyllm.layers.rope import Scaling

ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}
_READ = {
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "hidden_activation", "max_position_embeddings", "rms_norm_eps",
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "attention_bias", "mlp_bias",
    "sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "original_max_position_embeddings",
}  # fmt: skip
_INERT = {
    "attention_dropout", "hidden_dropout", "residual_dropout", "initializer_range", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "torch_dtype", "dtype", "transformers_version", "model_type", "pretraining_tp", "_name_or_path",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "auto_map", "is_llama_config",
    "rope_interleaved", "transformers.js_config", "use_bidirectional_attention", "is_encoder_decoder", "unsloth_fixed",
    "unsloth_version", "quantization_config",
}  # fmt: skip


def normalize(config: Mapping[str, Any]) -> SimpleNamespace:
    """Canonical names and filled defaults. Errors (ValueError) name a field that is missing or has a value this cannot serve.

    A field that is neither read nor known to leave the result alone gives a warning that names it.
    """

    def need(name: str) -> int:
        value = config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"config: {name} is {value!r}, expected a positive integer")
        return value

    c = SimpleNamespace(
        **{n: need(n) for n in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    )
    c.num_key_value_heads = need("num_key_value_heads") if config.get("num_key_value_heads") is not None else c.num_attention_heads
    if config.get("head_dim") is None and c.hidden_size % c.num_attention_heads:
        raise ValueError(
            f"config: head_dim is absent and hidden_size={c.hidden_size} is not a multiple of num_attention_heads={c.num_attention_heads}"
        )
    c.head_dim = need("head_dim") if config.get("head_dim") is not None else c.hidden_size // c.num_attention_heads
    c.max_position_embeddings = need("max_position_embeddings") if "max_position_embeddings" in config else 2048
    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if act not in ACTS:
        raise ValueError(f"config: hidden_act is {act!r}, expected one of {', '.join(ACTS)}")
    c.act = ACTS[act]
    c.rms_norm_eps = float(config.get("rms_norm_eps", 1e-6))
    c.tie_word_embeddings = bool(config.get("tie_word_embeddings", False))
    c.attention_bias, c.mlp_bias = bool(config.get("attention_bias", False)), bool(config.get("mlp_bias", False))
    c.windows = _windows(config, c.num_hidden_layers)
    for name in ("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        setattr(c, name, config.get(name))
    c.rope = _rope(config, c)
    c.max_positions = c.rope.max_positions
    if config.get("use_bidirectional_attention"):
        raise ValueError("config: use_bidirectional_attention is set, expected a causal decoder")
    if config.get("quantization_config"):
        raise ValueError("config: quantization_config is set; checkpoints that are stored quantized are not read, use the unquantized one")
    unknown = sorted(k for k, v in config.items() if k not in _READ | _INERT and v is not None)
    if unknown:
        warnings.warn(f"config: fields that are not read: {', '.join(unknown)}", stacklevel=3)
    return c


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """One window (or None) per layer from `sliding_window` and `layer_types`."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    if types is None:
        return (window,) * layers
    known = {"full_attention": None, "sliding_attention": window}
    if len(types) != layers or not set(types) <= set(known):
        raise ValueError(f"config: layer_types is {types!r}, expected {layers} of {', '.join(known)}")
    return tuple(known[t] for t in types)


def _rope(config: Mapping[str, Any], c: SimpleNamespace) -> Rope:
    """Reads `rope_parameters` (new), or `rope_theta` + `rope_scaling` + `partial_rotary_factor` (old)."""
    p: dict[str, Any] = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(p.get("rope_theta", config.get("rope_theta", 1e4)))
    dim = int(c.head_dim * float(p.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))))
    kind = p.get("rope_type", p.get("type", "default"))
    original = int(p.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or c.max_position_embeddings)
    stretch = int(c.max_position_embeddings * float(p.get("factor") or 1.0))
    factor = float(p.get("factor") or c.max_position_embeddings / original)
    attention = p.get("attention_factor")
    try:
        scaling: Scaling | None
        longest = c.max_position_embeddings
        if kind == "default":
            scaling = None
        elif kind == "linear":
            scaling, longest = LinearScaling(factor), stretch
        elif kind == "dynamic":
            scaling, longest = DynamicNtk(factor, c.max_position_embeddings), stretch
        elif kind == "llama3":
            scaling = Llama3(factor, float(p["low_freq_factor"]), float(p["high_freq_factor"]), original)
        elif kind == "yarn":
            fast, slow = float(p.get("beta_fast") or 32), float(p.get("beta_slow") or 1)
            scaling = Yarn(factor, original, fast, slow, attention, p.get("mscale"), p.get("mscale_all_dim"), bool(p.get("truncate", True)))
            longest = max(longest, int(original * factor))
        elif kind in ("longrope", "su"):
            scaling = LongRope(tuple(map(float, p["short_factor"])), tuple(map(float, p["long_factor"])), original, factor, attention)
        else:
            raise ValueError(f"config: rope_type is {kind!r}, expected default, linear, dynamic, llama3, yarn or longrope")
    except KeyError as e:
        raise ValueError(f"config: rope_parameters of type {kind!r} have no {e.args[0]!r}") from None
    return Rope(dim, theta, longest, scaling)


def decoder(c: SimpleNamespace, layer: Callable[[int], tuple[Sub, ...]], norm: Callable[[str], Norm], **fields: Any) -> Decoder:
    """What nearly every model shares: `model.embed_tokens`, the layers, `model.norm`, `lm_head` or a tied head."""
    head = None if c.tie_word_embeddings else Linear(c.hidden_size, (Part("lm_head", c.vocab_size, split=Split.PAD),), "col")
    subs = tuple(s for i in range(c.num_hidden_layers) for s in layer(i))
    ignore = Decoder.ignore + (("lm_head.weight",) if c.tie_word_embeddings else ())
    embed = Embedding("model.embed_tokens", c.vocab_size, c.hidden_size)
    return Decoder(embed, subs, norm("model.norm"), head, max_positions=c.max_positions, ignore=ignore, **fields)
