"""Philox4x32-10 against the known answers that its authors publish with Random123, and the uniform numbers made from it."""

from __future__ import annotations

import math

import pytest
import torch

from pyllm.ops.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF
# The digits of pi as counter and key, all zeros, all ones: the three vectors of Random123's kat_vectors for philox4x32-10.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(philox4x32(tuple(torch.tensor(c) for c in counter), key).tolist()) == words


def test_uniforms_use_two_words_per_round():
    seed, index, position = -(2**62) + 12345, 3, -1
    key = (seed & ONES, (seed >> 32) & ONES)
    words = philox4x32((torch.arange(5), torch.tensor(3), torch.tensor(ONES), torch.tensor(0)), key).tolist()
    want = [((w[1] << 32 | w[0]) >> 11) / 2**53 for w in words]
    assert uniforms(torch.arange(5), seed, index, position).tolist() == want


def test_uniforms_are_uniform():
    """Kolmogorov-Smirnov at n = 2^17: sqrt(n) * D passes 2.63 with probability 2 exp(-2 * 2.63^2) = 2e-6."""
    u = uniforms(torch.arange(2**17), 7, 0, 0).sort().values
    n = u.numel()
    steps = torch.arange(n, dtype=torch.float64) / n
    distance = max(float((u - steps).max()), float((steps + 1 / n - u).max()))
    assert distance * math.sqrt(n) < 2.63
    assert float(u.min()) >= 0 and float(u.max()) < 1
