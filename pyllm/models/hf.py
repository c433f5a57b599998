"""Hugging Face config.json -> one flat namespace with canonical names, and what all model functions share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pyllm.layers import Decoder, DynamicNtk, Embedding, Linear, LinearScaling, Llama3, LongRope, Norm, Part, Rope, Split, Sub, Yarn
from pyllm.layers.rope import Scaling
from pyllm.models.defaults import REFUSED

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
    "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "attention_bias",
    "original_max_position_embeddings",
}  # fmt: skip
_NUMBERS = ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "layer_norm_eps", "rope_local_base_freq",
            "attn_scale", "floor_scale", "attention_chunk_size")  # fmt: skip
_FACTORS = ("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "swiglu_alpha",
            "swiglu_limit")  # fmt: skip
_SWITCHES = ("use_bias", "use_qkv_bias", "use_parallel_residual", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
             "multi_query", "parallel_attn", "new_decoder_architecture", "attn_temperature_tuning")  # fmt: skip
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob", "qkv_bias", "use_qk_norm",
          *_SWITCHES)  # fmt: skip
_OWN = {
    *_NUMBERS, *_FACTORS, *_SWITCHES, "sliding_window_pattern", "num_ln_in_parallel_attn",
    "use_sliding_window", "max_window_layers", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size", "qkv_bias", "no_rope_layers", "no_rope_layer_interval",
    "mlp_bias", "sliding_window", "layer_types", "moe_layers", "intermediate_size_mlp", "interleave_moe_layer_step",
}  # fmt: skip
"""Read for the architectures that have them in their defaults; for others, as in transformers, they change nothing (and warn)."""
_ROPE = {
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings", "attention_factor",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor",
}  # fmt: skip
LIMITS = {"num_hidden_layers": 4096, "num_experts": 4096, "max_position_embeddings": 1 << 24}
"""More layers than any model has, and the positions that fp32 angles tell apart: a damaged config is an error, not a hang."""
_INERT = {
    "attention_dropout", "hidden_dropout", "residual_dropout", "initializer_range", "use_cache", "bos_token_id", "eos_token_id",
    "pad_token_id", "torch_dtype", "dtype", "transformers_version", "model_type", "pretraining_tp", "_name_or_path",
    "output_hidden_states", "output_attentions", "return_dict", "id2label", "label2id", "problem_type", "chunk_size_feed_forward",
    "cache_implementation", "_attn_implementation", "_attn_implementation_autoset", "auto_map", "is_llama_config",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "quantization_config", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "resid_pdrop", "embd_pdrop", "attn_pdrop", "embedding_dropout", "classifier_dropout", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "reorder_and_upcast_attn", "n_ctx",
    "task_specific_params", "is_decoder", "_sliding_window_pattern",
}  # fmt: skip


def normalize(
    config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, names: Mapping[str, str] | None = None
) -> SimpleNamespace:
    """Canonical names and filled defaults. Errors (ValueError) name a field that is missing or has a value this cannot serve.

    defaults: what the architecture's config class in transformers means by a field that is absent, and the fields that it alone has;
    "ff_ratio" in it: an absent intermediate_size is that many times hidden_size. names: its own field names -> canonical ones.
    A field that is neither read nor known to leave the result alone gives a warning that names it.
    """
    read = _READ | (_OWN & set(defaults or {}))
    config = _one_name(config, "num_local_experts", "num_experts") if "num_experts" in read else config
    for alias, name in (names or {}).items():
        config = _one_name(config, alias, name)
    flags = set(REFUSED)
    if config.get("use_sliding_window") is False:
        flags.add("max_window_layers")  # says which layers have the window that there is not
    _warn_unread(k for k, v in config.items() if k not in read | _INERT | flags and v is not None)
    config = _filled(config, defaults or {}, read)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    c = SimpleNamespace(**{n: _size(config, n) for n in sizes})
    c.num_key_value_heads = _size(config, "num_key_value_heads", c.num_attention_heads)
    if config.get("head_dim") is None and c.hidden_size % c.num_attention_heads:
        raise ValueError(
            f"config: head_dim is absent and hidden_size={c.hidden_size} is not a multiple of num_attention_heads={c.num_attention_heads}"
        )
    c.head_dim = _size(config, "head_dim", c.hidden_size // c.num_attention_heads)
    c.max_position_embeddings = _size(config, "max_position_embeddings", 2048)
    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(act, str) or act not in ACTS:
        raise ValueError(f"config: hidden_act is {act!r}, expected one of {', '.join(ACTS)}")
    c.act = ACTS[act]
    c.rms_norm_eps = _number(config, "rms_norm_eps", 1e-6)
    for name in _FLAGS:
        setattr(c, name, _flag(config, name))
    off = config.get("sliding_window") is None or ("use_sliding_window" in read and not c.use_sliding_window)
    c.sliding_window = None if off else _size(config, "sliding_window")
    c.max_window_layers = _size(config, "max_window_layers", None if c.use_sliding_window and "max_window_layers" in read else 0, least=0)
    own = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "shared_expert_intermediate_size",
           "no_rope_layer_interval", "intermediate_size_mlp", "interleave_moe_layer_step")  # fmt: skip
    for name in own:
        setattr(c, name, _size(config, name) if name in read else None)
    c.num_ln_in_parallel_attn = _size(config, "num_ln_in_parallel_attn", 2 if c.new_decoder_architecture else 1)
    c.mlp_only_layers = _integers(config, "mlp_only_layers", ())
    c.no_rope_layers, c.moe_layers = _integers(config, "no_rope_layers", None), _integers(config, "moe_layers", None)
    vars(c).update(_numbers(config, read))
    c.layer_types = config.get("layer_types")
    if c.layer_types is None and c.sliding_window and "sliding_window_pattern" in read:
        c.layer_types = _pattern(config.get("sliding_window_pattern"), c.num_hidden_layers)
    c.windows = _windows(c.layer_types, c.sliding_window, c.num_hidden_layers, bool(c.attention_chunk_size))
    c.rope = _rope(config, c)
    c.max_positions = c.rope.max_positions
    if c.rope_local_base_freq:
        c.local_rope = replace(_rope(_local(config), c), max_positions=c.max_positions)
    for name, expected in REFUSED.items():
        if name not in (defaults or {}) and _flag(config, name):
            raise ValueError(f"config: {name} is set, expected {expected}")
    if config.get("quantization_config"):
        raise ValueError("config: quantization_config is set; checkpoints that are stored quantized are not read, use the unquantized one")
    return c


def _filled(config: Mapping[str, Any], defaults: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    """The config with what its architecture means by the fields that are absent."""
    if config.get("rope_parameters"):  # they say all; what is left out in them is not what an absent rope_scaling means
        defaults = {k: v for k, v in defaults.items() if k != "rope_scaling"}
    out = {**defaults, **{k: v for k, v in config.items() if k in read or k not in _OWN}}
    if defaults.get("ff_ratio") and out.get("intermediate_size") is None:
        out["intermediate_size"] = defaults["ff_ratio"] * _size(out, "hidden_size")
    return out


def _warn_unread(names: Iterable[str], where: str = "config") -> None:
    unknown = sorted(map(str, names))
    if unknown:
        warnings.warn(f"{where}: fields that are not read: {', '.join(unknown)}", stacklevel=4)


def _one_name(config: Mapping[str, Any], alias: str, name: str) -> dict[str, Any]:
    """`config` with the field `alias` called `name`; both are an error unless they say the same."""
    out, value, other = {k: v for k, v in config.items() if k != alias}, config.get(alias), config.get(name)
    if value is not None and other not in (None, value):
        raise ValueError(f"config: {alias} is {value!r}, but {name} is {other!r}")
    return out if value is None else out | {name: value}


def _integers(config: Mapping[str, Any], name: str, default: Any) -> Any:
    """A list of integers >= 0 as a tuple; `default` where it is absent."""
    value = config.get(name)
    if value is not None and not (isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)):
        raise ValueError(f"config: {name} is {value!r}, expected a list of integers")
    return default if value is None else tuple(value)


def _size(config: Mapping[str, Any], name: str, default: int | None = None, least: int = 1) -> int:
    value, most = config.get(name, default), LIMITS.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"config: {name} is {value!r}, expected a {'positive integer' if least else 'count'}")
    if most is not None and value > most:
        raise ValueError(f"config: {name} is {value}, expected at most {most}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None, where: str = "config") -> float:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {name} is {value!r}, expected a positive number")
    return float(value)


def _numbers(config: Mapping[str, Any], read: set[str]) -> dict[str, float | None]:
    """What one architecture or another has: a null number is none, a null factor of one that has it is an error, as in transformers."""
    needed = read & set(_FACTORS)
    names = (*_NUMBERS, *_FACTORS)
    return {n: None if n not in needed and config.get(n) is None else _number(config, n) for n in names}


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name)
    if value not in (None, True, False) or (value is not None and not isinstance(value, bool)):
        raise ValueError(f"config: {name} is {value!r}, expected true or false")
    return bool(value)


def _pattern(value: Any, layers: int) -> list[str]:
    """`layer_types` from `sliding_window_pattern`: n (every n-th layer is a full one), or a text of L (window) and G (full) that repeats
    and whose last layer is a full one."""
    if isinstance(value, str) and value and set(value) <= {"L", "G"}:
        full = [value[i % len(value)] == "G" or i == layers - 1 for i in range(layers)]
    elif isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        full = [(i + 1) % value == 0 for i in range(layers)]
    else:
        raise ValueError(f"config: sliding_window_pattern is {value!r}, expected a positive integer or a text of L and G")
    return ["full_attention" if f else "sliding_attention" for f in full]


def _windows(types: Any, window: int | None, layers: int, chunks: bool = False) -> tuple[int | None, ...]:
    """One window (or None) per layer from `sliding_window` and `layer_types`."""
    if types is None:
        return (window,) * layers
    known = {"full_attention": None, "sliding_attention": window} | ({"chunked_attention": None} if chunks else {})
    if not isinstance(types, list) or len(types) != layers or any(not isinstance(t, str) or t not in known for t in types):
        raise ValueError(f"config: layer_types is {types!r}, expected {layers} of {', '.join(known)}")
    if window is None and "sliding_attention" in types:
        raise ValueError("config: layer_types has sliding_attention, but sliding_window is absent or use_sliding_window is false")
    return tuple(known[t] for t in types)


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` (new), or `rope_theta` + `rope_scaling` + `partial_rotary_factor` (old), as one dict without nulls."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = config.get(name)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"config: {name} is {value!r}, expected an object")
        nested = [k for k, v in (value or {}).items() if isinstance(v, dict)]
        if value and config.get("rope_local_base_freq") and set(value) <= {"full_attention", "sliding_attention"}:
            value = value.get("full_attention")
        elif nested:
            raise ValueError(f"config: {name} has parameters per layer type ({', '.join(nested)}), expected one set for all layers")
        found |= {k: v for k, v in (value or {}).items() if v is not None}
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if config.get(name) is not None:
            found.setdefault(name, config[name])
    return found


def _local(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as the windowed layers of a model with two ropes read it."""
    p = config.get("rope_parameters")
    own = p.get("sliding_attention") if isinstance(p, dict) else None
    return {**config, "rope_theta": config["rope_local_base_freq"], "rope_scaling": None, "rope_parameters": {"full_attention": own}}


def _rope(config: Mapping[str, Any], c: SimpleNamespace) -> Rope:
    p, longest = _rope_fields(config), c.max_position_embeddings
    kind = p.get("rope_type", p.get("type", "default"))

    def number(name: str, default: float | None = None) -> float:
        if name not in p and default is None:
            raise ValueError(f"config: rope_parameters of type {kind!r} have no {name!r}")
        return _number(p, name, default, "config: rope_parameters")

    def factors(name: str) -> tuple[float, ...]:
        value = p.get(name)
        if not isinstance(value, list) or not all(type(x) in (int, float) and x > 0 for x in value):
            raise ValueError(f"config: rope_parameters: {name} is {value!r}, expected a list of positive numbers")
        return tuple(map(float, value))

    def maybe(name: str) -> float | None:
        return number(name) if name in p else None

    original = int(number("original_max_position_embeddings", longest))
    scaling: Scaling | None
    if kind == "default":
        scaling = None
    elif kind == "linear":
        scaling = LinearScaling(number("factor"))
        longest = int(longest * scaling.factor)
    elif kind == "dynamic":
        scaling = DynamicNtk(number("factor"), longest)
        longest = int(longest * scaling.factor)
    elif kind == "llama3":
        scaling = Llama3(number("factor"), number("low_freq_factor"), number("high_freq_factor"), original)
    elif kind == "yarn":
        scaling = Yarn(
            number("factor", longest / original), original, number("beta_fast", 32.0), number("beta_slow", 1.0),
            maybe("attention_factor"), maybe("mscale"), maybe("mscale_all_dim"), bool(p.get("truncate", True)),
        )  # fmt: skip
        longest = max(longest, int(original * scaling.factor))
    elif kind in ("longrope", "su"):
        factor = number("factor", longest / original)
        scaling = LongRope(factors("short_factor"), factors("long_factor"), original, factor, maybe("attention_factor"))
    else:
        raise ValueError(f"config: rope_type is {kind!r}, expected default, linear, dynamic, llama3, yarn or longrope")
    _warn_unread((k for k in p if k not in _ROPE), "config: rope_parameters")
    dim = int(c.head_dim * number("partial_rotary_factor", 1.0))
    return Rope(dim, number("rope_theta", 1e4), longest, scaling)


def decoder(c: SimpleNamespace, layer: Callable[[int], tuple[Sub, ...]], norm: Callable[[str], Norm], **fields: Any) -> Decoder:
    """What nearly every model shares: `model.embed_tokens`, the layers, `model.norm`, `lm_head` or a tied head."""
    head = None if c.tie_word_embeddings else Linear(c.hidden_size, (Part("lm_head", c.vocab_size, split=Split.PAD),), "col")
    subs = tuple(s for i in range(c.num_hidden_layers) for s in layer(i))
    ignore = Decoder.ignore + (("lm_head.weight",) if c.tie_word_embeddings else ())
    embed = Embedding("model.embed_tokens", c.vocab_size, c.hidden_size)
    return Decoder(embed, subs, norm("model.norm"), head, max_positions=c.max_positions, ignore=ignore, **fields)
