"""GPT-2: learned positions, LayerNorm, weights stored [in, out], q/k/v in one tensor, a head tied to the embedding."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, Embedding, LayerNorm, Linear, Part, Split, Sub, Transform


def gpt2(c: SimpleNamespace) -> Decoder:
    d, heads, turned = c.hidden_size, c.num_attention_heads, Transform.TRANSPOSE

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"transformer.h.{i}"
        scale = (c.head_dim**-0.5 if c.scale_attn_weights else 1.0) / (i + 1 if c.scale_attn_by_inverse_layer_idx else 1)
        attn = Attn("attn", d, heads, heads, c.head_dim, kv=i, scale=scale, qkv_bias=True, o_bias=True,
                    names=("c_attn", "c_attn", "c_attn", "c_proj"), qkv_transform=turned, o_transform=turned)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act, gated=False, bias=True, names=("", "c_fc", "c_proj"), transform=turned)
        return Sub(at, norm("ln_1"), attn), Sub(at, norm("ln_2"), mlp)

    subs = tuple(s for i in range(c.num_hidden_layers) for s in layer(i))
    tied = c.tie_word_embeddings
    head = None if tied else Linear(d, (Part("lm_head", c.vocab_size, split=Split.PAD),), "col")
    ignore = ("*.attn.bias", "*.attn.masked_bias", *(["lm_head.weight"] if tied else []))  # the causal mask, which old files store
    longest = c.max_position_embeddings
    tables = (Embedding("transformer.wte", c.vocab_size, d), Embedding("transformer.wpe", longest, d))
    return Decoder(tables[0], subs, norm("transformer.ln_f"), head, tables[1], max_positions=longest, ignore=ignore, prefix="transformer")
