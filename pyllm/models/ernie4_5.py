"""ERNIE 4.5 (dense): a Llama with interleaved rotary pairs and one flag for all biases."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import Decoder
from pyllm.models.llama import llama


def ernie4_5(c: SimpleNamespace) -> Decoder:
    own = dict(attention_bias=c.use_bias, mlp_bias=c.use_bias, rope=replace(c.rope, interleaved=True))
    return llama(SimpleNamespace(**(vars(c) | own)))
