"""Arcee (AFM): a Llama with a plain MLP and squared ReLU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from pyllm.layers import MLP, Decoder, rewrite
from pyllm.models.llama import llama


def arcee(c: SimpleNamespace) -> Decoder:
    return rewrite(llama(c), MLP, lambda mlp: replace(mlp, gated=False))
