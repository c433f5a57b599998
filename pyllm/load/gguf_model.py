"""From GGUF names to Hugging Face names: one row of `ARCHS` per architecture, nothing in a file is ignored.

llama.cpp stores the rows of q and k so that rotary pairs are neighbours; Hugging Face wants the two halves of a head apart. For a head of
d rows, stored row 2j + s is Hugging Face's row s * d/2 + j, hence the reshape and swap in `_unpermute`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .errors import CheckpointError, show
from .gguf_file import GgufFile
from .tensors import TensorMap

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 22
ROPE_FREQS = "rope_freqs.weight"

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Arch:
    """How one GGUF architecture reads: the Hugging Face class, the names in a layer, which of them have permuted rows."""

    hf_class: str
    model_type: str
    layer: Mapping[str, str]
    q_rows: tuple[str, ...] = ()
    k_rows: tuple[str, ...] = ()


ARCHS: dict[str, Arch] = {
    "llama": Arch("LlamaForCausalLM", "llama", LLAMA_LAYER, q_rows=("attn_q",), k_rows=("attn_k",)),
}


class _Keys:
    """Typed reads of `<arch>.*` metadata that remember what was read, so that a key nobody understood is an error."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self.file, self.arch = file, arch
        self.read: set[str] = set()

    def fail(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: key '{self.arch}.{key}' {what}")

    def get(self, key: str) -> Any:
        self.read.add(key)
        return self.file.metadata.get(f"{self.arch}.{key}")

    def size(self, key: str, limit: int, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not 1 <= value <= limit:
            raise self.fail(key, "is missing" if value is None else f"is {show(value)}, expected an integer within 1..{limit}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "is missing" if value is None else f"is {show(value)}, expected a positive number")
        short = float(str(np.float32(value)))  # 1e-05, where the file's fp32 reads as 9.999999747378752e-06
        return short if np.float32(value) == value else float(value)

    def check_all_read(self) -> None:
        for key, value in self.file.metadata.items():
            name = key.removeprefix(f"{self.arch}.")
            if name != key and name not in self.read and not (isinstance(value, (int, float, str)) and not value):
                raise self.fail(name, f"is {show(value)}, which is not supported")


def _rope_scaling(keys: _Keys, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type")
    if kind not in (None, "none", "linear", "yarn"):
        raise keys.fail("rope.scaling.type", f"is {show(kind)}, expected none, linear or yarn")
    if ROPE_FREQS in keys.file:
        if kind not in (None, "none"):
            raise keys.fail("rope.scaling.type", f"is {show(kind)} although there is a tensor '{ROPE_FREQS}'")
        return _llama3_scaling(keys.file, head_dim, theta)
    if kind in (None, "none"):
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.size("rope.scaling.original_context_length", 1 << 30)
    return scaling


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
    return name, ARCHS[name]


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """A Hugging Face style config from the metadata."""
    name, arch = gguf_arch(file)
    keys = _Keys(file, name)
    if "token_embd.weight" not in file or len(file.shape("token_embd.weight")) != 2:
        raise CheckpointError(f"{file.path}: tensor 'token_embd.weight' is missing or is not a matrix")
    rows = file.shape("token_embd.weight")[0]
    hidden = keys.size("embedding_length", MAX_WIDTH)
    heads = keys.size("attention.head_count", MAX_WIDTH)
    kv_heads = keys.size("attention.head_count_kv", heads, default=heads)
    head_dim = keys.size("attention.key_length", MAX_WIDTH, default=max(hidden // heads, 1))
    for key, expected in (("attention.value_length", head_dim), ("rope.dimension_count", head_dim), ("vocab_size", rows)):
        if keys.size(key, MAX_VOCAB, default=expected) != expected:
            raise keys.fail(key, f"is {show(keys.get(key))}, only {expected} is supported here")
    keys.get("tensor_data_layout")  # how the file was made, not what is in it
    if head_dim % 2:
        raise keys.fail("attention.key_length", f"gives heads of {head_dim}, expected an even size")
    theta = keys.number("rope.freq_base", default=10000.0)
    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "hidden_size": hidden,
        "intermediate_size": keys.size("feed_forward_length", MAX_WIDTH),
        "num_hidden_layers": keys.size("block_count", MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "vocab_size": rows,
        "max_position_embeddings": keys.size("context_length", 1 << 30),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(keys, head_dim, theta),
        "attention_bias": any(re.fullmatch(r"blk\.\d+\.attn_q\.bias", tensor) for tensor in file),
        "mlp_bias": any(re.fullmatch(r"blk\.\d+\.ffn_up\.bias", tensor) for tensor in file),
        "tie_word_embeddings": "output.weight" not in file,
        "torch_dtype": _float_type(file),
        "bos_token_id": _token_id(file, "bos", rows),
        "eos_token_id": _token_id(file, "eos", rows),
        "pad_token_id": _token_id(file, "padding", rows),
    }
    keys.check_all_read()
    return config


def gguf_eos_ids(file: GgufFile, vocab: int) -> tuple[int, ...]:
    """The ids that end a text: end of sequence, and end of turn or message where the file names them apart."""
    ids = [_token_id(file, name, vocab) for name in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    rest = w.shape[1:]
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *rest).swapaxes(1, 2).reshape(w.shape)


class GgufTensors(TensorMap):
    """The tensors of a GGUF file by their Hugging Face names, decoded and with the rows of q and k in Hugging Face order."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self.file = file
        arch_name, arch = gguf_arch(file)
        self._names: dict[str, tuple[str, int]] = {}
        for tensor in file:
            if tensor == ROPE_FREQS:
                continue  # became the config's rope_scaling
            match = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,3})\.)?(\w+)\.(weight|bias)", tensor, re.ASCII)
            layer, stem, suffix = match.groups() if match else (None, "", "")
            target = (TOP if layer is None else arch.layer).get(stem)
            if target is None or (layer is not None and int(layer) >= config["num_hidden_layers"]):
                layers = config["num_hidden_layers"]
                raise CheckpointError(f"{file.path}: tensor {show(tensor)} has no place in a '{arch_name}' model of {layers} layers")
            hf_name = f"{target}.{suffix}" if layer is None else f"model.layers.{layer}.{target}.{suffix}"
            heads = config["num_attention_heads"] * (stem in arch.q_rows) + config["num_key_value_heads"] * (stem in arch.k_rows)
            if heads and file.shape(tensor)[0] != heads * config["head_dim"]:
                expected = f"{heads} heads of {config['head_dim']} rows"
                raise CheckpointError(f"{file.path}: tensor {show(tensor)}: shape {file.shape(tensor)}, expected {expected}")
            self._names[hf_name] = (tensor, heads)

    def names(self) -> Mapping[str, tuple[str, int]]:
        return self._names

    def _find(self, name: str) -> tuple[str, int]:
        if name not in self._names:
            raise KeyError(f"{self.file.path}: no tensor {show(name)}")
        return self._names[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.shape(self._find(name)[0])

    def dtype(self, name: str) -> torch.dtype:
        return self.file.dtype(self._find(name)[0])

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor, heads = self._find(name)
        return _unpermute(self.file[tensor], heads) if heads else self.file[tensor]
