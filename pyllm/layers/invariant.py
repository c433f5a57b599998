"""What `bind(invariant=True)` refuses on CUDA: layers and formats without a kernel whose bits for one row depend on that row alone."""

from __future__ import annotations

import torch

from pyllm.layers.attention import Attn
from pyllm.layers.decoder import Decoder, Sub, Sum
from pyllm.layers.formats import QuantPlan, resolve
from pyllm.layers.linear import Embedding, Linear
from pyllm.layers.mlp import MLP
from pyllm.layers.norm import LayerNorm, RMSNorm
from pyllm.layers.spec import Spec, walk
from pyllm.ops.attention import DECODE_DIMS, PREFILL_DIMS

_ROWWISE = (Decoder, Sub, Sum, MLP, Linear, Embedding, RMSNorm, LayerNorm, Attn)


def check_invariant(spec: Spec, quant: QuantPlan, dtype: torch.dtype) -> None:
    """ValueError for the first layer whose result for a token may depend on the other tokens of the step."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"bind: invariant=True on CUDA with dtype {dtype}, expected bfloat16 or float16")
    for path, node in walk(spec):
        problem = _problem(path, node, quant)
        if problem:
            raise ValueError(f"bind: invariant=True is not served on CUDA for {path or type(node).__name__}: {problem}")
    if isinstance(spec, Decoder) and spec.head is None and (spec.vocab_size % 8 or spec.embed.d % 8):
        shape = f"[{spec.vocab_size}, {spec.embed.d}]"
        raise ValueError(f"bind: invariant=True is not served on CUDA for a tied head of {shape}, expected multiples of 8")


def _problem(path: str, node: Spec, quant: QuantPlan) -> str | None:
    if not isinstance(node, _ROWWISE):
        return f"the products of a {type(node).__name__} may depend on the other tokens of a step"
    if isinstance(node, Linear):
        kind, n, k = resolve(node.names(path), quant), sum(p.size for p in node.parts), node.d
        if not kind.granule:
            return f"the format {kind.name} has no such product"
        if getattr(kind, "dtype", None) is torch.float32:
            return "products in fp32 are cuBLAS's"
        if n % kind.granule or k % kind.granule or min(n, k) < 16:
            return f"the product is [{n}, {k}], expected multiples of {kind.granule}, at least 16"
    if isinstance(node, LayerNorm) and node.heads:
        return "a norm of each head is a torch composition"
    if isinstance(node, Attn):
        if node.variant is not None:
            return "attention with a variant has no such kernel"
        if node.head_dim not in DECODE_DIMS or (node.head_dim, node.head_dim) not in PREFILL_DIMS:
            return f"head_dim is {node.head_dim}, expected one of {', '.join(map(str, DECODE_DIMS))}"
    return None
