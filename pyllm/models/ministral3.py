"""Ministral 3: a Llama in which the scores grow with the logarithm of the position, past the length it was trained on first."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import Attn, Decoder, Yarn, rewrite
from pyllm.models.llama import llama
from pyllm.models.variants import tempered


def ministral3(c: SimpleNamespace) -> Decoder:
    if c.llama_4_scaling_beta is None or not isinstance(c.rope.scaling, Yarn):
        raise ValueError(f"config: rope_parameters is {c.rope.scaling}, expected yarn with a llama_4_scaling_beta")
    variant = tempered(c.llama_4_scaling_beta, c.rope.scaling.original)
    return rewrite(llama(c), Attn, lambda attn: replace(attn, variant=variant))
