"""merge_states: against fp64, and against attention over all keys at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm import ops
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal, poison_allocator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def make(T: int, H: int, D: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Sides of like and of very different weight, and some without keys, whose o is NaN."""
    sides = []
    for side in range(2):
        o, lse = normal(T, H, D, dtype=dtype), normal(T, H) * torch.tensor([1.0, 40.0])[torch.arange(T) % 2][:, None]
        empty = (torch.arange(T) % 5 == side + 2) | (torch.arange(T) % 5 == 4)
        lse[empty], o[empty] = float("-inf"), float("nan")
        sides += [o, lse]
    return tuple(sides)


def oracle(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([lse_a, lse_b]).double()
    lse = both.logsumexp(0)
    weights = torch.exp(both - torch.where(lse.isinf(), 0.0, lse))[..., None]
    o = torch.stack([o_a, o_b]).double().masked_fill(both.isinf()[..., None], 0.0)
    return (weights * o).sum(0), lse


def compare(got: tuple[Tensor, Tensor], sides: tuple[Tensor, ...]) -> None:
    """Per element: the weights err by the rounding of lse - lse_max (|lse| to 200: 200 2^-24 relatively) and a few more, o by one."""
    o, lse = oracle(*sides)
    size = torch.stack([sides[0], sides[2]]).double().nan_to_num().abs().amax(0)
    assert_close(got[0], o, atol=size * 220 * EPS[FP32] + o.abs() * EPS[sides[0].dtype] + 1e-30, what="o")
    assert_close(got[1], lse, rtol=2 * EPS[FP32], atol=8 * EPS[FP32], what="lse")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize(
    ("T", "H", "D"), [(1, 1, 64), (7, 3, 96), (33, 9, 128), (260, 2, 192), (11, 16, 256), (3, 2, 8), (0, 4, 64), (2, 0, 64)]
)
def test_against_fp64(T: int, H: int, D: int, dtype: torch.dtype, device: str) -> None:
    sides = make(T, H, D, dtype)
    for shape, kind in ((sides[0].shape, dtype), (sides[1].shape, FP32)):
        poison_allocator(shape, kind, device)
    moved = [x.to(device) for x in sides]
    got = ops.merge_states(*moved)
    compare(got, sides)
    for one, two in zip(got, ops.merge_states(*moved), strict=True):
        assert_same(one, two, "two runs")


@pytest.mark.parametrize("device", DEVICES)
def test_strided(device: str) -> None:
    """Heads of a wider tensor, tokens with a gap."""
    sides = make(6, 4, 64, BF16)
    wide = torch.full((6, 11, 64), float("nan"), dtype=BF16, device=device)
    wide[:, 1:9:2] = sides[0].to(device)
    args = [x.to(device) for x in sides]
    args[0] = wide[:, 1:9:2]
    compare(ops.merge_states(*args), sides)


@pytest.mark.parametrize("device", DEVICES)
def test_a_split_context_is_the_whole_one(device: str) -> None:
    """A prefix of 48 keys and the 20 behind it, each by decode_attention, merged: attention over all 68 but for one more rounding of o."""
    H, K, D = 4, 2, 64
    q, k, v = normal(1, H, D, dtype=BF16).to(device), *(normal(5, 16, K, D, dtype=BF16).to(device) for _ in range(2))
    starts, table = torch.tensor([0, 1], dtype=torch.int32, device=device), torch.arange(5, dtype=torch.int32, device=device).view(1, 5)

    def attend(pages: Tensor, keys: int) -> tuple[Tensor, Tensor]:
        lens = torch.tensor([keys], dtype=torch.int32, device=device)
        return ops.decode_attention(q, k, v, pages, starts, lens, scale=0.3)

    want, got = attend(table, 68), ops.merge_states(*attend(table[:, :3].contiguous(), 48), *attend(table[:, 3:].contiguous(), 20))
    assert_close(got[0], want[0], atol=4 * EPS[BF16] * v.abs().amax().item(), what="o")
    assert_close(got[1], want[1], atol=1e-4, what="lse")


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.pyllm.merge_states.default, tuple(x.nan_to_num() for x in make(3, 2, 64, BF16)))


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "dims": ({"o_a": torch.zeros(3, 64)}, "o_a has 2 dimensions, expected 3"),
    "dtype": ({"o_a": torch.zeros(3, 2, 64, dtype=torch.float64)}, "o_a is .*float64|o_a is an unsupported dtype"),
    "other": ({"o_b": torch.zeros(3, 2, 64, dtype=FP16)}, "o_b is .*float16, expected .*bfloat16 like o_a"),
    "shape": ({"o_b": torch.zeros(3, 2, 32, dtype=BF16)}, "o_b.*32.*expected"),
    "lse dtype": ({"lse_a": torch.zeros(3, 2, dtype=BF16)}, "lse_a is .*bfloat16, expected .*float32"),
    "lse shape": ({"lse_b": torch.zeros(3, 3)}, "lse_b.*3.*expected"),
}


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, device: str) -> None:
    change, message = ERRORS[case]
    args = dict(zip(("o_a", "lse_a", "o_b", "lse_b"), make(3, 2, 64, BF16), strict=True)) | change
    with pytest.raises(RuntimeError if device == "cuda" else ValueError, match=f"merge_states: {message}"):
        ops.merge_states(*(x.to(device) for x in args.values()))
