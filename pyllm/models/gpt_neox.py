"""GPT-NeoX, Pythia: attention and MLP in parallel under a norm each, partial rotary, q/k/v stored head by head."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, Embedding, LayerNorm, Linear, Part, Split, Sub, Sum, Transform


def gpt_neox(c: SimpleNamespace) -> Decoder:
    d, heads, bias = c.hidden_size, c.num_attention_heads, c.attention_bias
    fused = "query_key_value"

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"gpt_neox.layers.{i}"
        attn = Attn("attention", d, heads, heads, c.head_dim, kv=i, rope=c.rope, qkv_bias=bias, o_bias=bias,
                    names=(fused, fused, fused, "dense"), qkv_transform=Transform.UNGROUP)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act, gated=False, bias=True, names=("", "dense_h_to_4h", "dense_4h_to_h"))
        first, second = norm("input_layernorm"), norm("post_attention_layernorm")
        if c.use_parallel_residual:
            return (Sub(at, (first, second), Sum((attn, mlp))),)
        return Sub(at, first, attn), Sub(at, second, mlp)

    subs = tuple(s for i in range(c.num_hidden_layers) for s in layer(i))
    head = None if c.tie_word_embeddings else Linear(d, (Part("embed_out", c.vocab_size, split=Split.PAD),), "col")
    ignore = (*Decoder.ignore, "*.attention.bias", "*.attention.masked_bias")  # the causal mask, which old files store
    embed = Embedding("gpt_neox.embed_in", c.vocab_size, d)
    return Decoder(embed, subs, norm("gpt_neox.final_layer_norm"), head, max_positions=c.max_positions, ignore=ignore)
