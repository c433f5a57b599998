"""What the experts are measured against: torch's grouped product between torch ops, a Triton grouped GEMM as vLLM runs one, and, in e4m3,
vLLM's CUTLASS grouped GEMM between the ops that vLLM puts around it.

The Triton peer is written here, after what vLLM does: pairs padded to blocks of one expert (`moe_align_block_size`), a product
that gathers rows of x, `silu_and_mul`, a second product that weights its rows, and a sum over the choices; tile sizes are those that vLLM
publishes for an H200. vLLM's own kernels serve all but the products; where its MoE library is not there, torch's sort and sum do, which is
some tens of microseconds slower.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F_

from bench.case import PeerMissing
from bench.peers import vllm

TILES = {
    (128, 768): {1: (16, 64, 64, 1, 4, 5), 8: (16, 64, 128, 1, 4, 3), 64: (16, 256, 128, 1, 8, 2), 256: (32, 256, 128, 16, 4, 2)},
    (8, 14336): {1: (16, 128, 128, 16, 4, 5), 8: (16, 128, 128, 1, 4, 5), 64: (32, 128, 128, 64, 4, 3), 256: (128, 256, 64, 1, 8, 4)},
}
"""(E, F) -> T -> BLOCK_SIZE_M, _N, _K, GROUP_SIZE_M, num_warps, num_stages of vLLM's E=.., N=.., NVIDIA_H200 tables."""
LARGE = (128, 256, 64, 16, 8, 4)


def grouped_mm(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """torch._grouped_mm over rows sorted by torch."""
    tokens, top_k = ids.shape
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(w13.shape[0], device=x.device, dtype=torch.int32), right=True).int()
    gate, up = torch._grouped_mm(x[order // top_k], w13.transpose(1, 2), offs=ends).chunk(2, 1)
    out = torch._grouped_mm(F_.silu(gate) * up, w2.transpose(1, 2), offs=ends)
    back = torch.empty_like(out)
    back[order] = out
    return (back.view(tokens, top_k, -1) * weights[..., None]).sum(1).to(x.dtype)


def align(ids: torch.Tensor, experts: int, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pairs sorted by expert and padded to blocks (absent: their number), the expert of each block, how many places are taken."""
    pairs = ids.numel()
    places = pairs + min(experts, pairs) * (block - 1)
    if vllm.missing("_moe_C"):
        return align_by_torch(ids, experts, block, places)
    sorted_ids = torch.empty(places, dtype=torch.int32, device=ids.device)
    of_block = torch.empty(-(-places // block), dtype=torch.int32, device=ids.device)
    taken = torch.empty(1, dtype=torch.int32, device=ids.device)
    outputs = {"sorted_token_ids": sorted_ids, "experts_ids": of_block, "num_tokens_post_pad": taken}
    vllm.call("moe_align_block_size", namespace="_moe_C", topk_ids=ids, num_experts=experts, block_size=block, **outputs)
    return sorted_ids, of_block, taken


def align_by_torch(ids: torch.Tensor, experts: int, block: int, places: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(experts, device=ids.device, dtype=torch.int32), right=True)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    blocks = (ends - starts + block - 1) // block
    last = blocks.cumsum(0)
    of_pair = chosen.long()
    place = (last - blocks)[of_pair] * block + torch.arange(ids.numel(), device=ids.device) - starts[of_pair]
    sorted_ids = torch.full((places,), ids.numel(), dtype=torch.int32, device=ids.device)
    sorted_ids[place] = order.int()
    of_block = torch.searchsorted(last, torch.arange(-(-places // block), device=ids.device), right=True).clamp_max(experts - 1)
    return sorted_ids, of_block.int(), (last[-1:] * block).int()


def moe_sum(out: torch.Tensor) -> torch.Tensor:
    if vllm.missing("_moe_C"):
        return out.sum(1)
    y = torch.empty(out.shape[0], out.shape[2], dtype=out.dtype, device=out.device)
    vllm.call("moe_sum", namespace="_moe_C", input=out, output=y)
    return y


_KERNELS: list[Any] = []


def _product() -> Any:
    """The Triton kernel, compiled at the first call."""
    if not _KERNELS:
        try:
            from bench.moe.triton_product import product
        except ImportError as error:
            raise PeerMissing("not installed") from error
        _KERNELS.append(product)
    return _KERNELS[0]


def triton(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    (tokens, top_k), (experts, rows, n) = ids.shape, w13.shape
    tiles = TILES.get((experts, rows // 2), {}).get(tokens, LARGE)
    sorted_ids, of_block, taken = align(ids, experts, tiles[0])
    gate_up = torch.empty(tokens * top_k, rows, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * top_k, n, dtype=x.dtype, device=x.device)
    for source, weight, to, share, divide in ((x, w13, gate_up, None, top_k), (None, w2, out, weights, 1)):
        given = vllm.silu_and_mul(gate_up) if source is None else source
        m, n_, k, group, warps, stages = tiles
        grid = (of_block.numel() * -(-weight.shape[1] // n_),)
        sizes = (weight.shape[1], weight.shape[2], tokens * top_k)
        options = {"DIVIDE": divide, "WEIGHTED": share is not None, "BM": m, "BN": n_, "BK": k, "GROUP": group}
        _product()[grid](
            given,
            weight,
            to,
            share if share is not None else to,
            sorted_ids,
            of_block,
            taken,
            *sizes,
            **options,
            num_warps=warps,
            num_stages=stages,
        )
    return moe_sum(out.view(tokens, top_k, n))


def cutlass(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
) -> torch.Tensor:
    """vLLM's e4m3 experts: rows quantised, gathered by expert, product, silu * up, quantised, product, and back with their weights."""
    (tokens, top_k), (experts, rows, n) = ids.shape, w13.shape
    pairs, inner = tokens * top_k, rows // 2
    number = {"dtype": torch.int32, "device": x.device}
    offsets, sizes = torch.empty(experts + 1, **number), [torch.empty(experts, 3, **number) for _ in range(2)]
    there, back = torch.empty(pairs, **number), torch.empty(pairs, **number)
    vllm.call(
        "get_cutlass_moe_mm_data",
        topk_ids=ids,
        expert_offsets=offsets,
        problem_sizes1=sizes[0],
        problem_sizes2=sizes[1],
        input_permutation=there,
        output_permutation=back,
        num_experts=experts,
        n=inner,
        k=n,
        blockscale_offsets=None,
        is_gated=True,
    )
    product = partial(_grouped, offsets=offsets[:-1].long())
    given, scale = vllm.fp8_token(x)
    out = product(given.view(torch.uint8)[there].view(given.dtype), scale[there], w13, w13_scale, sizes=sizes[0], dtype=x.dtype)
    out = product(*vllm.fp8_token(vllm.silu_and_mul(out)), w2, w2_scale, sizes=sizes[1], dtype=x.dtype)
    return (out[back].view(tokens, top_k, n) * weights[..., None]).sum(1).to(x.dtype)


def _grouped(
    rows: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    offsets: torch.Tensor,
    sizes: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    experts, n, k = weight.shape
    out = torch.empty(rows.shape[0], n, dtype=dtype, device=rows.device)
    strides = _strides(k, experts, rows.device)
    vllm.call(
        "cutlass_moe_mm",
        out_tensors=out,
        a_tensors=rows,
        b_tensors=weight,
        a_scales=scale,
        b_scales=weight_scale[..., None],
        expert_offsets=offsets,
        problem_sizes=sizes,
        a_strides=strides,
        b_strides=strides,
        c_strides=_strides(n, experts, rows.device),
        per_act_token=True,
        per_out_ch=True,
    )
    return out


@cache
def _strides(value: int, experts: int, device: torch.device) -> torch.Tensor:
    """Made once, outside of the timed calls."""
    return torch.full((experts,), value, dtype=torch.int64, device=device)
