"""advance_rows: integers, so exact; rows beyond the given ones and everything read stay as they are."""

from __future__ import annotations

import pytest
import torch

from pyllm.ops.rows import advance_rows

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def rows(n: int, width: int, page: int, device: str, seed: int = 0) -> list[torch.Tensor]:
    """sampled, token, position, kv_len, slots, active, table; positions up to the last page and one behind it."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=g, dtype=torch.int32)  # noqa: E731
    position = draw(0, width * page + 1, n)
    table = draw(0, 1 << 20, n, width + 3)[:, :width]
    tensors = [draw(-1, 1 << 17, n), draw(0, 9, n), position, position + 1, draw(0, 9, n), draw(0, 2, n), table]
    return [t.to(device) for t in tensors[:6]] + [draw(0, 1, n, width + 3).to(device)[:, :width].copy_(table)]


def expected(tensors: list[torch.Tensor], page: int) -> list[list[int]]:
    """token, position, kv_len, slots, in plain Python."""
    sampled, _, position, kv_len, _, active, table = (t.tolist() for t in tensors)
    at = [p + a for p, a in zip(position, active, strict=True)]
    slots = [line[min(p // page, len(line) - 1)] * page + p % page for line, p in zip(table, at, strict=True)]
    return [[max(t, 0) for t in sampled], at, [n + a for n, a in zip(kv_len, active, strict=True)], slots]


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 1024])
@pytest.mark.parametrize("page", [1, 16, 64, 48])
def test_rows(device: str, n: int, page: int) -> None:
    tensors = rows(n, 5, page, device, seed=n)
    want, kept = expected(tensors, page), [tensors[i].clone() for i in (0, 5, 6)]
    advance_rows(*tensors, page)
    assert [tensors[i].tolist() for i in (1, 2, 3, 4)] == want
    assert all(torch.equal(tensors[i], t) for i, t in zip((0, 5, 6), kept, strict=True))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_parts_of_longer_tensors(device: str) -> None:
    """As the executor calls it: the first rows of state that holds more."""
    tensors = rows(40, 3, 16, device)
    before = [t.clone() for t in tensors]
    advance_rows(*(t[:7] for t in tensors), 16)
    assert [tensors[i][:7].tolist() for i in (1, 2, 3, 4)] == expected([t[:7] for t in before], 16)
    assert all(torch.equal(t[7:], b[7:]) for t, b in zip(tensors, before, strict=True))


ERRORS = [
    (0, lambda t: t[:, None], "sampled has 2 dimensions, expected 1"),
    (1, lambda t: t[:3], r"token .size\(0\) is 3, expected S=4"),
    (2, lambda t: t.long(), "position is (int64|an unsupported dtype)"),
    (3, lambda t: t.repeat_interleave(2)[::2], "kv_len (is not contiguous|.stride)"),
    (6, lambda t: t[:3], r"table .size\(0\) is 3, expected S=4"),
    (6, lambda t: t[:, :0], r"table .size\(1\) is 0, expected 1"),
]


@pytest.mark.parametrize("device", ["cpu", "meta", CUDA])
@pytest.mark.parametrize(("index", "change", "message"), ERRORS, ids=range(len(ERRORS)))
def test_errors(device: str, index: int, change, message: str) -> None:
    tensors = [t.to(device) for t in rows(4, 2, 16, "cpu")]
    tensors[index] = change(tensors[index])
    with pytest.raises((ValueError, RuntimeError), match=f"advance_rows: {message}"):
        torch.ops.pyllm.advance_rows(*tensors, 16)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_opcheck_and_page(device: str) -> None:
    tensors = rows(4, 2, 16, device)
    torch.library.opcheck(torch.ops.pyllm.advance_rows.default, (*tensors, 16))
    with pytest.raises((ValueError, RuntimeError), match="advance_rows: page is 0, expected 1 to"):
        advance_rows(*tensors, 0)


@pytest.mark.gpu
def test_steps_in_a_graph() -> None:
    """Ten in a row, replayed twice: each sees what the one before wrote."""
    tensors, page = rows(300, 9, 16, "cuda"), 16
    tensors[2].fill_(3)
    tensors[3].fill_(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            advance_rows(*tensors, page)
    want = [t.clone() for t in tensors]
    for _ in range(2):
        graph.replay()
        for _ in range(10):
            for target, values in zip((1, 2, 3, 4), expected(want, page), strict=True):
                want[target] = torch.tensor(values, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))
