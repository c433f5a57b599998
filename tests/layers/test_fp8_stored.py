"""Fp8 by blocks and with given scales of inputs, from plain checkpoints and from those that store e4m3: values are never rounded again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pyllm import ops
from pyllm.layers import MLP, Decoder, Fp8, Linear, MoE, Part, as_stored, bind, fp8
from pyllm.layers.fp8 import quantize_blocks
from pyllm.layers.stored import expand_fp8
from pyllm.plan.explain import explain
from tests.layers.custom import mine, random_state
from tests.layers.test_custom import IDS
from tests.layers.test_fp8 import llama, run
from tests.models.paged import Paged
from tests.support.compare import EPS, assert_close, assert_same
from tests.support.generate import normal

E4M3 = torch.float8_e4m3fn
BLOCK, STATIC = Fp8(granularity="block"), Fp8(activation="static")


def linear(n: int = 48, k: int = 64, **kwargs) -> Linear:
    return Linear(k, (Part("a", n),), **kwargs)


def stored(n: int, k: int, scale: str, name: str = "a") -> dict[str, Tensor]:
    """A product as checkpoints have it. Its largest value is not 448, so that quantizing what it stands for again would change it."""
    weight = normal(n, k).clamp(-3, 3).to(E4M3)
    shape = {"tensor": (), "one": (1,), "channel": (n, 1), "vector": (n,), "block": (-(-n // 128), -(-k // 128)),
             "modelopt": (-(-n // 128), 1, -(-k // 128), 1)}[scale]  # fmt: skip
    suffix = "weight_scale_inv" if scale == "block" else "weight_scale"
    return {f"{name}.weight": weight, f"{name}.{suffix}": torch.rand(shape) * 0.1 + 0.01}


def plain(state: dict[str, Tensor], name: str = "a") -> Tensor:
    scale = next(n for n in (f"{name}.weight_scale_inv", f"{name}.weight_scale") if n in state)
    return expand_fp8(f"{name}.weight", scale, state[f"{name}.weight"], state[scale])


@pytest.mark.parametrize("shape", [(48, 64), (128, 128), (272, 400), (576, 1536), (16, 16)])
def test_blocks_of_a_plain_weight(shape: tuple[int, int]) -> None:
    """Each block on its own, against a loop: the scale takes its largest value to 448, each value is rounded once."""
    weight = normal(*shape) * torch.logspace(-3, 3, shape[0])[:, None]
    q, scale = quantize_blocks(weight)
    assert q.shape == weight.shape and q.is_contiguous() and scale.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            want = weight[at].abs().max() / 448
            assert scale[i, j] == want
            assert_same(q[at].view(torch.uint8), (weight[at] * (1 / want)).clamp(-448, 448).to(E4M3).view(torch.uint8))
    assert quantize_blocks(torch.zeros(32, 32))[0].float().eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(48, 64), (272, 400)])
def test_a_product_by_blocks_is_the_two_ops(shape: tuple[int, int], dtype: torch.dtype) -> None:
    state = {"a.weight": normal(*shape), "a.bias": normal(shape[0])}
    m, x = bind(linear(*shape, bias=True), state, quant=[("*", BLOCK)], dtype=dtype), normal(5, shape[1]).to(dtype)
    half = torch.bfloat16 if dtype == torch.float32 else dtype
    (q, s), (w, ws) = ops.quantize_fp8(x, "group"), quantize_blocks(state["a.weight"])
    assert_same(m(x), ops.linear_fp8(q, w, s, ws, state["a.bias"].to(dtype).to(half), half).to(dtype))
    # Each operand is rounded once: 2^-4 of a value, or half the smallest step, 2^-10 of the scale of its block, which is at most a 448th of
    # the largest value of the whole.
    u, tiny = EPS[E4M3], 2.0**-10 / 448
    xe, we = (t.abs() * u + t.abs().max() * tiny for t in (x.double(), state["a.weight"].double()))
    exact, magnitude = x.double() @ state["a.weight"].double().T, state["a.weight"].double().abs()
    bound = xe @ magnitude.T + x.double().abs() @ we.T + xe @ we.T
    bias = state["a.bias"].to(dtype).to(half).double()
    assert_close(m(x), exact + bias, atol=bound + 2 * EPS[half] * (exact.abs() + bias.abs() + bound) + 1e-6)


@pytest.mark.parametrize("scale", ["tensor", "one", "channel", "vector", "block", "modelopt"])
def test_stored_values_are_kept(scale: str) -> None:
    """The bits that the checkpoint has, and its scales; in the model's dtype the same tensor is expanded."""
    n, k = 272, 400
    state = stored(n, k, scale)
    fmt = BLOCK if scale in ("block", "modelopt") else Fp8()
    assert as_stored(linear(n, k), state) == (("a", fmt),)
    m = bind(linear(n, k), state, quant=[("*", fmt)])
    assert_same(m.weight.view(torch.uint8), state["a.weight"].view(torch.uint8))
    wide = m.weight_scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] if fmt is BLOCK else m.weight_scale[:, None]
    assert m.weight_scale.dtype == torch.float32 and m.weight_scale.shape == ((3, 4) if fmt is BLOCK else (n,))
    assert_same(m.weight.float() * wide, plain(state))
    assert_same(bind(linear(n, k), state).weight, plain(state))


def test_another_granularity_than_the_stored_one_quantizes_anew() -> None:
    state = stored(272, 400, "block")
    m = bind(linear(272, 400), state, quant=[("*", Fp8())])
    assert_same(m.weight_scale, plain(state).abs().amax(1) / 448)
    by_blocks = bind(linear(272, 400), stored(272, 400, "channel"), quant=[("*", BLOCK)])
    assert by_blocks.weight_scale.shape == (3, 4)


def fused(**kwargs) -> Linear:
    return Linear(256, (Part("q", 256, unit=128), Part("k", 128, unit=128), Part("v", 128, unit=128)), "col", **kwargs)


def expanded(m) -> Tensor:
    """What a bound product multiplies, in fp32."""
    if m.weight_scale.dim() == 1:
        return m.weight.float() * m.weight_scale[:, None]
    wide = m.weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return m.weight.float() * wide[: m.weight.shape[0], : m.weight.shape[1]]


@pytest.mark.parametrize("scale", ["tensor", "channel", "block"])
def test_parts_and_ranks_of_stored_products(scale: str) -> None:
    """Stacked parts keep a scale each; a rank has the rows (and the columns) that it has of the plain tensor."""
    sizes = {"q": 256, "k": 128, "v": 128}
    state = {k: t for name, n in sizes.items() for k, t in stored(n, 256, scale, name).items()} | stored(128, 512, scale, "o")
    plan, x = as_stored(fused(), state), normal(3, 256)
    assert {n for n, _ in plan} == set(sizes)
    m = bind(fused(), state, quant=plan, strict=False)
    assert_same(expanded(m), torch.cat([plain(state, n) for n in sizes]))
    q = Linear(256, (Part("q", 256, unit=128),), "col")
    halves = [bind(q, state, quant=plan[:1], rank=r, tp=2, strict=False) for r in (0, 1)]
    assert_same(torch.cat([h(x) for h in halves], 1), m(x)[:, :256])
    down = Linear(512, (Part("o", 128),), "row")
    parts = [bind(down, state, quant=as_stored(down, state), rank=r, tp=2, strict=False) for r in (0, 1)]
    assert_same(torch.cat([expanded(p) for p in parts], 1), plain(state, "o"))


def test_ragged_blocks_of_the_last_part() -> None:
    """Rows that end inside a block: of the last part alone, as in low-rank projections of 512 + 64 rows."""
    state = stored(256, 128, "block", "q") | stored(80, 128, "block", "k")
    parts = (Part("q", 256), Part("k", 80))
    m = bind(Linear(128, parts), state, quant=[("*", BLOCK)])
    assert m.weight_scale.shape == (3, 1)
    wide = m.weight_scale.repeat_interleave(128, 0)[:336]
    assert_same(m.weight.float() * wide, torch.cat([plain(state, "q"), plain(state, "k")]))
    assert {f for _, f in as_stored(Linear(128, parts), state)} == {BLOCK} and as_stored(Linear(128, parts[::-1]), state) == ()
    with pytest.raises(ValueError, match=r"'k.weight_scale_inv' has scales by blocks of 128, but .* rows: 80; expected a multiple"):
        bind(Linear(128, parts[::-1]), state, quant=[("*", BLOCK)])
    with pytest.raises(ValueError, match=r"'a.weight_scale_inv' has scales by blocks of 128, but a rank holds columns: 64"):
        bind(linear(128, 128, tp="row"), stored(128, 128, "block"), quant=[("*", BLOCK)], rank=0, tp=2)
    with pytest.raises(ValueError, match=r"'a.weight_scale_inv' has scales by blocks of 128, but .* rows: 64"):
        bind(linear(128, 128, tp="col"), stored(128, 128, "block"), quant=[("*", BLOCK)], rank=0, tp=2)


BAD = [
    ({"a.weight": torch.full((48, 64), float("nan")).to(E4M3), "a.weight_scale": torch.ones(48)}, "'a.weight' holds 0x7f or 0xff"),
    ({"a.weight": torch.zeros(48, 64), "a.weight_scale": torch.ones(48)}, "'a.weight' is torch.float32, expected float8_e4m3fn"),
    ({"a.weight": torch.zeros(48, 64).to(E4M3), "a.weight_scale": torch.tensor(float("inf"))}, "'a.weight_scale' holds a scale that is no"),
    ({"a.weight": torch.zeros(48, 64, dtype=torch.int8), "a.weight_scale": torch.ones(7)}, "'a.weight' is torch.int8"),
    (
        {"a.weight": torch.zeros(48, 64).to(E4M3), "a.weight_scale": torch.ones(7)},
        r"'a.weight_scale' is torch.float32 \(7,\), expected floats",
    ),
]


@pytest.mark.parametrize(("state", "message"), BAD)
def test_bad_tensors_are_named(state: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=f"checkpoint tensor {message}"):
        bind(linear(), state, quant=[("*", Fp8())])


def test_a_given_scale() -> None:
    """Of x: the static op; values past 448 scales are clamped. From a plain weight, and from a stored one with the scale of each part."""
    state = {"a.weight": normal(48, 64), "a.input_scale": torch.tensor(0.002)}
    m, x = bind(linear(), state, quant=[("*", STATIC)]), normal(5, 64)
    w, ws = ops.quantize_fp8(state["a.weight"], "token")
    q, s = ops.quantize_fp8(x, "static", torch.tensor([0.002]))
    assert q.float().abs().max() == 448
    assert_same(m(x), ops.linear_fp8(q, w, s, ws).float())
    state = stored(256, 256, "tensor", "q") | stored(128, 256, "tensor", "k") | stored(128, 256, "tensor", "v")
    given = {"q.input_scale": torch.tensor([0.01]), "k.input_scale": torch.tensor(0.03), "v.input_scale": torch.tensor(0.02)}
    plan = as_stored(fused(), state | given)
    assert {fmt for _, fmt in plan} == {STATIC}
    assert bind(fused(), state | given, quant=plan).input_scale.tolist() == [pytest.approx(0.03)]
    assert as_stored(fused(), state | {"q.input_scale": torch.tensor(1.0)})[0][1] == Fp8()
    # Where the scale is not used it is not in the way either.
    for fmt in (Fp8(), None):
        assert not hasattr(bind(fused(), state | given, quant=[("*", fmt)] if fmt else ()), "input_scale")


def test_what_static_needs_is_named() -> None:
    with pytest.raises(ValueError, match="Fp8: activation is 'static', but checkpoint has no tensor 'a.input_scale'"):
        bind(linear(), {"a.weight": normal(48, 64)}, quant=[("*", STATIC)])
    for bad in (torch.ones(2), torch.tensor(0.0), torch.tensor(float("nan")), torch.ones((), dtype=torch.int32)):
        with pytest.raises(ValueError, match="checkpoint tensor 'a.input_scale' is .*, expected one scale, finite and positive"):
            bind(linear(), {"a.weight": normal(48, 64), "a.input_scale": bad}, quant=[("*", STATIC)])


def test_formats_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="Fp8: granularity is 'row', expected 'channel' or 'block'"):
        Fp8(granularity="row")
    with pytest.raises(ValueError, match="Fp8: activation is 'tensor', expected 'token' or 'static'"):
        Fp8(activation="tensor")
    with pytest.raises(ValueError, match="Fp8: activation is 'static', expected 'token' with granularity 'block'"):
        Fp8("block", "static")
    moe = MoE("moe", 64, 96, 4, 2)
    for fmt in (BLOCK, STATIC):
        with pytest.raises(ValueError, match=rf"moe.experts.0.gate_proj: format {fmt.name} has no MoE path; expected Fp8\(\) or None"):
            bind(moe, random_state(moe), quant=[("*.experts.*", fmt)])
    with pytest.raises(ValueError, match=r"a is \[40, 64\], which fp8-block does not multiply; expected multiples of 16"):
        bind(linear(40), {"a.weight": normal(40, 64)}, quant=[("*", BLOCK)])


def test_blocks_have_no_invariant_product() -> None:
    from pyllm.layers.invariant import check_invariant

    check_invariant(linear(), [("*", STATIC)], torch.bfloat16)
    with pytest.raises(ValueError, match="invariant=True is not served on CUDA for .*: the format fp8-block has no such product"):
        check_invariant(linear(), [("*", BLOCK)], torch.bfloat16)


def with_scales(spec: Decoder, scale: float) -> dict[str, Tensor]:
    """A plain checkpoint that has a scale for the input of each product, most values of which it covers."""
    state = random_state(spec)
    names = [n.removesuffix(".weight") for n, t in state.items() if t.dim() == 2 and "embed" not in n]
    return state | {f"{n}.input_scale": torch.tensor(scale) for n in names}


def write_from(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Products of so many rows write e4m3, whatever their size."""
    monkeypatch.setattr(fp8, "WRITE_ROWS", rows)
    monkeypatch.setattr(fp8, "WRITE_TILES", 0)


def ops_of(spec: Decoder, fuse: bool, fmt: Fp8, state: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[str]]:
    return run(spec, fuse, dtype, quant=[("lm_head", None), ("*", fmt)], state=state)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_explain_lists_the_ops_of_given_scales(fuse: bool, write: bool, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the e4m3 in the epilogue nothing stands between the products of an MLP; with a norm ahead nothing before the first."""
    write_from(monkeypatch, len(IDS) if write else 1 << 30)
    spec = llama(gated=gated)
    got, seen = ops_of(spec, fuse, STATIC, with_scales(spec, 0.01))
    rows = explain(spec, context=len(IDS), new=len(IDS), dtype=torch.float32, fuse=fuse, quant=[("lm_head", None), ("*", STATIC)]).rows
    assert seen == [r.op for r in rows if r.op not in ("add", "sample_tokens")]
    if fuse and write:
        assert seen.count("linear_e4m3") == 2 and seen.count("quantize_fp8") == 2  # of the attention's output
        at = seen.index("linear_e4m3")
        assert seen[at - 1 : at + 2] == ["layer_norm", "linear_e4m3", "linear_fp8"]
    elif fuse:
        assert seen.count("act_mul_fp8_static") == (2 if gated else 0) and seen.count("quantize_fp8") == (2 if gated else 4)
    assert got.isfinite().all()


def test_given_scales_fused_are_those_unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 but for the product's rounding to bf16, which the epilogue that writes e4m3 leaves out: 2^-9 ahead of e4m3's 2^-4."""
    spec = llama()
    state = with_scales(spec, 0.01)
    write_from(monkeypatch, 1 << 30)
    fused_, separate = (ops_of(spec, fuse, STATIC, state)[0] for fuse in (True, False))
    assert_same(fused_, separate)
    write_from(monkeypatch, 1)
    written = ops_of(spec, True, STATIC, state)[0]
    assert 0 < (written - separate).norm() < 0.05 * separate.norm()


@pytest.mark.parametrize("fmt", [BLOCK, STATIC])
def test_a_whole_model_moves_by_two_roundings(fmt: Fp8) -> None:
    spec = llama()
    state = with_scales(spec, 0.01)
    exact = bind(spec, state, strict=False)(Paged(spec, 1, len(IDS)).step([IDS]))
    moved = (ops_of(spec, True, fmt, state)[0] - exact).norm() / exact.norm()
    assert 1e-4 < moved < 0.2


def test_explain_of_blocks() -> None:
    """A quantizing op ahead of each product; the bytes are the weights', a byte each, and their scales."""
    spec, plan = llama(), [("lm_head", None), ("*", BLOCK)]
    rows = explain(spec, context=len(IDS), new=len(IDS), dtype=torch.float32, quant=plan).rows
    assert run(spec, True, quant=plan)[1] == [r.op for r in rows if r.op not in ("add", "sample_tokens")]
    products = [i for i, r in enumerate(rows) if r.op == "linear_fp8"]
    assert len(products) == 8 and all(rows[i - 1].op == "quantize_fp8" and rows[i].format == "fp8-block" for i in products)
    assert BLOCK.weight_bytes(576, 1536) == 576 * 1536 + 4 * 5 * 12


def test_one_kernel_does_not_take_them() -> None:
    from pyllm.layers.recognise import not_served

    spec = llama()
    for fmt in (BLOCK, STATIC):
        reason = not_served(spec, lambda *_, fmt=fmt: fmt, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
        assert reason is not None


def test_rows_on_the_device_agree_with_invariant() -> None:
    """`bind(invariant=True)` changes nothing on a CPU, with one scale for all rows too."""
    state, x = {"a.weight": normal(48, 64), "a.input_scale": torch.tensor([0.02])}, normal(5, 64)
    assert_same(*(bind(linear(), state, quant=[("*", STATIC)], invariant=i)(x) for i in (True, False)))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 20, 300, 1100])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("fmt", [BLOCK, STATIC])
def test_an_mlp_on_the_gpu(fmt: Fp8, gated: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the same format on a CPU, in fp32 but for the products' results. The hidden values are rounded to e4m3 (2^-4 of each, at
    random) from sums that differ by a bf16 rounding at most, so few of them take another step."""
    write_from(monkeypatch, 128)
    spec = MLP("mlp", 256, 448, gated=gated, act="silu" if gated else "relu2")
    state = {name: normal(*t.shape) * 0.06 for name, t in random_state(spec).items()}
    state |= {f"{name.removesuffix('.weight')}.input_scale": torch.tensor(0.01) for name in list(state)} if fmt is STATIC else {}
    x = normal(rows, 256, dtype=torch.bfloat16)
    want = bind(spec, state, quant=[("*", fmt)], dtype=torch.bfloat16, fuse=False)(x, None).double()
    bound = bind(spec, state, quant=[("*", fmt)], device="cuda", dtype=torch.bfloat16)
    got = bound(x.cuda(), None).cpu().double()
    assert (got - want).norm() / want.norm() < 2.0**-5


def save(path: Path, config: dict, state: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous() for name, t in state.items()}, path / "model.safetensors")


CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64, "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 64, "hidden_act": "silu", "rope_theta": 1e4}  # fmt: skip
METHODS = {
    "block": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    "channel": {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}},
}  # fmt: skip


@pytest.mark.parametrize("kind", METHODS)
def test_a_checkpoint_as_it_is_stored(kind: str, tmp_path: Path) -> None:
    """A directory as it is published, through the loader: whole, with nothing left over, and its logits close to the expanded model's."""
    from pyllm.api.model import load_parts
    from pyllm.layers.fp8 import Fp8 as Format
    from pyllm.load.checkpoint import open_checkpoint
    from pyllm.load.fit import misfit
    from pyllm.models import spec_from_config

    config = CONFIG | {"quantization_config": METHODS[kind]}
    spec = spec_from_config(config)
    state = random_state(spec)
    for name in [n for n in state if n.endswith("_proj.weight")]:
        short, value = name.removesuffix(".weight"), state.pop(name)
        made = stored(*value.shape, kind, short)
        scale = next(n for n in made if "scale" in n)
        made[scale] = made[scale] * 0 + value.abs().max() / 400
        made[name] = (value / (value.abs().max() / 400)).to(E4M3)
        state |= made | ({f"{short}.input_scale": torch.tensor(0.02)} if kind == "tensor" else {})
    save(tmp_path / "model", config, state)
    assert misfit(spec, open_checkpoint(tmp_path / "model").tensors) is None
    want = {"block": BLOCK, "modelopt": BLOCK, "tensor": STATIC, "channel": Format()}[kind]
    modules = [load_parts(tmp_path / "model", device="cpu", quant="stored", progress=False).module]
    with pytest.warns(UserWarning, match="model: 14 weights are stored in FP8 and expanded to torch.float32; quant='stored' takes them"):
        modules.append(load_parts(tmp_path / "model", device="cpu", progress=False).module)
    formats = {m.format for m in modules[0].modules() if hasattr(m, "format") and m is not modules[0].head}
    assert formats == {want}
    quantized, exact = (m(Paged(spec, 1, len(IDS)).step([IDS])) for m in modules)
    assert 1e-4 < (quantized - exact).norm() / exact.norm() < 0.2


def test_the_plan_leaves_out_what_is_plain() -> None:
    assert as_stored(mine(), random_state(mine())) == ()
