"""The KV pool: sizes, dtypes, scales, and the refusal of what cannot fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pyllm.plan.pages import free_bytes
from pyllm.runtime import kv
from pyllm.runtime.kv import KvPool

SLOTS = {0: SimpleNamespace(kv_heads=2, head_dim=64, window=None), 4: SimpleNamespace(kv_heads=1, head_dim=128, window=None)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_shapes_and_bytes(dtype) -> None:
    pool = KvPool(SLOTS, 5, 32, dtype)
    assert pool.caches[0].k.shape == pool.caches[0].v.shape == (5, 32, 2, 64)
    assert pool.caches[4].k.shape == (5, 32, 1, 128)
    assert pool.bytes == sum(t.nbytes for c in pool.caches.values() for t in (c.k, c.v)) == 5 * 32 * 512 * dtype.itemsize
    assert {t.dtype for c in pool.caches.values() for t in (c.k, c.v)} == {dtype}
    assert (pool.caches[0].k_scale is None) == (dtype != torch.float8_e4m3fn)


def test_fp8_scales_are_ones_or_given() -> None:
    given = (torch.tensor([0.5, 0.25]), torch.tensor([2.0]))
    pool = KvPool(SLOTS, 3, dtype=torch.float8_e4m3fn, scales={0: given})
    assert pool.caches[0].k_scale.tolist() == [0.5, 0.25]
    assert pool.caches[0].v_scale.tolist() == [2.0]
    assert pool.caches[4].k_scale.tolist() == pool.caches[4].v_scale.tolist() == [1.0]
    with pytest.raises(ValueError, match=r"a scale of slot 4 is torch.float32 \[2\], expected float32 \[1\] or \[1\]"):
        KvPool(SLOTS, 3, dtype=torch.float8_e4m3fn, scales={4: given})
    with pytest.raises(ValueError, match="slot 0 has scales, but the cache is"):
        KvPool(SLOTS, 3, scales={0: given})


def test_what_cannot_fit_is_refused_before_it_is_allocated(monkeypatch) -> None:
    need = 1000 * 64 * 512 * 2
    monkeypatch.setattr(kv, "free_bytes", lambda device: need - 1)
    with pytest.raises(MemoryError, match=r"KvPool: 1000 pages of 64 tokens take 62.5 MiB, 62.5 MiB are free on cpu"):
        KvPool(SLOTS, 1000)
    monkeypatch.setattr(kv, "free_bytes", lambda device: need)
    assert KvPool(SLOTS, 1000).bytes == need


def test_errors() -> None:
    with pytest.raises(ValueError, match="pages is 1, expected at least 2"):
        KvPool(SLOTS, 1)
    with pytest.raises(ValueError, match="page_size is 8, expected one of 16, 32, 64, 128"):
        KvPool(SLOTS, 4, 8)
    with pytest.raises(ValueError, match="beyond the int32 slots of a batch"):
        KvPool(SLOTS, 2**25, 64)
    assert free_bytes(torch.device("cpu")) > 2**20
