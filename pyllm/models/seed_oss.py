"""Seed-OSS: a Llama with biases of q, k, v and none of o, each its own field."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, rewrite
from pyllm.models.llama import llama


def seed_oss(c: SimpleNamespace) -> Decoder:
    return rewrite(llama(c), Attn, lambda attn: replace(attn, o_bias=c.attention_out_bias))
