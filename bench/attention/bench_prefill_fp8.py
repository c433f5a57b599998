"""prefill_attention on e4m3 q, k, v against FlashAttention-3 (vLLM's build, two-level sums too): 16k tokens in equal sequences.

bytes: q, k, v in and o (bf16) and LSE out, once. flops: 4 D per pair of a row and a key that it sees, per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench import Case, Goal
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.prefill import prefill_attention

FP8 = torch.float8_e4m3fn
TOKENS, PAGE = 16384, 64
NONE = ("k_new", "v_new", "q_v", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary",
        "scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k")  # fmt: skip


@dataclass
class Set:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lens: torch.Tensor
    page_table: torch.Tensor | None
    ones: torch.Tensor


@dataclass(frozen=True)
class Layout:
    N: int  # rows and keys of a sequence
    H: int
    K: int
    D: int
    causal: bool = True
    paged: bool = False

    @property
    def B(self) -> int:
        return TOKENS // self.N

    def make(self, n: int) -> list[Set]:
        starts = torch.arange(0, TOKENS + 1, self.N, dtype=torch.int32, device="cuda")
        lens, ones = starts.diff().contiguous(), torch.ones(self.B, self.K, device="cuda")

        def some(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(FP8)

        def one() -> Set:
            rows = (TOKENS // PAGE, PAGE) if self.paged else (TOKENS,)
            k, v = (some(*rows, self.K, self.D) for _ in range(2))
            table = torch.randperm(TOKENS // PAGE, device="cuda").int().view(self.B, -1) if self.paged else None
            return Set(some(TOKENS, self.H, self.D), k, v, starts, lens, table, ones)

        return [one() for _ in range(n)]

    def ours(self, s: Set) -> tuple[torch.Tensor, torch.Tensor]:
        where = {"page_table": s.page_table, "kv_lens": s.lens} if self.paged else {"kv_starts": s.starts}
        return prefill_attention(s.q, s.k, s.v, s.starts, scale=self.D**-0.5, causal=self.causal, **where)

    def fa3(self, s: Set) -> torch.Tensor:
        keys = {"cu_seqlens_k": None, "seqused_k": s.lens} if self.paged else {"cu_seqlens_k": s.starts, "seqused_k": None}
        return vllm.call(
            "fwd",
            namespace="_vllm_fa3_C",
            q=s.q,
            k=s.k,
            v=s.v,
            out=torch.empty_like(s.q, dtype=torch.bfloat16),
            cu_seqlens_q=s.starts,
            max_seqlen_q=self.N,
            max_seqlen_k=self.N,
            page_table=s.page_table,
            softmax_scale=self.D**-0.5,
            is_causal=self.causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            is_rotary_interleaved=True,
            num_splits=0,
            sm_margin=0,
            cp_world_size=1,
            cp_rank=0,
            **keys,
            **dict.fromkeys(("q_descale", "k_descale", "v_descale"), s.ones),
            **dict.fromkeys(NONE),
        )

    def case(self) -> Case:
        seen = self.N * (self.N + 1) // 2 if self.causal else self.N * self.N
        kind = ("causal" if self.causal else "full") + (f" page={PAGE}" if self.paged else "")
        return Case(
            name=f"B={self.B} N={self.N} H={self.H} K={self.K} D={self.D} {kind}",
            dtype="fp8->bf16",
            bytes=TOKENS * (self.H * (3 * self.D + 4) + 2 * self.K * self.D),
            flops=4 * self.D * self.H * self.B * seen,
            make=self.make,
            ours=self.ours,
            baselines={"fa3": self.fa3},
            matrix="fp8",
            goal=Goal(ratio={"fa3": 1.25}) if self.D == 128 and self.N >= 4096 and not self.paged else Goal(),
        )


def cases(shapes: Shapes) -> list[Case]:
    heads = (shapes.H, shapes.K, shapes.D)
    if shapes.name != "default":
        return [Layout(N, *heads).case() for N in (2048, 8192)]
    found = [Layout(N, *heads, causal) for causal in (True, False) for N in (1024, 4096, 8192, 16384)]
    found += [Layout(8192, *heads, causal, paged=True) for causal in (True, False)]
    found += [Layout(8192, H, K, D, causal) for H, K, D in ((32, 8, 64), (16, 4, 256)) for causal in (True, False)]
    return [layout.case() for layout in found]
