"""merge_states against torch and vLLM: reads two states, writes one, so bytes = 3 * T * H * (2 D + 4)."""

from __future__ import annotations

import torch

from bench import Case, Goal, compiled
from bench.peers import vllm
from bench.shapes import Shapes
from pyllm.ops.decode import merge_states

Set = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def plain(s: Set) -> tuple[torch.Tensor, torch.Tensor]:
    o_a, lse_a, o_b, lse_b = s
    lse = torch.logaddexp(lse_a, lse_b)
    o = torch.exp(lse_a - lse)[..., None] * o_a.float() + torch.exp(lse_b - lse)[..., None] * o_b.float()
    return o.to(o_a.dtype), lse


def theirs(s: Set) -> torch.Tensor:
    """Its LSE are [H, T]: those of the set, read as such, cost the same."""
    o_a, lse_a, o_b, lse_b = s
    out, (T, H) = torch.empty_like(o_a), lse_a.shape
    sides = {"prefix_output": o_a, "prefix_lse": lse_a.view(H, T), "suffix_output": o_b, "suffix_lse": lse_b.view(H, T)}
    vllm.call("merge_attn_states", output=out, output_lse=torch.empty_like(lse_a).view(H, T), **sides)
    return out


def case(T: int, H: int, D: int) -> Case:
    def one() -> Set:
        o = [torch.randn(T, H, D, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
        lse = [torch.randn(T, H, device="cuda") for _ in range(2)]
        return o[0], lse[0], o[1], lse[1]

    return Case(
        name=f"T={T} H={H} D={D} bf16",
        dtype="bf16",
        bytes=3 * T * H * (2 * D + 4),
        flops=4 * T * H * D,
        make=lambda n: [one() for _ in range(n)],
        ours=lambda s: merge_states(*s),
        baselines={"torch": plain, "torch.compile": compiled(plain), "vllm": theirs},
        goal=Goal(share=0.95, ratio={"vllm": 1.0}) if T >= 8192 else Goal(us=2.0) if T == 1 else Goal(),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(T, shapes.H, shapes.D) for T in shapes.tokens]
