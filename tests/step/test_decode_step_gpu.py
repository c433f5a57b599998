"""The kernel of decode_step where its parts meet: cuts of the keys and of K, the tables of many layers, SMs that others hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyllm import ops
from pyllm.layers.one_kernel import step_model
from pyllm.ops.step import step_workspace
from tests.step.cases import FORMATS, arguments, assert_near, bound, declare, decode_batch, exact
from tests.support.compare import assert_same

pytestmark = pytest.mark.gpu


def made(name: str, formats: str, lens: list[int], **changes: Any) -> dict[str, Any]:
    spec = declare(name, max_position_embeddings=40960, **changes)
    batch = decode_batch(spec, lens, FORMATS[formats][1], device="cuda")
    model = step_model(bound(spec, formats, "cuda"))
    return arguments(spec, batch, model, step_workspace(model, len(lens)))


def check(formats: str, given: dict[str, Any]) -> None:
    want = exact(given)
    assert_near(ops.decode_step(**given), want, len(given["model"].qkv), formats)


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("lens", [[40000], [16000, 17], [8191, 8193, 511, 513]], ids=str)
def test_many_keys(formats: str, lens: list[int]) -> None:
    check(formats, made("llama", formats, lens))


@pytest.mark.parametrize("keys", [15, 16, 17, 127, 128, 129, 16 * 32 - 1, 16 * 32, 16 * 32 + 1])
def test_edges_of_the_pieces_of_the_keys(keys: int) -> None:
    """A warp takes 16 keys at a time; a head of two is cut into 32 pieces at most."""
    check("bf16", made("head-dim-128", "bf16", [keys]))


@pytest.mark.parametrize("formats", ["bf16", "fp8-both"])
@pytest.mark.parametrize("ffn", [64, 960, 1024, 1088, 8256])
def test_cuts_of_k(formats: str, ffn: int) -> None:
    """A stage holds 2 KiB of a row, of which each warp has an eighth, in steps of 64 bytes: F below, at and above the edges."""
    check(formats, made("llama", formats, [65], intermediate_size=ffn, hidden_size=576, num_attention_heads=9, num_key_value_heads=3))


def test_a_weight_between_two_lines_is_an_error() -> None:
    given = made("llama", "bf16", [3])
    model = given["model"]
    weight = model.o[1]
    shifted = torch.empty(weight.numel() + 32, dtype=weight.dtype, device="cuda")[32:].view(weight.shape)
    with pytest.raises(RuntimeError, match="^decode_step: o starts at an address that is not a multiple of 128 bytes"):
        ops.decode_step(**given | {"model": replace(model, o=[model.o[0], shifted, *model.o[2:]])})


def test_the_most_layers() -> None:
    check("bf16", made("llama", "bf16", [3, 65], num_hidden_layers=128))


@pytest.mark.parametrize("formats", FORMATS)
def test_hundreds_of_steps_have_the_same_bits(formats: str) -> None:
    given = made("group-8", formats, [1000], num_hidden_layers=4)
    want = ops.decode_step(**given)
    for _ in range(300):
        got = ops.decode_step(**given)
    assert_same(got, want, "logits")


def test_beside_another_stream() -> None:
    """All CTAs wait for one another: a step must come through while other kernels come and go on the SMs."""
    given = made("llama", "bf16", [700, 70])
    want = ops.decode_step(**given)
    other, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        assert_same(ops.decode_step(**given), want, "logits")
    torch.cuda.current_stream().wait_stream(other)
