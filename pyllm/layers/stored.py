"""Tensors that a checkpoint stores quantized, expanded as `bind` reads them: MXFP4 (gpt-oss), e4m3 with scales."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale of e4m3
E4M3 = torch.float8_e4m3fn
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1 without its sign


def stored_as(state: Mapping[str, Tensor], name: str) -> tuple[str, ...]:
    """The tensors of `state` that the tensor `name` is made from; itself where it is stored plain or not at all.

    MXFP4: `{name}_blocks` and `{name}_scales`. e4m3: itself, `{name}_scale_inv` or `{name}_scale`, and the scale of the product's input,
    which the weight is not made from, where there is one.
    """
    if name not in state and f"{name}_blocks" in state:
        return f"{name}_blocks", f"{name}_scales"
    scale = next((s for s in (f"{name}_scale_inv", f"{name}_scale") if s in state), None)
    if scale is None:
        return (name,)
    given = f"{name.removesuffix('weight')}input_scale"
    return (name, scale, given) if name.endswith("weight") and given in state else (name, scale)


def expand(state: Mapping[str, Tensor], names: tuple[str, ...], device: torch.device | str = "cpu") -> Tensor:
    """The plain tensor of `stored_as`'s names; one that had to be expanded is made on `device`.

    Errors (ValueError): what is missing, or has another shape or type."""
    missing = [n for n in names if n not in state]
    if missing:
        raise ValueError(f"checkpoint has {names[0]!r} but no tensor {missing[0]!r}, without which it cannot be expanded")
    if len(names) == 1:
        return state[names[0]]
    name, scales_name = names[:2]
    stored, scales = state[name].to(device), state[scales_name].to(device)
    return (expand_mxfp4 if name.endswith("_blocks") else expand_fp8)(name, scales_name, stored, scales)


def expand_mxfp4(name: str, scales_name: str, blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks uint8 `[E, rows, G, 16]`: 32 inputs of a row, two e2m1 to a byte, the lower four bits first; scales uint8 `[E, rows, G]`:
    their exponents + 127. Gives what gpt-oss stores unquantized, bf16 `[E, inputs, rows]`: exact, but for products past bf16's range.
    """
    if blocks.dtype != torch.uint8 or blocks.dim() != 4 or blocks.shape[-1] != 16:
        raise ValueError(f"checkpoint tensor {name!r} is {blocks.dtype} {tuple(blocks.shape)}, expected uint8 [E, rows, G, 16]")
    if scales.dtype != torch.uint8 or scales.shape != blocks.shape[:-1]:
        want = tuple(blocks.shape[:-1])
        raise ValueError(f"checkpoint tensor {scales_name!r} is {scales.dtype} {tuple(scales.shape)}, expected uint8 {want}")
    if (scales == 255).any():
        raise ValueError(f"checkpoint tensor {scales_name!r} holds 255, the scale that is no number")
    values = torch.tensor([*FP4, *(-v for v in FP4)])
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], -1).to(blocks.device)  # of a byte
    experts, rows, groups, _ = blocks.shape
    out = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16, device=blocks.device)
    for e in range(experts):  # indices take 4 bytes a byte: of one expert at a time
        x = pairs[blocks[e].int()].view(rows, groups, 32)
        out[e] = torch.ldexp(x, scales[e].int()[..., None] - 127).view(rows, -1).T
    return out


def expand_fp8(name: str, scales_name: str, weight: Tensor, scales: Tensor) -> Tensor:
    """weight e4m3 `[N, K]` -> fp32 `[N, K]`. scales, factors in floating point: one for all, `[N]` or `[N, 1]` for each row, or
    `[ceil(N / 128), ceil(K / 128)]` (ModelOpt: `[.., 1, .., 1]`) for each block of 128 x 128."""
    if weight.dtype != E4M3 or weight.dim() != 2:
        raise ValueError(f"checkpoint tensor {name!r} is {weight.dtype} {tuple(weight.shape)}, expected float8_e4m3fn [N, K] with scales")
    n, k = weight.shape
    kind = scale_kind(scales_name, tuple(scales.shape), n, k)
    if not scales.is_floating_point() or kind is None:
        want = f"{'' if scales_name.endswith('_inv') else f'(), {(n,)}, {(n, 1)} or '}{(-(-n // BLOCK), -(-k // BLOCK))}"
        raise ValueError(f"checkpoint tensor {scales_name!r} is {scales.dtype} {tuple(scales.shape)}, expected floats {want}")
    check_values(name, weight)
    check_scales(scales_name, scales)
    if kind == "block":
        factors = scales.float().view(-(-n // BLOCK), -(-k // BLOCK)).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return weight.float() * factors[:n, :k]
    return weight.float() * scales.float().reshape(-1, 1)


def scale_kind(name: str, shape: tuple[int, ...], n: int, k: int) -> str | None:
    """What the scales of a weight `[n, k]` belong to: "channel", which one for all is too, "block", or None, which is neither."""
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    if (shape == blocks and (name.endswith("_inv") or shape not in ((1, 1), (n, 1)))) or shape == (blocks[0], 1, blocks[1], 1):
        return "block"
    return "channel" if shape in ((), (1,), (n,), (n, 1), (1, 1)) and not name.endswith("_inv") else None


def check_values(name: str, weight: Tensor) -> None:
    if (weight.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError(f"checkpoint tensor {name!r} holds 0x7f or 0xff, which are no numbers")


def check_scales(name: str, scales: Tensor) -> None:
    if not torch.isfinite(scales.float()).all():
        raise ValueError(f"checkpoint tensor {name!r} holds a scale that is no finite number")
