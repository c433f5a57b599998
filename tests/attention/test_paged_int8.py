"""paged_attention over an int8 cache: against fp64 on the stored values, on a CPU and a GPU; pieces of a long chunk are the chunk."""

from __future__ import annotations

import pytest
import torch

from pyllm import ops
from tests.attention.decode_cases import BF16, S8, compare, make, scales_of

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run(device: str, batch, q, k, v, **options):
    moved = {name: t.to(device) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    at = batch.to(device)
    o = ops.paged_attention(q.to(device), k.to(device), v.to(device), at.page_table, at.q_starts, at.kv_lens, scale=64**-0.5, **moved)
    return tuple(t.cpu() for t in o)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masks", [{}, {"window": 20}, {"softcap": 3.0}])
def test_rows_of_up_to_64(device, masks) -> None:
    batch, q, k, v = make([1, 64, 5, 1, 33], [1, 64, 130, 300, 33], 8, 2, 64, 16, BF16, S8)
    options = scales_of(S8, 2) | masks
    compare(run(device, batch, q, k, v, max_q=64, **options), batch, q, k, v, **options)


@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_in_pieces_is_the_chunk(device) -> None:
    """150 rows as three sequences over one page table, as the executor packs them."""
    batch, q, k, v = make([150], [200], 8, 2, 64, 16, BF16, S8)
    options = scales_of(S8, 2)
    table = batch.page_table.expand(3, -1).contiguous().to(device)
    starts, lens = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([0, 64, 128, 150], [114, 178, 200]))
    moved = {name: t.to(device) for name, t in options.items()}
    got = ops.paged_attention(q.to(device), k.to(device), v.to(device), table, starts, lens, scale=64**-0.5, max_q=64, **moved)
    compare(tuple(t.cpu() for t in got), batch, q, k, v, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_q": 65}, "max_q is 65, expected at most 64 with an int8 cache"),
        ({}, "max_q is None, expected at most 64 with an int8 cache"),
        ({"max_q": 1, "causal": False}, "causal is False, expected True with an int8 cache"),
    ],
)
def test_what_it_refuses(options, text) -> None:
    batch, q, k, v = make([1], [20], 8, 2, 64, 16, BF16, S8)
    with pytest.raises(ValueError, match=text):
        run("cpu", batch, q, k, v, **scales_of(S8, 2), **options)
