"""From GGUF names to Hugging Face names, and the tensors put back as Hugging Face stores them; nothing in a file is ignored.

llama.cpp stores the rows of q and k of a Llama so that rotary pairs are neighbours; Hugging Face wants the two halves of a head apart.
For a head of d rows, stored row 2j + s is Hugging Face's row s * d/2 + j, hence the reshape and swap in `_unpermute`.
Experts are stacked [experts, out, in], gate and up apart. Hugging Face has a tensor for each expert, or, for gpt-oss, one [experts, in,
out] whose columns take turns: gate, up, gate, up, ...
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from .errors import CheckpointError, show
from .gguf_arch import STACKS, TOP, Arch
from .gguf_file import GgufFile
from .gguf_model import ROPE_TENSORS, gguf_arch
from .staging import Stager
from .tensors import TensorMap


class How(Enum):
    AS_IT_IS = "as it is"
    ROWS = "rows of heads put back"
    MINUS_ONE = "a norm stored as w + 1"
    PART = "one expert of a stack"
    SWAP = "a stack, its matrices transposed"
    MIX = "two stacks, transposed, columns in turn"
    MIX_BIAS = "two stacks of biases, in turn"


@dataclass(frozen=True)
class Recipe:
    """How one Hugging Face tensor is made of GGUF tensors; `number`: heads for ROWS, the expert for PART."""

    how: How
    tensors: tuple[str, ...]
    number: int = 0


def _unpermute(w: torch.Tensor, heads: int) -> torch.Tensor:
    rest = w.shape[1:]
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *rest).swapaxes(1, 2).reshape(w.shape)


class GgufTensors(TensorMap):
    """The tensors of a GGUF file by their Hugging Face names, decoded."""

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self.file = file
        self._name, self._arch = gguf_arch(file)
        self._config = config
        self._recipes: dict[str, Recipe] = {}
        for tensor in file:
            if not (tensor in ROPE_TENSORS and self._is_rope_tensor(tensor)):
                self._recipes.update(self._place(tensor))

    def _is_rope_tensor(self, tensor: str) -> bool:
        scaling = self._config["rope_scaling"] or {}
        return scaling.get("rope_type") == ("llama3" if tensor == ROPE_TENSORS[0] else "longrope")

    def _place(self, tensor: str) -> Iterator[tuple[str, Recipe]]:
        arch, layers = self._arch, self._config["num_hidden_layers"]
        match = re.fullmatch(r"(?:blk\.(0|[1-9]\d{0,3})\.)?(\w+)\.(weight|bias)", tensor, re.ASCII)
        layer, stem, suffix = match.groups() if match else (None, "", "")
        target = (TOP if layer is None else arch.layer).get(stem)
        if target is None or (layer is not None and int(layer) >= layers):
            raise CheckpointError(f"{self.file.path}: tensor {show(tensor)} has no place in a '{self._name}' model of {layers} layers")
        at = "" if layer is None else f"model.layers.{layer}."
        if stem in STACKS:
            yield from self._experts(tensor, at + target, stem, suffix)
        elif stem == "attn_sinks":
            yield at + target, Recipe(How.AS_IT_IS, (tensor,))
        elif arch.norms_plus_one and stem.endswith("norm"):
            yield f"{at}{target}.{suffix}", Recipe(How.MINUS_ONE, (tensor,))
        else:
            heads = self._heads(arch, tensor, stem)
            yield f"{at}{target}.{suffix}", Recipe(How.ROWS if heads else How.AS_IT_IS, (tensor,), heads)

    def _heads(self, arch: Arch, tensor: str, stem: str) -> int:
        config, shape = self._config, self.file.shape(tensor)
        heads = int(config["num_attention_heads"] * (stem in arch.q_rows) + config["num_key_value_heads"] * (stem in arch.k_rows))
        if heads and shape[0] != heads * config["head_dim"]:
            expected = f"{heads} heads of {config['head_dim']} rows"
            raise CheckpointError(f"{self.file.path}: tensor {show(tensor)}: shape {shape}, expected {expected}")
        return heads

    def _experts(self, tensor: str, target: str, stem: str, suffix: str) -> Iterator[tuple[str, Recipe]]:
        count, shape = self._config["num_experts"], self.file.shape(tensor)
        rank = 3 if suffix == "weight" else 2
        if len(shape) != rank or shape[0] != count:
            raise CheckpointError(f"{self.file.path}: tensor {show(tensor)}: shape {shape}, expected {rank} sizes, {count} experts first")
        if self._arch.experts == "each":
            for i in range(count):
                yield f"{target.format(i)}.{suffix}", Recipe(How.PART, (tensor,), i)
        elif stem == "ffn_down_exps":
            ending, how = ("", How.SWAP) if suffix == "weight" else ("_bias", How.AS_IT_IS)
            yield f"{target}{ending}", Recipe(how, (tensor,))
        else:
            pair = tuple(re.sub(r"ffn_\w+_exps", f"ffn_{name}_exps", tensor) for name in ("gate", "up"))
            if not all(name in self.file and self.file.shape(name) == shape for name in pair):
                raise CheckpointError(f"{self.file.path}: tensor {show(tensor)}: there is no {pair[stem == 'ffn_gate_exps']} of its shape")
            ending, how = ("", How.MIX) if suffix == "weight" else ("_bias", How.MIX_BIAS)
            yield f"{target}{ending}", Recipe(how, pair)

    def names(self) -> Mapping[str, Recipe]:
        return self._recipes

    def recipe(self, name: str) -> Recipe:
        """Where the tensor comes from."""
        if name not in self._recipes:
            raise KeyError(f"{self.file.path}: no tensor {show(name)}")
        return self._recipes[name]

    def shape(self, name: str) -> tuple[int, ...]:
        r = self.recipe(name)
        shape = self.file.shape(r.tensors[0])
        if r.how is How.PART:
            return shape[1:]
        if r.how in (How.SWAP, How.MIX):
            return shape[0], shape[2], shape[1] * len(r.tensors)
        return (shape[0], 2 * shape[1]) if r.how is How.MIX_BIAS else shape

    def dtype(self, name: str) -> torch.dtype:
        r = self.recipe(name)
        kinds = [self.file.dtype(tensor) for tensor in r.tensors]
        return torch.float32 if r.how is How.MINUS_ONE else torch.promote_types(kinds[0], kinds[-1])

    def read(self, name: str, stager: Stager | None = None) -> torch.Tensor:
        r, dtype, shape = self.recipe(name), self.dtype(name), self.shape(name)
        if r.how is How.PART:
            return self.file.part(r.tensors[0], r.number, stager)
        w = self.file.read(r.tensors[0], stager)
        if r.how in (How.MIX, How.MIX_BIAS):
            mixed = torch.empty(shape, dtype=dtype, device=w.device)
            mixed[..., 0::2] = w.mT if r.how is How.MIX else w
            del w  # stacks of experts are the largest tensors of a file: one at a time
            w = self.file.read(r.tensors[1], stager)
            mixed[..., 1::2] = w.mT if r.how is How.MIX else w
            return mixed
        if r.how is How.ROWS:
            return _unpermute(w, r.number)
        if r.how is How.SWAP:
            return w.mT.contiguous()
        return w.to(dtype) - 1 if r.how is How.MINUS_ONE else w
