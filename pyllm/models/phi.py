"""Phi 1, 1.5 and 2: attention and MLP in parallel under one LayerNorm, partial rotary, biases everywhere, also of the head."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, Embedding, LayerNorm, Linear, Part, Split, Sub, Sum
from pyllm.models.hf import expect


def phi(c: SimpleNamespace) -> Decoder:
    d, heads, kv_heads = c.hidden_size, c.num_attention_heads, c.num_key_value_heads
    expect(c, tie_word_embeddings=False)  # the head has a bias

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps)

    def layer(i: int) -> Sub:
        attn = Attn("self_attn", d, heads, kv_heads, c.head_dim, kv=i, rope=c.rope, qkv_bias=True, o_bias=True,
                    names=("q_proj", "k_proj", "v_proj", "dense"))  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act, gated=False, bias=True, names=("", "fc1", "fc2"))
        return Sub(f"model.layers.{i}", norm("input_layernorm"), Sum((attn, mlp)))

    head = Linear(d, (Part("lm_head", c.vocab_size, split=Split.PAD),), "col", bias=True)
    subs, embed = tuple(map(layer, range(c.num_hidden_layers))), Embedding("model.embed_tokens", c.vocab_size, d)
    return Decoder(embed, subs, norm("model.final_layernorm"), head, max_positions=c.max_positions)
