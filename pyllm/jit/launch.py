"""Loads compiled variants and launches them on torch's current stream: what `variant_attention` is on CUDA."""

from __future__ import annotations

import ctypes
import importlib
import struct
from dataclasses import dataclass
from functools import cache as once
from typing import Any

import torch
from torch import Tensor

from pyllm.jit.compiler import compile_variant
from pyllm.jit.params import THREADS, Params, plan, shared_bytes
from pyllm.jit.source import ELEMENTS
from pyllm.jit.variant import AttentionVariant, numbered

OP, FP8 = "variant_attention", torch.float8_e4m3fn


def _need(ok: bool, argument: str, message: str) -> None:
    if not ok:
        raise RuntimeError(f"{OP}: {argument} {message}")


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _ok(result: tuple[Any, ...], what: str) -> Any:
    status, *values = result
    if int(status):
        raise RuntimeError(f"{OP}: {what} failed: {status.name}")
    return values[0] if values else None


@dataclass(frozen=True)
class Kernels:
    """One variant on one device. tables: what its constant tuples became."""

    many: Any
    few: Any
    combine: Any
    shared: dict[bool, int]
    tables: dict[str, Tensor]
    sms: int
    dependent: bool  # programmatic dependent launch
    library: Any  # holds the code


@once
def _kernels(number: int, dim: int, value_dim: int, dtype: torch.dtype, fp8: bool, index: int) -> Kernels:
    variant, device = numbered(number), torch.device("cuda", index)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{OP}: variant {variant.name} is compiled by its first call; call it once before capturing a CUDA graph")
    major, minor = torch.cuda.get_device_capability(device)
    code = compile_variant(variant, dim, dtype, value_dim=value_dim, fp8=fp8, arch=f"sm_{major}{minor}")
    driver = _driver()
    library = _ok(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0), "loading the compiled code")
    found = [_ok(driver.cuLibraryGetKernel(library, f"variant_{name}".encode()), name) for name in ("many", "few", "combine")]
    shared = {few: shared_bytes(dim, value_dim, few) for few in (False, True)}
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    for few, kernel in ((False, found[0]), (True, found[1])):
        _ok(driver.cuKernelSetAttribute(limit, shared[few], kernel, driver.CUdevice(index)), f"{shared[few]} bytes of shared memory")
    tables = {p.name: torch.tensor(p.value, dtype=torch.float32, device=device) for p in variant.params if isinstance(p.value, tuple)}
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Kernels(found[0], found[1], found[2], shared, tables, sms, major >= 9, library)


def _launch(kernels: Kernels, kernel: Any, grid: tuple[int, int, int], threads: int, shared: int, params: Params, stream: int) -> None:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared
    config.hStream = driver.CUstream(stream)
    if kernels.dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    _ok(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(arguments), 0), "the launch")


def _slots(variant: AttentionVariant, tables: dict[str, Tensor], tensors: list[Tensor]) -> list[int]:
    brought = iter(tensors)
    slots = []
    for p in variant.params:
        if isinstance(p.value, str):
            slots.append(next(brought).data_ptr())
        elif isinstance(p.value, tuple):
            slots.append(tables[p.name].data_ptr())
        else:
            slots.append(struct.unpack("<I", struct.pack("<f", p.value))[0])
    return slots + [0] * (8 - len(slots))


def _check_layout(named: dict[str, Any], device: torch.device) -> None:
    for name, t in named.items():
        if t is None:
            continue
        _need(t.device == device, name, f"is on {t.device}, expected {device}")
        if name in ("q", "k", "v"):
            dense = 16 // t.element_size()  # elements of 16 bytes
            rows = all(size <= 1 or stride % dense == 0 for size, stride in zip(t.shape[:-1], t.stride()[:-1], strict=True))
            _need(t.stride(-1) == 1, name, f".stride({t.dim() - 1}) is {t.stride(-1)}, expected 1")
            _need(rows and t.data_ptr() % 16 == 0, name, f"has strides {t.stride()}, expected rows at multiples of 16 bytes")
        else:
            _need(t.numel() == 0 or t.stride(-1) == 1, name, f".stride({t.dim() - 1}) is {t.stride(-1)}, expected 1")


def _fill(named: dict[str, Any]) -> Params:
    """Addresses, strides and sizes; everything else is 0."""
    p = Params()
    for name, t in named.items():
        setattr(p, name, None if t is None else t.data_ptr())
    q, k, v, q_starts, page_table, mask = (named[n] for n in ("q", "k", "v", "q_starts", "page_table", "mask"))
    p.q_token_stride, p.q_head_stride = q.stride()[:2]
    for name, t in (("k", k), ("v", v)):
        page, token, head = t.stride()[:3] if page_table is not None else (0, *t.stride()[:2])
        for what, stride in (("page", page), ("token", token), ("head", head)):
            setattr(p, f"{name}_{what}_stride", stride)
    p.tokens, p.heads, p.batch, p.kv_heads = q.shape[0], q.shape[1], q_starts.shape[0] - 1, k.shape[-2]
    p.group = p.heads // p.kv_heads
    for name in ("k_scale", "v_scale"):
        scale = named[name]
        setattr(p, f"{name}_step", int(scale is not None and scale.numel() > 1))
    if page_table is not None:
        p.page_shift, p.table_stride = k.shape[1].bit_length() - 1, page_table.stride(0)
    if mask is not None:
        p.mask_words, p.mask_stride = mask.shape[1], mask.stride(0)
    return p


def variant_attention_cuda(named: dict[str, Any], scale: float, causal: bool, window: int, softcap: float, max_q: int,
                           variant: int, tensors: list[Tensor], first_head: int) -> tuple[Tensor, Tensor]:  # fmt: skip
    """named: the op's tensor arguments, which the caller has checked but for what only a device asks for."""
    q, k, v, page_table = (named[n] for n in ("q", "k", "v", "page_table"))
    device, dim, value_dim = q.device, q.shape[2], v.shape[-1]
    _need(q.dtype in ELEMENTS, "q", f"is {q.dtype}, expected bfloat16 or float16")
    _check_layout(named | {f"tensors[{i}]": t for i, t in enumerate(tensors)}, device)
    out, lse = q.new_empty((*q.shape[:2], value_dim)), q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.shape[0] == 0 or q.shape[1] == 0:
        return out, lse
    p = _fill(named)
    _need(p.tokens * p.group < 1 << 31, "q", f"has {p.tokens} rows in groups of {p.group}, expected less than 2^31 together")
    p.out, p.lse = out.data_ptr(), lse.data_ptr()
    p.scale, p.softcap, p.causal, p.window, p.first_head = scale, softcap, int(causal), min(window, 1 << 30), first_head
    with torch.cuda.device(device):
        kernels = _kernels(variant, dim, value_dim, q.dtype, k.dtype == FP8, device.index)
        p.slots[:] = _slots(numbered(variant), kernels.tables, tensors)
        max_keys = k.shape[0] if page_table is None else page_table.shape[1] * k.shape[1]
        how = plan(p.tokens, p.batch, p.group, p.kv_heads, max_q, max_keys, kernels.sms)
        p.splits = how.splits
        if how.splits > 1:
            partial = q.new_empty((how.splits, p.tokens * p.heads, value_dim + 1), dtype=torch.float32)
            p.partial = partial.data_ptr()
            p.partial_lse = p.partial + how.splits * p.tokens * p.heads * value_dim * 4
        stream = torch.cuda.current_stream(device).cuda_stream
        kernel = kernels.few if how.few else kernels.many
        _launch(kernels, kernel, (how.tiles, p.kv_heads, how.splits), THREADS, kernels.shared[how.few], p, stream)
        if how.splits > 1:
            _launch(kernels, kernels.combine, (p.tokens * p.heads, 1, 1), THREADS // 4, 0, p, stream)
    return out, lse
