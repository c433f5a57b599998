"""Every MLP of a loaded model replaced by one of your own: `python examples/rewrite_mlp.py [MODEL [KEEP]]` (demo, or a directory or file).

The replacement reads the same checkpoint tensors, and keeps of each token's activations the KEEP (0 to 1) that are the largest. How much
of a model survives that is a question of a minute.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

import torch

from pyllm import LLM, SamplingParams, ops
from pyllm.api.model import open_model_files
from pyllm.layers import MLP, Decoder, Normed, rewrite
from pyllm.models import spec_from_config
from pyllm.runtime.batch import Batch


@dataclass(frozen=True)
class TopMLP(MLP):
    """An MLP whose down projection sees the `keep` largest activations of a token."""

    keep: int = 0

    def forward(self, m: Any, x: torch.Tensor | Normed, b: Batch) -> torch.Tensor:
        h = (ops.act_mul if self.gated else ops.act)(m.up(x), self.act)
        least = h.abs().topk(self.keep).values[..., -1:]
        return m.down(torch.where(h.abs() >= least, h, 0))


def sparse(spec: Decoder, keep: float) -> Decoder:
    def swap(mlp: MLP) -> TopMLP:
        return TopMLP(**{f.name: getattr(mlp, f.name) for f in fields(mlp)}, keep=max(1, round(keep * mlp.ff)))

    return rewrite(spec, MLP, swap)


def main(model: str, keep: float = 0.5, prompt: list[int] | str = "The capital of France is") -> tuple[list[int], list[int]]:
    files = open_model_files(model)
    plain = spec_from_config(files.config)
    tokens = []
    for spec in (plain, sparse(plain, keep)):
        with LLM(spec, files.tokenizer, weights=files.tensors, skip_tokenizer_init=files.tokenizer is None) as llm:
            output = llm.generate(prompt, SamplingParams(max_tokens=16)).outputs[0]
            print(f"{type(spec.subs[1].body).__name__}: {output.text or output.token_ids}")
            tokens.append(list(output.token_ids))
    return tokens[0], tokens[1]


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "demo", float(sys.argv[2]) if len(sys.argv) > 2 else 0.5)
