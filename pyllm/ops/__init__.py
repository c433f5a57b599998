"""Every op of pyllm, as documented Python functions over `torch.ops.pyllm.*`; loads the CUDA kernels where they were built.

The functions here name an argument of the wrong type, or on the wrong device, whatever the op makes of it (`arguments.py`).
"""

from __future__ import annotations

from pyllm import _native
from pyllm.ops.arguments import checked
from pyllm.ops.attention import composed_attention, paged_attention
from pyllm.ops.decode import decode_attention, merge_states
from pyllm.ops.dense import dense_linear, linear_fp8, linear_int8
from pyllm.ops.dense_e4m3 import linear_e4m3
from pyllm.ops.dense_norm import linear_normed, linear_squares
from pyllm.ops.experts import fused_experts
from pyllm.ops.fused import act, act_mul, act_mul_fp8, embed_tokens, softcap
from pyllm.ops.gemm import linear, norm_linear
from pyllm.ops.moe import moe_experts, route_experts
from pyllm.ops.norm import layer_norm, quantize_fp8, rms_norm
from pyllm.ops.prefill import prefill_attention
from pyllm.ops.rope import qk_norm_rope_append
from pyllm.ops.rows import advance_rows
from pyllm.ops.sampling import sample_tokens, token_logprobs
from pyllm.ops.simple import simple_attention, variant_attention
from pyllm.ops.skinny import skinny_linear
from pyllm.ops.step import decode_step

_native.load()

__all__ = [
    "act",
    "act_mul",
    "act_mul_fp8",
    "advance_rows",
    "composed_attention",
    "decode_attention",
    "decode_step",
    "dense_linear",
    "embed_tokens",
    "fused_experts",
    "layer_norm",
    "linear",
    "linear_e4m3",
    "linear_fp8",
    "linear_int8",
    "linear_normed",
    "linear_squares",
    "merge_states",
    "moe_experts",
    "norm_linear",
    "paged_attention",
    "prefill_attention",
    "qk_norm_rope_append",
    "quantize_fp8",
    "rms_norm",
    "route_experts",
    "sample_tokens",
    "simple_attention",
    "skinny_linear",
    "softcap",
    "token_logprobs",
    "variant_attention",
]

globals().update({_name: checked(globals()[_name]) for _name in __all__})
