"""A model that no library has a class for, declared, run with random weights, saved, and loaded again: `python examples/custom_model.py`.

Attention and feed-forward in parallel under one norm, norms of q and k, three windowed layers to each one that sees everything and has no
positions (NoPE), experts in every second layer, and one KV cache for all the layers that see everything.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from safetensors.torch import save_file

from pyllm import LLM, SamplingParams
from pyllm.api.dummy import DummyWeights
from pyllm.layers import MLP, Attn, Decoder, Embedding, Linear, MoE, Part, RMSNorm, Rope, Split, Sub, Sum
from pyllm.load.safetensors_file import open_safetensors
from pyllm.plan.explain import explain


def model(layers: int = 8, d: int = 64, vocab: int = 512, heads: int = 4, kv_heads: int = 2, dim: int = 16) -> Decoder:
    def norm(name: str, size: int = d) -> RMSNorm:
        return RMSNorm(name, size, 1e-6)

    def layer(i: int) -> Sub:
        sees_all = i % 4 == 3
        slot = dict(kv=3, own_kv=i == 3) if sees_all else dict(kv=i)
        place = dict() if sees_all else dict(rope=Rope(dim), window=32)
        attn = Attn("attn", d, heads, kv_heads, dim, qk_norm=norm("{}_norm", dim), **slot, **place)
        ffn = MoE("moe", d, 96, experts=8, top_k=2) if i % 2 else MLP("mlp", d, 192)
        return Sub(f"model.layers.{i}", norm("norm"), Sum((attn, ffn)))

    head = Linear(d, (Part("lm_head", vocab, split=Split.PAD),), "col")
    return Decoder(Embedding("model.embed_tokens", vocab, d), tuple(map(layer, range(layers))), norm("model.norm"), head)


def generate(spec: Decoder, folder: Path) -> list[list[int]]:
    """Tokens of two prompts, from the weights in the folder."""
    with LLM(spec, weights=open_safetensors(folder), max_num_tokens=64, progress=False) as llm:
        outputs = llm.generate([[1, 2, 3], list(range(100))], SamplingParams(max_tokens=8), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def main(folder: Path) -> list[list[int]]:
    spec = model()
    save_file(dict(DummyWeights(spec)), folder / "model.safetensors")
    print(explain(spec, batch=2, context=128))
    tokens = generate(spec, folder)
    assert generate(spec, folder) == tokens
    print(f"{len(spec.kv_slots())} KV slots for {len(spec.subs)} layers; tokens {tokens}, and the same once loaded again")
    return tokens


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(Path(made))
