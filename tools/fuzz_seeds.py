"""The good files that fuzzing starts from: a few kilobytes each, of every kind that the loaders read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


def _safetensors(tensors: Mapping[str, np.ndarray[Any, Any]], metadata: dict[str, str] | None = None) -> bytes:
    import safetensors.numpy

    return bytes(safetensors.numpy.save(dict(tensors), metadata))


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, list):
        words = isinstance(value[0], str)
        body = b"".join(_string(v) if words else struct.pack("<f" if isinstance(v, float) else "<i", v) for v in value)
        return struct.pack("<IIQ", 9, 8 if words else 6 if isinstance(value[0], float) else 5, len(value)) + body
    kind, form = (7, "<?") if isinstance(value, bool) else (4, "<I") if isinstance(value, int) else (6, "<f")
    return struct.pack("<I", kind) + struct.pack(form, value)


def _gguf(keys: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], int]]) -> bytes:
    """tensors: name -> (type, sizes fastest first, bytes)."""
    infos, body = b"", bytearray()
    for name, (kind, sizes, nbytes) in tensors.items():
        body += bytes(-len(body) % 32)
        infos += _string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, len(body))
        body += bytes(i * 7 % 251 for i in range(nbytes))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    head += b"".join(_string(k) + _value(v) for k, v in keys.items()) + infos
    return head + bytes(-len(head) % 32) + bytes(body)


def _gguf_keys(arch: str, **more: Any) -> dict[str, Any]:
    own = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 4, "attention.head_count": 2,
        "attention.key_length": 4, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4,
    }  # fmt: skip
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in (own | more).items()}


def _gguf_seeds() -> list[bytes]:
    small = {"token_embd.weight": (0, (8, 4), 128), "output_norm.weight": (0, (8,), 32), "blk.0.attn_q.weight": (1, (8, 8), 128)}
    blocks = {f"b{kind}": (kind, (256,), n) for kind, n in ((2, 144), (8, 272), (10, 84), (13, 176), (14, 210), (20, 144), (39, 136))}
    words = ["<unk>", "<s>", "\u2581", "a", "b", "ab", "\u2581a"]
    spm = {"model": "llama", "tokens": words, "scores": [0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0], "token_type": [2, 3, 1, 1, 1, 1, 1]}
    bpe = {"model": "gpt2", "pre": "llama-bpe", "tokens": ["<s>", "a", "b", "ab"], "merges": ["a b"], "token_type": [3, 1, 1, 1]}
    tokenizers = [{f"tokenizer.ggml.{k}": v for k, v in (t | {"bos_token_id": 1}).items()} for t in (spm, bpe)]
    experts = _gguf_keys("qwen3moe", expert_count=2, expert_used_count=1, expert_feed_forward_length=4)
    stack = {"token_embd.weight": (0, (8, 4), 128), "blk.0.ffn_gate_exps.weight": (0, (8, 4, 2), 256)}
    return [
        _gguf(_gguf_keys("llama", **{"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}), small),
        _gguf({"general.alignment": 32, "general.name": "n", "list": [1, 2, 3], "flag": True}, blocks),
        *(_gguf(_gguf_keys("llama") | t, small) for t in tokenizers),
        _gguf(experts, stack),
        _gguf(_gguf_keys("gemma3", **{"attention.sliding_window": 4}) | tokenizers[0], small),
    ]


def _config_seeds() -> list[bytes]:
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=9)
    rope = {"rope_theta": 1e4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8}}
    kinds: list[dict[str, Any]] = [
        {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, **rope},
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 4, "head_dim": 8},
        {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4},
        {"architectures": ["GptOssForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1, "eos_token_id": [1, 2]},
    ]
    return [json.dumps(sizes | kind).encode() for kind in kinds]


def _tokenizer_seeds() -> list[bytes]:
    import tokenizers as t

    plain = t.Tokenizer(t.models.BPE({"<s>": 0, "a": 1, "b": 2, "ab": 3, "\u0120": 4}, [("a", "b")]))
    split = t.pre_tokenizers.Split(t.Regex(r"\p{L}+|\s+(?!\S)|\s+"), "isolated")
    plain.pre_tokenizer = t.pre_tokenizers.Sequence([split, t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    plain.decoder = t.decoders.ByteLevel()
    plain.add_special_tokens(["<s>"])
    plain.post_processor = t.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    pieces = {"<unk>": 0, "\u2581": 1, "a": 2, "\u2581a": 3, **{f"<0x{i:02X}>": 4 + i for i in range(4)}}
    fallback = t.Tokenizer(t.models.BPE(pieces, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fallback.normalizer = t.normalizers.Sequence(
        [t.normalizers.Prepend("\u2581"), t.normalizers.Replace(" ", "\u2581"), t.normalizers.NFC()]
    )
    fallback.decoder = t.decoders.Sequence([t.decoders.Replace("\u2581", " "), t.decoders.ByteFallback(), t.decoders.Fuse()])
    return [plain.to_str().encode(), fallback.to_str().encode()]


TEMPLATES = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m['content'] | trim }}{% if not loop.last %}\n{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ m.content[:3] ~ ns.n }}{% endfor %}{{ ns.n * 2 }}",
    "{% macro f(x, n) %}{{ x | replace('h', 'H') }}{% if n %}{{ f(x, n - 1) }}{% endif %}{% endmacro %}{{ f(messages[0].content, 3) }}",
    "{{ messages | map(attribute='role') | join(', ') }}{{ [1, 2, 3] | tojson }}{{ range(4) | list }}{{ raise_exception('no') if false }}",
)


def seeds(name: str) -> list[bytes]:
    """The good files of a target."""
    f = np.arange(6, dtype=np.float32)
    made: dict[str, Callable[[], list[bytes]]] = {
        "gguf": _gguf_seeds,
        "safetensors": lambda: [
            _safetensors({"a": f, "b.weight": f.astype(np.float16).reshape(2, 3), "e": f[:0]}, {"format": "pt"}),
            _safetensors({"x": f.astype(np.int64), "y": f > 2}),
        ],
        "index": lambda: [
            json.dumps({"metadata": {"total_size": 16}, "weight_map": {"x": "a-00001.safetensors", "y": "a-00002.safetensors"}}).encode()
        ],
        "config": _config_seeds,
        "tokenizer": _tokenizer_seeds,
        "template": lambda: [t.encode() for t in TEMPLATES],
    }
    return made[name]()
