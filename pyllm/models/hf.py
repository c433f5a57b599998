"""Hugging Face config.json -> one flat namespace with canonical names, and what all model functions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pyllm.layers import Decoder, Embedding, Linear, Norm, Part, Split, Sub
from pyllm.models.fields import (
    ACTS,
    COUNTS,
    FLAGS,
    INERT,
    OFF,
    OWN,
    READ,
    REFUSED,
    SIZES,
    choices,
    flag,
    integers,
    number,
    numbers,
    one_name,
    size,
    warn_unread,
)
from pyllm.models.ropes import check_places, local, rope


def normalize(
    config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, names: Mapping[str, str] | None = None
) -> SimpleNamespace:
    """Canonical names and filled defaults. Errors (ValueError) name a field that is missing or has a value this cannot serve.

    defaults: what the architecture's config class in transformers means by a field that is absent, and the fields that it alone has;
    "ff_ratio" in it: an absent intermediate_size is that many times hidden_size. names: its own field names -> canonical ones.
    A field that is neither read nor known to leave the result alone gives a warning that names it.
    """
    read = READ | (OWN & set(defaults or {}))
    config = one_name(config, "num_local_experts", "num_experts") if "num_experts" in read else config
    for alias, name in (names or {}).items():
        config = one_name(config, alias, name)
    flags = set(REFUSED)
    if config.get("use_sliding_window") is False:
        flags.add("max_window_layers")  # says which layers have the window that there is not
    warn_unread(k for k, v in config.items() if k not in read | INERT | flags and v is not None and v != OFF.get(k))
    check_places(config)
    config = _filled(config, defaults or {}, read)
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    c = SimpleNamespace(**{n: size(config, n) for n in sizes})
    c.num_key_value_heads = size(config, "num_key_value_heads", c.num_attention_heads)
    c.head_dim = _head_dim(config, c, read)
    c.max_position_embeddings = size(config, "max_position_embeddings", 2048)
    act = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if not isinstance(act, str) or act not in ACTS:
        raise ValueError(f"config: hidden_act is {act!r}, expected one of {', '.join(ACTS)}")
    c.act = ACTS[act]
    c.rms_norm_eps = number(config, "rms_norm_eps", 1e-6)
    for name in FLAGS:
        setattr(c, name, flag(config, name))
    off = config.get("sliding_window") is None or ("use_sliding_window" in read and not c.use_sliding_window)
    c.sliding_window = None if off else size(config, "sliding_window")
    c.max_window_layers = size(config, "max_window_layers", None if c.use_sliding_window and "max_window_layers" in read else 0, least=0)
    for name in SIZES:
        setattr(c, name, size(config, name) if name in read else None)
    chunk = config.get("attention_chunk_size")
    c.attention_chunk_size = None if chunk is None else size(config, "attention_chunk_size")
    for name in COUNTS:  # null and 0 are none
        setattr(c, name, size(config, name, 0, least=0) if name in read else 0)
    vars(c).update(choices(config, read))
    c.num_ln_in_parallel_attn = size(config, "num_ln_in_parallel_attn", 2 if c.new_decoder_architecture else 1)
    c.mlp_only_layers = integers(config, "mlp_only_layers", ())
    for name in ("no_rope_layers", "moe_layers", "attn_type_list"):
        setattr(c, name, integers(config, name, None))
    vars(c).update(numbers(config, read))
    c.layer_types = config.get("layer_types")
    if c.layer_types is None and c.sliding_window and "sliding_window_pattern" in read:
        c.layer_types = _pattern(config.get("sliding_window_pattern"), c.num_hidden_layers)
    c.windows = _windows(c.layer_types, c.sliding_window, c.num_hidden_layers, bool(c.attention_chunk_size))
    c.reads_beta = "llama_4_scaling_beta" in read
    c.rope = rope(config, c)
    c.max_positions = c.rope.max_positions
    if c.rope_local_base_freq:
        c.local_rope = replace(rope(local(config), c), max_positions=c.max_positions)
    for name, expected in REFUSED.items():
        if name not in (defaults or {}) and flag(config, name):
            raise ValueError(f"config: {name} is set, expected {expected}")
    _check_stored(config.get("quantization_config"))
    return c


def _head_dim(config: Mapping[str, Any], c: SimpleNamespace, read: set[str]) -> int:
    """Dims of a head; with low-rank attention of the part that is rotated."""
    if "qk_rope_head_dim" in read:
        return size(config, "qk_rope_head_dim")
    if config.get("head_dim") is None and c.hidden_size % c.num_attention_heads:
        raise ValueError(
            f"config: head_dim is absent and hidden_size={c.hidden_size} is not a multiple of num_attention_heads={c.num_attention_heads}"
        )
    return size(config, "head_dim", c.hidden_size // c.num_attention_heads)


def _check_stored(q: Any) -> None:
    """What `bind` reads: MXFP4 blocks, and e4m3 with scales per tensor, output channel or 128 x 128 block. Anything else is refused."""
    if not q:
        return
    method = q.get("quant_method") if isinstance(q, dict) else None
    if method == "mxfp4" or (isinstance(q, dict) and _stored_e4m3(q)):
        return
    known = "mxfp4, and fp8 with scales per tensor, channel or [128, 128] block (fp8, compressed-tensors, modelopt)"
    raise ValueError(
        f"config: quantization_config is set (quant_method {method!r}); stored quantized only {known} are read: use the plain one"
    )


def _stored_e4m3(q: dict[str, Any]) -> bool:
    method = q.get("quant_method")
    if method == "fp8":
        return q.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn") and q.get("weight_block_size") in (None, [128, 128])
    if method == "modelopt":
        return str(q.get("quant_algo")).upper() in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")
    groups = q.get("config_groups")
    if method != "compressed-tensors" or not isinstance(groups, dict):
        return False
    weights = [g.get("weights") if isinstance(g, dict) else None for g in groups.values()]
    return bool(weights) and all(_float8(w) for w in weights)


def _float8(weights: Any) -> bool:
    kinds, blocks = ("tensor", "channel", "block"), (None, [128, 128])
    if not isinstance(weights, dict) or weights.get("num_bits") != 8 or weights.get("type") != "float":
        return False
    return weights.get("strategy") in kinds and weights.get("block_structure") in blocks


def expect(c: SimpleNamespace, **fields: Any) -> None:
    """A field of the config that has not the value (one of the values) that the architecture's code goes by is an error."""
    for name, values in fields.items():
        known = values if isinstance(values, tuple) else (values,)
        if getattr(c, name) not in known:
            raise ValueError(f"config: {name} is {getattr(c, name)!r}, expected {' or '.join(map(repr, known))}")


def _filled(config: Mapping[str, Any], defaults: Mapping[str, Any], read: set[str]) -> dict[str, Any]:
    """The config with what its architecture means by the fields that are absent."""
    if config.get("rope_parameters"):  # they say all; what is left out in them is not what an absent rope_scaling means
        defaults = {k: v for k, v in defaults.items() if k != "rope_scaling"}
    out = {**defaults, **{k: v for k, v in config.items() if k in read or k not in OWN}}
    if defaults.get("ff_ratio") and out.get("intermediate_size") is None:
        out["intermediate_size"] = defaults["ff_ratio"] * size(out, "hidden_size")
    return out


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


def decoder(
    c: SimpleNamespace, layer: Callable[[int], tuple[Sub, ...]], norm: Callable[[str], Norm], *, ignore: tuple[str, ...] = (), **fields: Any
) -> Decoder:
    """What nearly every model shares: `model.embed_tokens`, the layers, `model.norm`, `lm_head` or a tied head.

    ignore: globs over names that the checkpoint may have besides; fields: others of `Decoder`."""
    head = None if c.tie_word_embeddings else Linear(c.hidden_size, (Part("lm_head", c.vocab_size, split=Split.PAD),), "col")
    subs = tuple(s for i in range(c.num_hidden_layers) for s in layer(i))
    ignore += Decoder.ignore + (("lm_head.weight",) if c.tie_word_embeddings else ())
    embed = Embedding("model.embed_tokens", c.vocab_size, c.hidden_size)
    return Decoder(embed, subs, norm("model.norm"), head, max_positions=c.max_positions, ignore=ignore, **fields)
