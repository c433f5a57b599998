"""The Format interface: two formats written here, one that quantizes at bind time and one that reads packed integers, must fit without
any change
to the layers; and the quant plan's rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyllm.layers import Dense, Format, Linear, Part, Split, Weight, bind, plan
from pyllm.layers.formats import resolve
from pyllm.plan.explain import explain
from tests.layers.custom import VOCAB, D, mine, random_state
from tests.layers.test_custom import IDS
from tests.models.paged import Paged


@dataclass(frozen=True)
class Fp8Channel(Format):
    """e4m3, one scale per output row, quantized from the plain weight at bind time."""

    name = "fp8"

    def tensors(self, weight: Weight) -> dict[str, Weight]:
        return {"weight": replace(weight, fp32=True)}

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        w = tensors["weight"]
        scale = w.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
        return {"q": (w / scale).to(torch.float8_e4m3fn), "scale": scale}

    def matmul(self, m: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, (m.q.float() * m.scale).to(x.dtype), bias)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k + 4 * n


@dataclass(frozen=True)
class Int4Packed(Format):
    """A checkpoint stored as uint8 `[K/2, N]` (two inputs a byte, low nibble first) with scales `[K/group, N]`: transposed, packed,
    grouped."""

    group: int = 16
    name = "int4"

    def tensors(self, weight: Weight) -> dict[str, Weight]:
        packed = replace(weight, suffix="qweight", row_dim=1, col_pack=2, keep=True)
        return {"q": packed, "scale": replace(weight, suffix="scales", row_dim=1, col_pack=self.group, keep=True)}

    def finish(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: t.T.contiguous() for k, t in tensors.items()}  # [N, K/2], [N, K/group]

    def matmul(self, m: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        q = torch.stack([m.q & 15, m.q >> 4], -1).flatten(1).float() - 8
        w = q.unflatten(1, (-1, self.group)) * m.scale[..., None]
        return torch.nn.functional.linear(x, w.flatten(1).to(x.dtype), bias)

    def weight_bytes(self, n: int, k: int) -> int:
        return n * k // 2 + 4 * n * k // self.group


def logits(quant: Any, state: dict[str, Tensor] | None = None) -> Tensor:
    spec = mine()
    return bind(spec, state or random_state(spec), quant=quant)(Paged(spec, 1, len(IDS)).step([IDS]))


def test_a_plan_over_names_chooses_formats() -> None:
    """The quantized model equals the plain one whose matching weights were rounded beforehand."""
    quant, state = (("lm_head", None), ("*.experts.*", None), ("*.gate", None), ("*", Fp8Channel())), random_state(mine())
    rounded = {}
    for name, w in state.items():
        if w.dim() == 2 and not any(part in name for part in ("lm_head", ".experts.", ".gate.", "embed_tokens")):
            t = Fp8Channel().finish({"weight": w})
            w = t["q"].float() * t["scale"]
        rounded[name] = w
    got, want = logits(quant, state), logits((), rounded)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())
    assert (want - logits((), state)).abs().max() > 1e-3
    bound = bind(mine(), state, quant=quant)
    assert bound.head.format == Dense()
    assert bound.subs[0].body.branches[0].qkv.q.dtype == torch.float8_e4m3fn
    assert logits([("*.o_proj", Dense(torch.float32))]).equal(logits((), state))


def packed(w: Tensor, group: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 [K/2, N], scales [K/group, N], and the weight they stand for."""
    grouped = w.unflatten(1, (-1, group))
    scale = grouped.abs().amax(-1, keepdim=True) / 7
    q = (grouped / scale).round().clamp(-8, 7)
    nibbles = (q.flatten(1) + 8).to(torch.uint8)
    return (nibbles[:, ::2] | nibbles[:, 1::2] << 4).T.contiguous(), scale[..., 0].T.contiguous(), (q * scale).flatten(1)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shard", ["col", "row"])
def test_a_packed_checkpoint_loads_and_is_cut_like_a_plain_one(shard: str, tp: int) -> None:
    generator = torch.Generator().manual_seed(2)
    parts = (Part("a", 32, 16), Part("b", 16, 16, Split.REPLICATE)) if shard == "col" else (Part("a", 24),)
    plain, quantized = {}, {}
    for p in parts:
        q, s, w = packed(torch.randn(p.size, 64, generator=generator))
        quantized |= {f"{p.name}.qweight": q, f"{p.name}.scales": s}
        plain[f"{p.name}.weight"] = w
    spec, x = Linear(64, parts, shard), torch.randn(3, 64, generator=generator)
    for rank in range(tp):
        mine_x = x if shard == "col" else x.chunk(tp, -1)[rank]
        got = bind(spec, quantized, quant=[("*", Int4Packed())], rank=rank, tp=tp)(mine_x)
        torch.testing.assert_close(got, bind(spec, plain, rank=rank, tp=tp)(mine_x), rtol=0, atol=1e-5)


def test_parts_of_one_gemm_have_one_format() -> None:
    message = r"the parts of one GEMM get different formats \(model\.layers\.0\.attn\.q_proj: fp8, model\.layers\.0\.attn\.k_proj: model, "
    quant = (("*.q_proj", Fp8Channel()),)
    for attempt in (lambda: logits(quant), lambda: explain(mine(), quant=quant)):
        with pytest.raises(ValueError, match=message):
            attempt()


def test_first_match_wins_and_none_is_the_models_dtype() -> None:
    quant = (("a.*", None), ("*", Fp8Channel()), ("b.*", Dense(torch.float32)))
    assert resolve(["a.q"], quant) == Dense()
    assert resolve(["b.q"], quant) == Fp8Channel()
    assert resolve(["b.q"], quant[:1]) == Dense()


def test_a_format_without_an_expert_path_says_so() -> None:
    with pytest.raises(TypeError, match="format fp8 has no MoE path; leave the experts out of the quant plan"):
        logits((("*.experts.*", Fp8Channel()),))


def test_dense_formats() -> None:
    with pytest.raises(ValueError, match=r"Dense: dtype is torch\.int8"):
        Dense(torch.int8)
    spec = Linear(D, (Part("x", 8),))
    state = {"x.weight": torch.randn(8, D)}
    x = torch.randn(3, D)
    want = torch.nn.functional.linear(x.bfloat16(), state["x.weight"].bfloat16())
    assert torch.equal(bind(spec, state, quant=[("*", Dense(torch.bfloat16))])(x), want.float())
    assert torch.equal(bind(spec, state, dtype=torch.bfloat16)(x.bfloat16()), want)
    assert bind(spec, state, quant=[("x", Dense(torch.float32))], dtype=torch.bfloat16).weight.dtype == torch.float32


def test_explain_counts_stored_bytes() -> None:
    plain, quantized = (explain(mine(), quant=q) for q in ((), (("lm_head", Fp8Channel()),)))
    assert plain.weight_bytes - quantized.weight_bytes == VOCAB * D * 2 - (VOCAB * D + 4 * VOCAB)
    assert plain.weight_bytes == sum(2 * torch.Size(i.shape).numel() for i in plan(mine())) + 2 * sum(
        torch.Size(i.shape).numel() for i in plan(mine()) if "norm" in i.tensor or i.tensor.endswith("pre.weight")
    )
