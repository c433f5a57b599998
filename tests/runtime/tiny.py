"""A tiny random Llama and a byte-level tokenizer, in memory or as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from pyllm.layers import plan
from pyllm.load.tokenizer import BYTE_OF
from pyllm.models import spec_from_config

EOS, IM_START, IM_END = 256, 257, 258
VOCAB = 264
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 160,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": EOS,
    "bos_token_id": EOS,
    "torch_dtype": "float32",
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_spec():
    return spec_from_config(CONFIG)


def tiny_weights(seed: int) -> dict[str, torch.Tensor]:
    """Random weights that are large enough for attention to matter and for greedy tokens to vary."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for item in plan(tiny_spec()):
        rows = {n: _rows(n, item.shape[0], len(item.sources)) for n in item.sources}
        for name, n in rows.items():
            shape = (n, *item.shape[1:])
            out[name] = (
                1 + 0.1 * torch.randn(shape, generator=g) if len(shape) == 1 else torch.randn(shape, generator=g) * 2 / shape[1] ** 0.5
            )
    return out


def _rows(name: str, total: int, parts: int) -> int:
    heads = {"q_proj": CONFIG["num_attention_heads"], "k_proj": CONFIG["num_key_value_heads"], "v_proj": CONFIG["num_key_value_heads"]}
    projection = name.split(".")[-2]
    return heads[projection] * CONFIG["head_dim"] if projection in heads else total // parts


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte, token id = byte, and three special tokens."""
    t = tokenizers.Tokenizer(models.BPE(dict(BYTE_OF.items()), []))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    return t


def save_tiny(folder: Path, seed: int = 0, template: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tiny_weights(seed), folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
