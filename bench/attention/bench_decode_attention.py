"""decode_attention against FlashAttention-3 (vLLM's build): one query row per sequence, pages of 64 tokens in random order.

bytes: keys and values of all sequences once, q in, o and LSE out, the page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench import Case, Goal
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.decode import decode_attention

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE = 64
SIZES = (
    (1, 1024), (1, 4096), (1, 16384), (8, 1024), (8, 4096), (8, 16384), (32, 1024), (32, 4096), (128, 300), (256, 1024), (16, 65536),
)  # fmt: skip
GOALS_US = {1024: 6.5, 4096: 8.5, 16384: 19.0}


@dataclass
class Set:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    q_starts: torch.Tensor
    kv_lens: torch.Tensor
    q_fp8: torch.Tensor
    ones: torch.Tensor
    fa3_plan: torch.Tensor | None = None  # its split over the SMs: made once per step, as its users do, so outside the time


@dataclass(frozen=True)
class Layout:
    B: int
    context: int
    H: int
    K: int
    D: int
    fp8: bool
    spread: str = ""

    def lengths(self) -> list[int]:
        """spread "128-32k": log-uniform; "1k-2k", "128-256": uniform, as requests in flight are."""
        if not self.spread:
            return [self.context] * self.B
        at = torch.rand(self.B, generator=torch.Generator().manual_seed(0))
        least = 128 if self.spread == "128-256" else 1024
        return (128 * 256**at if self.spread == "128-32k" else least + least * at).int().tolist()

    def make(self, n: int) -> list[Set]:
        lengths = self.lengths()
        width = -(-max(lengths) // PAGE)
        need = [-(-length // PAGE) for length in lengths]
        starts = torch.arange(self.B + 1, dtype=torch.int32, device="cuda")
        lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        ones = torch.ones(self.B, self.K, device="cuda")

        def cache() -> torch.Tensor:
            pool = torch.empty(sum(need), PAGE, self.K, self.D, device="cuda", dtype=FP8 if self.fp8 else BF16)
            for part in pool.split(1 << 12):  # a whole pool in fp32 would not fit beside its copies
                part.copy_(torch.randn(part.shape, device="cuda", dtype=BF16))
            return pool

        def one() -> Set:
            order = torch.randperm(sum(need), device="cuda", dtype=torch.int64).int()
            table = torch.zeros(self.B, width, dtype=torch.int32, device="cuda")
            for b, pages in enumerate(order.split(need)):
                table[b, : len(pages)] = pages
            q = torch.randn(self.B, self.H, self.D, device="cuda", dtype=BF16)
            return Set(q, cache(), cache(), table, starts, lens, q.to(FP8), ones)

        return [one() for _ in range(n)]

    def ours(self, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        return decode_attention(s.q, s.k_cache, s.v_cache, s.page_table, s.q_starts, s.kv_lens, scale=self.D**-0.5)

    def fa3(self, s: Set) -> torch.Tensor:
        """Its fp8 caches want an fp8 q."""
        optional = ("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos",
                    "rotary_sin", "seqlens_rotary", "pack_gqa", "s_aux", "cp_tot_seqused_k")  # fmt: skip
        scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"), s.ones if self.fp8 else None)
        return vllm.call(
            "fwd",
            namespace="_vllm_fa3_C",
            q=s.q_fp8 if self.fp8 else s.q,
            k=s.k_cache,
            v=s.v_cache,
            out=torch.empty_like(s.q),
            cu_seqlens_q=s.q_starts,
            seqused_k=s.kv_lens,
            max_seqlen_q=1,
            max_seqlen_k=max(self.lengths()),
            page_table=s.page_table,
            softmax_scale=self.D**-0.5,
            is_causal=True,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            is_rotary_interleaved=True,
            num_splits=0,
            sm_margin=0,
            cp_world_size=1,
            cp_rank=0,
            scheduler_metadata=self.fa3_plan(s),
            **scales,
            **dict.fromkeys(optional),
        )

    def fa3_plan(self, s: Set) -> torch.Tensor:
        if s.fa3_plan is None:
            dtype = FP8 if self.fp8 else BF16
            plan = torch.ops._vllm_fa3_C.get_scheduler_metadata
            head = (self.B, 1, max(self.lengths()), self.H, self.K, self.D, self.D, dtype, s.kv_lens, s.q_starts)
            s.fa3_plan = plan(*head, None, None, None, None, PAGE, 0, True, -1, -1, False, 0, None, 0)
        return s.fa3_plan

    def case(self) -> Case:
        keys, item = sum(self.lengths()), 1 if self.fp8 else 2
        us = GOALS_US.get(self.context) if self.B == 1 and (not self.fp8 or self.context == 1024) else None
        context = self.spread or str(self.context)
        narrow = (self.H, self.K, self.D) in ((9, 3, 64), (32, 8, 64), (16, 8, 256))  # few heads, or few rows to a KV head
        return Case(
            name=f"B={self.B} keys={context} H={self.H} K={self.K} D={self.D} {'fp8' if self.fp8 else 'bf16'} cache",
            dtype="bf16, fp8 cache" if self.fp8 else "bf16",
            bytes=2 * keys * self.K * self.D * item + self.B * self.H * (4 * self.D + 4) + keys // PAGE * 4,
            flops=4 * keys * self.H * self.D,
            make=self.make,
            ours=self.ours,
            baselines={"fa3": self.fa3},
            goal=Goal(us=us, share=0.9 if narrow and keys >= 1 << 17 else None, ratio={"fa3": 1.3 if self.fp8 else 0.98}),
        )


def cases(shapes: Shapes) -> list[Case]:
    heads = (shapes.H, shapes.K, shapes.D)
    sizes = SIZES if shapes.name == "default" else ((1, 4096), (32, 4096))
    found = [Layout(B, context, *heads, fp8).case() for fp8 in (False, True) for B, context in sizes]
    if shapes.name == "default":
        found += [Layout(64, 0, *heads, fp8, "128-32k").case() for fp8 in (False, True)]
        found += [Layout(B, 0, *heads, fp8, "1k-2k").case() for B, fp8 in ((256, False), (256, True), (512, True))]
        found += [Layout(1024, 0, *heads, fp8, "128-256").case() for fp8 in (False, True)]
        found += [Layout(128, 4096, 9, 3, 64, False).case(), Layout(32, 4096, 16, 8, 256, False).case()]
        found += [Layout(256, 1024, 32, 8, 64, False).case()]
    return found
