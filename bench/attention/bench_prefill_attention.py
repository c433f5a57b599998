"""prefill_attention against FlashAttention-3 (vLLM's build) and cuDNN (torch's SDPA): T = 16k tokens in sequences of one length.

flops: 4 H D for each query and each key that it sees: n (n + 1) / 2 pairs of a causal sequence, n^2 of a full one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import Case, Goal
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.prefill import prefill_attention

BF16 = torch.bfloat16
TOKENS, PAGE = 16384, 64


@dataclass
class Set:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True)
class Layout:
    n: int
    H: int
    K: int
    D: int
    causal: bool = True
    paged: bool = False
    window: int | None = None

    def make(self, count: int) -> list[Set]:
        T, B = TOKENS, TOKENS // self.n
        starts = torch.arange(0, T + 1, self.n, dtype=torch.int32, device="cuda")
        lens = torch.full((B,), self.n, dtype=torch.int32, device="cuda")

        def one() -> Set:
            q, k, v = (torch.randn(T, heads, self.D, device="cuda", dtype=BF16) for heads in (self.H, self.K, self.K))
            order = torch.randperm(T // PAGE, device="cuda")
            pages = [torch.empty(T // PAGE, PAGE, self.K, self.D, device="cuda", dtype=BF16) for _ in range(2)]
            for pool, flat in zip(pages, (k, v), strict=True):
                pool[order] = flat.view(T // PAGE, PAGE, self.K, self.D)
            return Set(q, k, v, starts, pages[0], pages[1], order.int().view(B, -1), lens)

        return [one() for _ in range(count)]

    def ours(self, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        options: dict[str, Any] = {"scale": self.D**-0.5, "causal": self.causal, "window": self.window}
        if self.paged:
            return prefill_attention(s.q, s.k_pages, s.v_pages, s.starts, page_table=s.table, kv_lens=s.lens, **options)
        return prefill_attention(s.q, s.k, s.v, s.starts, kv_starts=s.starts, **options)

    def contiguous(self, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        return prefill_attention(s.q, s.k, s.v, s.starts, kv_starts=s.starts, scale=self.D**-0.5, causal=self.causal, window=self.window)

    def fa3(self, s: Set) -> torch.Tensor:
        optional = ("k_new", "v_new", "q_v", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
                    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata", "pack_gqa", "s_aux",
                    "cp_tot_seqused_k")  # fmt: skip
        return vllm.call(
            "fwd",
            namespace="_vllm_fa3_C",
            q=s.q,
            k=s.k_pages if self.paged else s.k,
            v=s.v_pages if self.paged else s.v,
            out=torch.empty(s.q.shape, dtype=BF16, device="cuda"),
            cu_seqlens_q=s.starts,
            cu_seqlens_k=None if self.paged else s.starts,
            seqused_k=s.lens if self.paged else None,
            max_seqlen_q=self.n,
            max_seqlen_k=self.n,
            page_table=s.table if self.paged else None,
            softmax_scale=self.D**-0.5,
            is_causal=self.causal,
            window_size_left=self.window - 1 if self.window else -1,
            window_size_right=0 if self.window else -1,
            softcap=0.0,
            is_rotary_interleaved=True,
            num_splits=1,
            sm_margin=0,
            cp_world_size=1,
            cp_rank=0,
            **dict.fromkeys(optional),
        )

    def cudnn(self, s: Set) -> torch.Tensor:
        q, k, v = (t.view(-1, self.n, *t.shape[1:]).transpose(1, 2) for t in (s.q, s.k, s.v))
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=self.causal, scale=self.D**-0.5, enable_gqa=self.H != self.K
            )

    def case(self, goal: Goal) -> Case:
        T = TOKENS
        seen = self.n * (self.n + 1) // 2 if self.causal else self.n**2
        if self.window:
            seen = sum(min(p + 1, self.window) for p in range(self.n))
        how = ("causal" if self.causal else "full") + (f" window {self.window}" if self.window else "") + (" paged" if self.paged else "")
        baselines: dict[str, Callable[[Set], Any]] = {"fa3": self.fa3}
        if self.paged:
            baselines |= {"contiguous": self.contiguous}
        elif not self.window:
            baselines |= {"cudnn": self.cudnn}
        return Case(
            name=f"n={self.n} H={self.H} K={self.K} D={self.D} {how} bf16",
            dtype="bf16",
            bytes=4 * T * self.D * (self.H + self.K) + 4 * T * self.H,
            flops=4 * self.H * self.D * seen * (T // self.n),
            matrix="bf16",
            make=self.make,
            ours=self.ours,
            baselines=baselines,
            goal=goal,
        )


def cases(shapes: Shapes) -> list[Case]:
    H, K, D = shapes.H, shapes.K, shapes.D
    if shapes.name != "default":
        return [Layout(n, H, K, D).case(Goal(ratio={"fa3": 1.0, "cudnn": 1.0})) for n in (1024, 8192)] if D in (64, 128, 256) else []
    both = {short: Goal(ratio={"fa3": ratio, "cudnn": ratio}) for short, ratio in ((True, 1.0), (False, 1.05))}
    found = [Layout(n, 32, 8, 128).case(both[n < 2048]) for n in (512, 1024, 2048, 4096, 8192, 16384)]
    found += [Layout(n, 32, 32, 128).case(both[False]) for n in (2048, 8192)]
    found += [Layout(8192, H, K, 128, causal=False).case(both[True])]
    for heads, kv_heads, dim in ((32, 8, 64), (16, 4, 256)):
        found += [Layout(n, heads, kv_heads, dim, causal).case(both[True]) for n, causal in ((4096, True), (16384, False))]
    found += [Layout(n, 32, 8, 128, paged=True).case(Goal(ratio={"contiguous": 0.97})) for n in (2048, 8192)]
    return found + [Layout(8192, 32, 8, 128, window=1024).case(Goal(ratio={"fa3": 1.0}))]
