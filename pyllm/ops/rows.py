"""What a decode step does to the request rows at its end."""

from __future__ import annotations

import torch
from torch import Tensor

from pyllm.ops.registry import check, define

MAX_PAGE = 1 << 20


def advance_rows(
    sampled: Tensor, token: Tensor, position: Tensor, kv_len: Tensor, slots: Tensor, active: Tensor, table: Tensor, page: int
) -> None:
    """Rows take their sampled tokens and go one position further, all **in place**.

    `token = max(sampled, 0)`, `position += active`, `kv_len += active`, `slots = table[position // page] * page + position % page`.

    Args:
        sampled: int32 `[S]`, contiguous, as all vectors here; -1 (a row that failed) becomes token 0.
        token, position, kv_len, slots: int32 `[S]`, written; they do not overlap.
        active: int32 `[S]`: 1, or 0 for a row that stays where it is.
        table: int32 `[S, W]` rows of pages, any stride. A position behind its last page takes that page.
        page: tokens of a page.

    Raises:
        ValueError (RuntimeError on CUDA): sizes, dtypes or strides that disagree with the above.
    """
    torch.ops.pyllm.advance_rows(sampled, token, position, kv_len, slots, active, table, page)


def _check(
    sampled: Tensor, token: Tensor, position: Tensor, kv_len: Tensor, slots: Tensor, active: Tensor, table: Tensor, page: int
) -> None:
    op, rows = "advance_rows", sampled.shape[0] if sampled.dim() else 0
    vectors = {"sampled": sampled, "token": token, "position": position, "kv_len": kv_len, "slots": slots, "active": active}
    for name, t in vectors.items():
        check(t.dim() == 1, op, name, f"has {t.dim()} dimensions, expected 1")
        check(t.shape[0] == rows, op, name, f".size(0) is {t.shape[0]}, expected S={rows} (from sampled)")
        check(t.dtype == torch.int32, op, name, f"is {str(t.dtype).removeprefix('torch.')}, expected int32")
        check(t.is_contiguous(), op, name, "is not contiguous")
    check(table.dim() == 2, op, "table", f"has {table.dim()} dimensions, expected 2")
    check(table.shape[0] == rows, op, "table", f".size(0) is {table.shape[0]}, expected S={rows} (from sampled)")
    check(table.dtype == torch.int32, op, "table", f"is {str(table.dtype).removeprefix('torch.')}, expected int32")
    check(table.shape[1] >= 1, op, "table", f".size(1) is {table.shape[1]}, expected 1 to 2^31 - 1")
    check(table.stride(1) == 1 or table.shape[1] == 1, op, "table", f".stride(1) is {table.stride(1)}, expected 1")
    check(1 <= page <= MAX_PAGE, op, "page", f"is {page}, expected 1 to {MAX_PAGE}")


def _reference(
    sampled: Tensor, token: Tensor, position: Tensor, kv_len: Tensor, slots: Tensor, active: Tensor, table: Tensor, page: int
) -> None:
    _check(sampled, token, position, kv_len, slots, active, table, page)
    position.add_(active)
    kv_len.add_(active)
    column = (position // page).clamp_max(table.shape[1] - 1).long()
    slots.copy_(table.gather(1, column[:, None]).squeeze(1) * page + position % page)
    token.copy_(sampled.clamp_min(0))


define(
    "advance_rows(Tensor sampled, Tensor(a!) token, Tensor(b!) position, Tensor(c!) kv_len, Tensor(d!) slots, Tensor active,"
    " Tensor table, int page) -> ()",
    stem="fused/advance_rows",
    public="pyllm.ops.rows.advance_rows",
    reference=_reference,
    fake=_check,
)
