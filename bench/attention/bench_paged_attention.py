"""paged_attention on mixed steps, against FlashAttention-3 (vLLM's build): decodes of 4k keys beside chunks of prompts, pages of 64.

bytes: the keys and values of all sequences once, q in, o and LSE out. flops: 4 H D for each query and each key that it sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench import Case, Goal
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.attention import paged_attention

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE = 64


@dataclass
class Set:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    table: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor


@dataclass(frozen=True)
class Step:
    decodes: int  # sequences with one row and `context` keys
    chunks: int  # sequences with `rows` rows
    rows: int
    before: int  # keys of a chunk's sequence ahead of it
    H: int
    K: int
    D: int
    fp8: bool = False
    context: int = 4096

    def rows_and_keys(self) -> tuple[list[int], list[int]]:
        return [1] * self.decodes + [self.rows] * self.chunks, [self.context] * self.decodes + [self.before + self.rows] * self.chunks

    def make(self, count: int) -> list[Set]:
        rows, keys = self.rows_and_keys()
        starts = torch.tensor([0, *rows]).cumsum(0).int().cuda()
        lens = torch.tensor(keys, dtype=torch.int32, device="cuda")
        need = [-(-n // PAGE) for n in keys]

        def pool() -> torch.Tensor:
            return torch.randn(sum(need), PAGE, self.K, self.D, device="cuda", dtype=BF16).to(FP8 if self.fp8 else BF16)

        def one() -> Set:
            table = torch.zeros(len(need), max(need), dtype=torch.int32, device="cuda")
            for b, pages in enumerate(torch.randperm(sum(need), device="cuda").int().split(need)):
                table[b, : len(pages)] = pages
            return Set(torch.randn(sum(rows), self.H, self.D, device="cuda", dtype=BF16), pool(), pool(), table, starts, lens)

        return [one() for _ in range(count)]

    def ours(self, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention(s.q, s.k_cache, s.v_cache, s.table, s.starts, s.lens, scale=self.D**-0.5, max_q=self.rows)

    def fa3(self, s: Set) -> torch.Tensor:
        """16-bit q and caches; its plan, made once per step by its users, is left out of the time by leaving it to the call's own."""
        rows, keys = self.rows_and_keys()
        optional = ("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos",
                    "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata", "pack_gqa", "s_aux",
                    "cp_tot_seqused_k")  # fmt: skip
        return vllm.call(
            "fwd",
            namespace="_vllm_fa3_C",
            q=s.q,
            k=s.k_cache,
            v=s.v_cache,
            out=torch.empty_like(s.q),
            cu_seqlens_q=s.starts,
            seqused_k=s.lens,
            max_seqlen_q=max(rows),
            max_seqlen_k=max(keys),
            page_table=s.table,
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
            **dict.fromkeys(optional),
        )

    def case(self) -> Case:
        rows, keys = self.rows_and_keys()
        T, item = sum(rows), 1 if self.fp8 else 2
        pairs = sum(n * (L - n) + n * (n + 1) // 2 for n, L in zip(rows, keys, strict=True))
        return Case(
            name=f"{self.decodes} decodes of {self.context} + {self.chunks} x {self.rows} after {self.before} H={self.H} K={self.K} "
            f"D={self.D} {'fp8' if self.fp8 else 'bf16'} cache",
            dtype="bf16, fp8 cache" if self.fp8 else "bf16",
            bytes=2 * sum(keys) * self.K * self.D * item + T * self.H * (4 * self.D + 4),
            flops=4 * self.H * self.D * pairs,
            make=self.make,
            ours=self.ours,
            baselines={} if self.fp8 else {"fa3": self.fa3},
            goal=Goal() if self.fp8 else Goal(ratio={"fa3": 1.0}),
        )


def cases(shapes: Shapes) -> list[Case]:
    heads = (shapes.H, shapes.K, shapes.D)
    if shapes.D not in (64, 128, 256):
        return []
    steps = [(32, 1, 2048, 0), (64, 2, 512, 2048), (0, 4, 2048, 6144)]
    found = [Step(*step, *heads).case() for step in steps]
    return found + [Step(*steps[0], *heads, fp8=True).case()] if shapes.name == "default" else found[:1]
