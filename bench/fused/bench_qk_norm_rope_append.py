"""qk_norm_rope_append against torch and vLLM's two (rotary + cache) or three (norm and rotary, copy of Q, cache) launches.

bytes: the row of qkv in, Q out, K and V out (1 byte each in an fp8 cache), one line of cosines and sines, two indices per token.
The slots are random, as in a step of many sequences; "in order" fills the pages one after the other, as a long prompt does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench import Case, Goal, compiled
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.rope import qk_norm_rope_append

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAGE, EPS = 64, 1e-6


@dataclass
class Set:
    qkv: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos_sin: torch.Tensor  # shared by all sets, like what follows
    cos_sin_bf16: torch.Tensor
    q_weight: torch.Tensor
    k_weight: torch.Tensor
    rows64: torch.Tensor
    slots64: torch.Tensor


@dataclass(frozen=True)
class Layout:
    T: int
    H: int
    K: int
    D: int
    norm: bool
    fp8: bool
    in_order: bool = False

    def make(self, n: int) -> list[Set]:
        pages = (self.T + PAGE - 1) // PAGE
        angle = torch.outer(torch.arange(max(self.T, 4096)), 1e4 ** -(torch.arange(self.D // 2) / (self.D // 2)))
        cos_sin = torch.cat((angle.cos(), angle.sin()), 1).float().cuda()
        rows = torch.arange(self.T, dtype=torch.int32, device="cuda")
        count = pages * PAGE
        slots = (torch.arange(count, device="cuda") if self.in_order else torch.randperm(count, device="cuda"))[: self.T]
        weights = [torch.rand(self.D, device="cuda", dtype=BF16) + 0.5 for _ in range(2)]

        def cache() -> torch.Tensor:
            return torch.zeros(pages, PAGE, self.K, self.D, device="cuda", dtype=BF16).to(FP8 if self.fp8 else BF16)

        def one() -> Set:
            qkv = torch.randn(self.T, (self.H + 2 * self.K) * self.D, device="cuda", dtype=BF16)
            return Set(qkv, rows, slots.int(), cache(), cache(), cos_sin, cos_sin.to(BF16), *weights, rows.long(), slots)

        return [one() for _ in range(n)]

    def ours(self, s: Set) -> torch.Tensor:
        weights = {"q_weight": s.q_weight, "k_weight": s.k_weight} if self.norm else {}
        caches = {"k_cache": s.k_cache, "v_cache": s.v_cache, "slots": s.slots}
        return qk_norm_rope_append(s.qkv, self.H, self.K, s.cos_sin, s.rows, eps=EPS, **weights, **caches)

    def plain(self, s: Set) -> torch.Tensor:
        q, k, v = s.qkv.view(self.T, -1, self.D).split([self.H, self.K, self.K], 1)
        cos, sin = s.cos_sin[s.rows64].to(BF16)[:, None].chunk(2, -1)

        def turn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if self.norm:
                x = torch.nn.functional.rms_norm(x, (self.D,), weight, EPS)
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        s.k_cache.view(-1, self.K, self.D)[s.slots64] = turn(k, s.k_weight).to(s.k_cache.dtype)
        s.v_cache.view(-1, self.K, self.D)[s.slots64] = v.to(s.v_cache.dtype)
        return turn(q, s.q_weight)

    def peer(self, s: Set) -> torch.Tensor:
        """In place on qkv, as its attention then reads Q: the repeated rotation changes no time."""
        if self.norm:
            vllm.fused_qk_norm_rope(s.qkv, self.H, self.K, self.D, EPS, s.q_weight, s.k_weight, s.cos_sin_bf16, True, s.rows64)
        q, k, v = s.qkv.split([self.H * self.D, self.K * self.D, self.K * self.D], 1)
        if not self.norm:
            vllm.rotary_embedding(s.rows64, q, k, self.D, s.cos_sin_bf16, True)
        k, v = k.unflatten(1, (self.K, self.D)), v.unflatten(1, (self.K, self.D))
        vllm.reshape_and_cache(k, v, s.k_cache, s.v_cache, s.slots64, "fp8" if self.fp8 else "auto")
        return q

    def case(self) -> Case:
        row = (self.H + 2 * self.K) * self.D * 2 + self.H * self.D * 2 + 2 * self.K * self.D * (1 if self.fp8 else 2)
        cache = ("fp8 cache" if self.fp8 else "bf16 cache") + (" in order" if self.in_order else "")
        goal = Goal(share=0.95, ratio={"vllm": 1.0}) if self.T >= 8192 else Goal(us=2.0) if self.T == 1 else Goal()
        return Case(
            name=f"T={self.T} H={self.H} K={self.K} D={self.D} {'norm ' if self.norm else ''}{cache}",
            dtype="bf16->fp8" if self.fp8 else "bf16",
            bytes=self.T * (row + self.D * 4 + 8),
            make=self.make,
            ours=self.ours,
            baselines={"torch": self.plain, "torch.compile": compiled(self.plain), "vllm": self.peer},
            goal=goal,
        )


def cases(shapes: Shapes) -> list[Case]:
    kinds = [(False, False), (True, False), (False, True)]
    layouts = [Layout(T, shapes.H, shapes.K, shapes.D, norm, fp8) for T in shapes.tokens for norm, fp8 in kinds]
    if shapes.name == "default":
        layouts += [Layout(8192, shapes.H, shapes.K, shapes.D, norm, False, in_order=True) for norm in (False, True)]
    return [layout.case() for layout in layouts]
