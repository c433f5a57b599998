"""A kernel ahead that lets its dependents start at once and writes late: what programmatic dependent launch allows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.compare import assert_same
from tests.support.generate import poison

SOURCE = r"""
extern "C" __global__ void late(const uint4* from, uint4* to, int n) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (long long start = clock64(); clock64() - start < 300000;) {}
  for (int i = threadIdx.x; i < n; i += blockDim.x) to[i] = from[i];
}
"""


def write_late(to: Tensor, source: Tensor) -> None:
    """Copies source to `to`, both contiguous and of a multiple of 16 bytes, 0.15 ms after the next kernel may start."""
    cupy = pytest.importorskip("cupy")
    size = to.numel() * to.element_size()
    assert to.is_contiguous() and source.is_contiguous() and size % 16 == 0 and to.shape == source.shape and to.dtype == source.dtype
    late = cupy.RawKernel(SOURCE, "late")
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        late((1,), (1024,), (source.data_ptr(), to.data_ptr(), size // 16))


def check_waits(call: Callable[[Tensor], Tensor], argument: Tensor, what: str = "") -> None:
    """`call` right behind a kernel that writes its argument late has the bits of a call with the argument as it is. Until it is written,
    the argument is poison."""
    buffer = poison(torch.empty_like(argument))
    expected = call(argument)
    torch.cuda.synchronize()
    write_late(buffer, argument)
    assert_same(call(buffer), expected, what)
