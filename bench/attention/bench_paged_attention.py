"""paged_attention on mixed steps, against FlashAttention-3 (vLLM's build): decodes of 1k and 4k keys beside chunks of prompts, pages of 64.

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
    q_fp8: torch.Tensor
    ones: torch.Tensor


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
            q = torch.randn(sum(rows), self.H, self.D, device="cuda", dtype=BF16)
            return Set(q, pool(), pool(), table, starts, lens, q.to(FP8), torch.ones(len(need), self.K, device="cuda"))

        return [one() for _ in range(count)]

    def ours(self, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        return paged_attention(s.q, s.k_cache, s.v_cache, s.table, s.starts, s.lens, scale=self.D**-0.5, max_q=self.rows)

    def fa3(self, s: Set) -> torch.Tensor:
        """Its plan, made once per step by its users, is left to the call's own. Its fp8 caches want an fp8 q, ours quantizes it itself."""
        rows, keys = self.rows_and_keys()
        optional = ("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos",
                    "rotary_sin", "seqlens_rotary", "scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k")  # fmt: skip
        return vllm.call(
            "fwd",
            namespace="_vllm_fa3_C",
            q=s.q_fp8 if self.fp8 else s.q,
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
            **dict.fromkeys(("q_descale", "k_descale", "v_descale"), s.ones if self.fp8 else None),
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
            baselines={"fa3": self.fa3},
            goal=Goal(ratio={"fa3": 1.0}),
        )


def cases(shapes: Shapes) -> list[Case]:
    heads = (shapes.H, shapes.K, shapes.D)
    if shapes.D not in (64, 128, 256):
        return []
    if shapes.name != "default":
        return [Step(32, 1, 2048, 0, *heads).case()]
    steps = [(32, 1, 2048, 0, 4096), (32, 1, 512, 0, 1024), (64, 1, 256, 1024, 1024), (128, 1, 2048, 0, 1024), (128, 1, 512, 0, 4096),
             (64, 2, 512, 2048, 4096)]  # fmt: skip
    found = [Step(*step[:4], *heads, fp8, step[4]).case() for fp8 in (False, True) for step in steps]
    return [*found, Step(0, 4, 2048, 6144, *heads).case()]
