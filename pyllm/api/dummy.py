"""Random weights for a declaration, and the shapes of well-known models: what speed can be measured with, without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pyllm.layers.spec import Spec, walk


def _llama(width: int, ffn: int, layers: int, heads: int, kv_heads: int, dim: int, tied: bool = False) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": scaling | {"original_max_position_embeddings": 8192},
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 64, tied=True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, 128, tied=True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128),
}


class DummyWeights(Mapping[str, Tensor]):
    """Checkpoint name -> random tensor, made when it is read; the same for the same name. Products keep the size of what goes through."""

    def __init__(self, spec: Spec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self._device, self._dtype = torch.device(device), dtype
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, node in walk(spec):
            for weight in node.weights().values():
                for i, name in enumerate(weight.sources(path)):
                    self._shapes[name] = weight.shape(weight.parts[i % len(weight.parts)])

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        t = torch.empty(shape, dtype=self._dtype, device=self._device)
        return t.normal_(std=shape[1] ** -0.5, generator=generator)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
