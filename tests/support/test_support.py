"""The helpers themselves: poison is where it is promised, and every drawn batch and schedule is a valid one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from tests.support.generate import FP8, HUGE, empty_pool, filled_pools, gather, normal, padded_rows, poisoned, ragged_batch
from tests.support.strategies import Schedule, ragged_batches, row_shapes, schedules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_poison_is_nan_in_floats(dtype: torch.dtype) -> None:
    assert torch.isnan(poisoned(3, 5, dtype=dtype).float()).all()


def test_poison_is_huge_in_integers() -> None:
    assert (poisoned(4, dtype=torch.int32) == HUGE).all()
    assert (poisoned(4, dtype=torch.uint8) == 255).all()


def test_normal_repeats_with_its_seed_and_fits_fp8() -> None:
    assert torch.equal(normal(7, 9, seed=3), normal(7, 9, seed=3))
    assert not torch.equal(normal(7, 9, seed=3), normal(7, 9, seed=4))
    assert torch.isfinite(normal(1000, dtype=FP8, scale=1000.0).float()).all()


def test_padded_rows_sees_a_write_into_the_padding() -> None:
    x = normal(3, 16)
    view, intact = padded_rows(x, gap=4, offset=2)
    assert torch.equal(view, x)
    assert view.stride(0) == 22
    view.mul_(2)
    intact()
    view.as_strided((1,), (1,), view.storage_offset() + 16).fill_(0)
    with pytest.raises(AssertionError, match="padding"):
        intact()


def test_ragged_batch_of_known_lengths() -> None:
    batch = ragged_batch([1, 3, 0], [5, 3, 0], page_size=4, seed=1)
    assert batch.q_starts.tolist() == [0, 1, 4, 4]
    assert batch.positions.tolist() == [4, 0, 1, 2]
    assert (batch.page_table < HUGE).sum(1).tolist() == [2, 1, 0]
    assert batch.slots[0] == batch.page_table[0, 1] * 4
    with pytest.raises(ValueError, match="q_lens"):
        ragged_batch([6], [5], page_size=4)


@settings(max_examples=40)
@given(batch=ragged_batches())
def test_batches_are_consistent_and_poisoned(batch) -> None:
    used = torch.cat([batch.slots_of(b) for b in range(batch.B)] or [torch.empty(0, dtype=torch.int64)])
    assert used.unique().numel() == used.numel()
    assert ((used >= batch.page_size) & (used < batch.pages * batch.page_size)).all()
    for b, n in enumerate(batch.q_lens()):
        start = int(batch.q_starts[b])
        assert batch.slots[start : start + n].tolist() == batch.slots_of(b)[int(batch.kv_lens[b]) - n :].tolist()
    k, v = filled_pools(batch, 2, 8, torch.bfloat16, seed=5)
    finite = torch.isfinite(k.view(-1, 16)).all(1)
    assert finite.sum() == used.numel()
    assert finite[used].all()
    assert torch.equal(torch.isfinite(v), torch.isfinite(k))
    assert torch.isnan(empty_pool(batch, 1, 8, torch.float32)).all()
    for b in range(batch.B):
        assert gather(k, batch, b).shape == (int(batch.kv_lens[b]), 2, 8)


@settings(max_examples=40)
@given(shape=row_shapes(max_rows=9, max_width=128))
def test_row_shapes_stay_in_their_limits(shape: tuple[int, int]) -> None:
    T, N = shape
    assert 0 <= T <= 9
    assert 8 <= N <= 128
    assert N % 8 == 0


@settings(max_examples=40)
@given(schedule=schedules(budget=8, max_prompt=20))
def test_schedules_feed_every_token_once(schedule: Schedule) -> None:
    fed = [0] * len(schedule.prompts)
    for step in schedule.steps:
        assert 0 < sum(tokens for _, tokens in step) <= 8
        assert len({request for request, _ in step}) == len(step)
        for request, tokens in step:
            assert tokens == 1 or fed[request] + tokens <= schedule.prompts[request]
            fed[request] += tokens
    assert fed == [p + o - 1 for p, o in zip(schedule.prompts, schedule.outputs, strict=True)]
