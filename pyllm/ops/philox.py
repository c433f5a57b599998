"""Philox4x32-10, the counter-based generator behind every random draw: a pure function of (key, counter), no state.

The kernels (`csrc/sampling/philox.cuh`) compute the same bits. Source of the method: Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3" (SC11).
"""

from __future__ import annotations

import torch

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK = 0xFFFFFFFF


def _multiply(constant: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of the 64-bit product constant * x; in 16-bit halves, so that int64 never overflows."""
    low = constant * (x & 0xFFFF)
    high = constant * (x >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor | int, torch.Tensor | int]) -> torch.Tensor:
    """Four 32-bit words per counter.

    counter: four int64 tensors that broadcast, each value in [0, 2^32). key: two such tensors or numbers.
    Returns int64 [..., 4], values in [0, 2^32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniforms(rounds: torch.Tensor, seed: torch.Tensor | int, index: torch.Tensor | int, position: torch.Tensor | int) -> torch.Tensor:
    """One uniform number in [0, 1) per round, fp64: the 53 high bits of words 1 (high) and 0 (low) of Philox.

    Key = seed, counter = (round, index, position, 0). The kernels use all 64 bits of the two words.
    seed, index, position: numbers, or int64 tensors that broadcast with rounds ([B, 1] gives [B, rounds]).
    """
    rounds = rounds.long()
    seed, index, position = (torch.as_tensor(v, dtype=torch.int64, device=rounds.device) for v in (seed, index, position))
    words = philox4x32((rounds, index & MASK, position & MASK, torch.zeros_like(rounds)), (seed & MASK, (seed >> 32) & MASK))
    return ((words[..., 1] << 21) | (words[..., 0] >> 11)).double() * 2.0**-53
