"""Attention variants: a score modification or a mask in a line of C++, compiled at run time into the plain attention kernel.

`pyllm.layers.Attn(..., variant=AttentionVariant(...))` uses one in a model, `pyllm.ops.variant_attention` calls one. docs/variants.md.
"""

from __future__ import annotations

from pyllm.jit.cache import use_cache
from pyllm.jit.compiler import CompileError, compile_variant
from pyllm.jit.variant import AttentionVariant, Param, ScorePlaces

__all__ = ["AttentionVariant", "CompileError", "Param", "ScorePlaces", "compile_variant", "use_cache"]
