"""A layer of your own, one dataclass, inside a Llama: `python examples/own_layer.py`.

After each MLP stands a small bottleneck. Its tensors come from the checkpoint like all others, the engine runs it, and `explain` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from pyllm import LLM, SamplingParams
from pyllm.api.dummy import DummyWeights
from pyllm.layers import MLP, Decoder, Part, Spec, Sub, Weight
from pyllm.models import spec_from_config
from pyllm.plan.explain import explain
from pyllm.runtime.batch import Batch

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}


@dataclass(frozen=True)
class Bottleneck(Spec):
    """`up(silu(down(x)))` through `rank` values."""

    at: str
    d: int
    rank: int

    def weights(self) -> dict[str, Weight]:
        return {"down": Weight((Part("down", self.rank),), self.d), "up": Weight((Part("up", self.d),), self.rank)}

    def forward(self, m: Any, x: torch.Tensor, b: Batch) -> torch.Tensor:
        return F.linear(F.silu(F.linear(x, m.down)), m.up)


def adapted(llama: Decoder, rank: int = 8) -> Decoder:
    def steps() -> Iterator[Sub]:
        for sub in llama.subs:
            yield sub
            if isinstance(sub.body, MLP):
                yield Sub(sub.at, None, Bottleneck("adapter", sub.body.d, rank))

    return replace(llama, subs=tuple(steps()))


def generate(spec: Decoder, weights: dict[str, torch.Tensor]) -> list[int]:
    with LLM(spec, weights=weights, max_num_tokens=64, progress=False) as llm:
        return list(llm.generate([1, 2, 3], SamplingParams(max_tokens=8), use_tqdm=False).outputs[0].token_ids)


def main() -> tuple[list[int], list[int], list[int]]:
    plain = spec_from_config(LLAMA)
    spec = adapted(plain)
    print([(row.at, row.what, row.op) for row in explain(spec).rows if row.what == "Bottleneck"])
    weights = dict(DummyWeights(spec))
    off = {name: torch.zeros_like(t) if name.endswith("adapter.up.weight") else t for name, t in weights.items()}
    tokens = generate(plain, {n: t for n, t in weights.items() if "adapter" not in n}), generate(spec, off), generate(spec, weights)
    print("the Llama {}\nwith bottlenecks that give 0 {}\nwith random ones {}".format(*tokens))
    return tokens


if __name__ == "__main__":
    main()
