"""simple_attention, the kernel for GPUs before sm_90, here on a Hopper GPU: prefill against torch's own attention, decode against ours for
Hopper. No goals: it is there to be right; the table shows what it costs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bench import Case
from bench.shapes import Shapes
from pyllm.ops import decode_attention, simple_attention

BF16 = torch.bfloat16
PAGE = 64


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def prefill(B: int, L: int, H: int, K: int, D: int, causal: bool) -> Case:
    """B sequences of L tokens, contiguous keys."""

    def make(n: int) -> list[Any]:
        starts = torch.arange(B + 1, dtype=torch.int32, device="cuda") * L
        return [(starts, *(torch.randn(B * L, heads, D, device="cuda", dtype=BF16) for heads in (H, K, K))) for _ in range(n)]

    def ours(s: Any) -> torch.Tensor:
        return simple_attention(s[1], s[2], s[3], s[0], kv_starts=s[0], scale=D**-0.5, causal=causal)[0]

    def torch_sdpa(s: Any) -> torch.Tensor:
        q, k, v = (t.view(B, L, -1, D).transpose(1, 2) for t in s[1:])
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=H != K)

    pairs = B * L * (L + 1) // 2 if causal else B * L * L
    return Case(
        name=f"prefill B={B} L={L} H={H} K={K} D={D} {'causal' if causal else 'full'}",
        dtype="bf16",
        bytes=B * L * (2 * H + 2 * K) * D * 2 + B * L * H * 4,
        flops=4 * pairs * H * D,
        matrix="bf16",
        make=make,
        ours=ours,
        baselines={"torch": torch_sdpa},
    )


def decode(B: int, L: int, H: int, K: int, D: int) -> Case:
    """One row per sequence, L keys in pages."""

    def make(n: int) -> list[Any]:
        width = -(-L // PAGE)
        starts, lens = torch.arange(B + 1, dtype=torch.int32, device="cuda"), ints(*[L] * B)
        table = [torch.randperm(B * width, device="cuda").int().view(B, width) for _ in range(n)]
        pools = [[torch.randn(B * width, PAGE, K, D, device="cuda", dtype=BF16) for _ in range(2)] for _ in range(n)]
        return [(torch.randn(B, H, D, device="cuda", dtype=BF16), *pools[i], table[i], starts, lens) for i in range(n)]

    def ours(s: Any) -> torch.Tensor:
        return simple_attention(s[0], s[1], s[2], s[4], page_table=s[3], kv_lens=s[5], scale=D**-0.5, max_q=1)[0]

    def hopper(s: Any) -> torch.Tensor:
        return decode_attention(*s, scale=D**-0.5)[0]

    return Case(
        name=f"decode B={B} keys={L} H={H} K={K} D={D}",
        dtype="bf16",
        bytes=2 * B * L * K * D * 2 + B * H * (4 * D + 4) + B * -(-L // PAGE) * 4,
        flops=4 * B * L * H * D,
        make=make,
        ours=ours,
        baselines={"decode_attention": hopper},
    )


def cases(shapes: Shapes) -> list[Case]:
    heads = (shapes.H, shapes.K, shapes.D)
    if shapes.name != "default":
        return [prefill(2, 4096, *heads, True), decode(8, 4096, *heads)]
    found = [prefill(16384 // L, L, *heads, causal) for L, causal in ((1024, True), (4096, True), (4096, False))]
    found += [prefill(4, 4096, 32, 8, D, True) for D in (64, 256)]
    return found + [decode(B, L, *heads) for B, L in ((1, 1024), (1, 16384), (8, 4096), (64, 4096))]
