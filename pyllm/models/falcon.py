"""Falcon: attention and MLP in parallel under one norm (7B) or one each (40B) or in turn with ALiBi (RW), q/k/v stored by KV head."""

from __future__ import annotations

from types import SimpleNamespace

from pyllm.layers import MLP, Attn, Decoder, Embedding, LayerNorm, Linear, Part, Split, Sub, Sum, Transform
from pyllm.models.alibi import alibi


def falcon(c: SimpleNamespace) -> Decoder:
    d, heads, bias, fused, new = c.hidden_size, c.num_attention_heads, c.use_bias, "query_key_value", c.new_decoder_architecture
    kv_heads = c.num_key_value_heads if new or not c.multi_query else 1
    if c.num_ln_in_parallel_attn not in ((1, 2) if new else (1,)):
        raise ValueError(f"config: num_ln_in_parallel_attn is {c.num_ln_in_parallel_attn}, expected {'1 or 2' if new else '1'}")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, d, c.layer_norm_eps)

    def layer(i: int) -> tuple[Sub, ...]:
        at = f"transformer.h.{i}"
        attn = Attn("self_attention", d, heads, kv_heads, c.head_dim, kv=i, rope=None if c.alibi else c.rope, qkv_bias=bias,
                    o_bias=bias, names=(fused, fused, fused, "dense"), qkv_transform=Transform.UNGROUP,
                    variant=alibi(heads, c.head_dim**-0.5) if c.alibi else None)  # fmt: skip
        mlp = MLP("mlp", d, c.intermediate_size, c.act, gated=False, bias=bias, names=("", "dense_h_to_4h", "dense_4h_to_h"))
        if not new and not c.parallel_attn:
            return Sub(at, norm("input_layernorm"), attn), Sub(at, norm("post_attention_layernorm"), mlp)
        two = c.num_ln_in_parallel_attn == 2
        return (Sub(at, (norm("ln_attn"), norm("ln_mlp")) if two else norm("input_layernorm"), Sum((attn, mlp))),)

    subs = tuple(s for i in range(c.num_hidden_layers) for s in layer(i))
    head = None if c.tie_word_embeddings else Linear(d, (Part("lm_head", c.vocab_size, split=Split.PAD),), "col")
    ignore = Decoder.ignore + (("lm_head.weight",) if c.tie_word_embeddings else ())
    embed = Embedding("transformer.word_embeddings", c.vocab_size, d)
    return Decoder(embed, subs, norm("transformer.ln_f"), head, max_positions=c.max_positions, ignore=ignore)
