"""decode_step against the ops that it replaces: the bound model, run layer by layer, which is tested against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyllm import ops
from pyllm.layers.one_kernel import step_model
from pyllm.ops.step import step_workspace
from pyllm.ops.step_checks import most_rows, workspace_bytes
from tests.step.cases import BF16, FORMATS, MODELS, arguments, assert_near, bound, copied, declare, decode_batch, exact
from tests.support.compare import assert_same

LENS = {1: [70], 2: [64, 1], 3: [65, 33, 1], 4: [1, 128, 63, 200]}


def made(name: str = "llama", formats: str = "bf16", lens: list[int] | None = None) -> tuple[Any, Any, dict[str, Any]]:
    spec = declare(name)
    module = bound(spec, formats)
    batch = decode_batch(spec, lens or LENS[2], FORMATS[formats][1])
    model = step_model(module)
    return module, batch, arguments(spec, batch, model, step_workspace(model, 4))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", LENS)
def test_the_reference_is_the_chain(name: str, rows: int) -> None:
    module, batch, given = made(name, lens=LENS[rows])
    other = copied(batch)
    want = module(other)
    assert_same(ops.decode_step(**given), want, "logits")
    for slot, cache in batch.caches.items():
        assert_same(cache.k, other.caches[slot].k, f"k_caches[{slot}]")
        assert_same(cache.v, other.caches[slot].v, f"v_caches[{slot}]")
    assert want.isfinite().all()


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_reference_is_the_chain_in_every_format(name: str, formats: str) -> None:
    module, batch, given = made(name, formats, LENS[4])
    other = copied(batch)
    assert_same(ops.decode_step(**given), module(other), "logits")
    for slot, cache in batch.caches.items():
        assert_same(cache.k, other.caches[slot].k, f"k_caches[{slot}]")


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_against_fp64(name: str, formats: str) -> None:
    _, _, given = made(name, formats, LENS[4])
    want = exact(given)
    assert_near(ops.decode_step(**given), want, len(given["model"].qkv), formats)


def test_a_row_without_a_sequence_stores_nothing_and_changes_no_other_row() -> None:
    _, batch, given = made(lens=[0, 65])
    before = [k.clone() for k in given["k_caches"]]
    both = ops.decode_step(**given)
    changed = [
        (k.view(torch.int16) != b.view(torch.int16)).flatten(2).any(-1).nonzero() for k, b in zip(given["k_caches"], before, strict=True)
    ]
    at = int(batch.slots[1])
    assert all(c.tolist() == [[at // 64, at % 64]] for c in changed)
    alone = {n: given[n][1:] for n in ("ids", "slots", "kv_lens", "page_table", "rope_rows")}
    # F.linear on a CPU may sum in another order for other M: three layers of 8 roundings to bf16 (2^-8 each) on logits of about 1
    assert (ops.decode_step(**given | alone)[0].float() - both[1].float()).abs().max() <= 24 * 2.0**-8 * both[1].float().abs().max()


def test_opcheck() -> None:
    _, _, given = made("qwen3")
    seen: list[Any] = []

    class Take(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.pyllm.decode_step.default:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Take():
        ops.decode_step(**given)
    torch.library.opcheck(torch.ops.pyllm.decode_step.default, seen[0])


WRONG: dict[str, tuple[str, Any, str]] = {
    "no rows": ("ids", lambda t: t[:0], r"ids \.size\(0\) is 0, expected 1 to 4"),
    "ids int64": ("ids", lambda t: t.long(), "ids is int64, expected int32"),
    "slots": ("slots", lambda t: t[:1], r"slots \.size\(0\) is 1, expected M=2"),
    "kv_lens": ("kv_lens", lambda t: t[:, None], "kv_lens has 2 dimensions, expected 1"),
    "rope_rows": ("rope_rows", lambda t: t.float(), "rope_rows is float32, expected int32"),
    "page_table": ("page_table", lambda t: torch.stack([t.repeat(1, 2)] * 2, -1)[..., 0], r"page_table \.stride\(1\) is 2, expected 1"),
    "cos_sin": ("cos_sin", lambda t: t[:, :3].contiguous(), r"cos_sin \.size\(1\) is 3, expected an even number from 2 to D=64"),
    "caches": ("k_caches", lambda t: t[:2], "k_caches has 2 tensors, expected 3"),
    "cache": ("v_caches", lambda t: [*t[:2], t[2].half()], r"v_caches\[2\] is float16, expected bfloat16"),
    "page": ("k_caches", lambda t: [t[0][:, :24], *t[1:]], r"k_caches\[0\] \.size\(1\) is 24, expected a multiple of 16"),
    "pages": ("v_caches", lambda t: [t[0][1:], *t[1:]], r"v_caches\[0\] has pages, P and stride .*, expected .* like k_caches\[0\]"),
    "scale": ("k_scale", lambda t: [torch.ones(1)], "k_scale has 1 tensors, expected 3"),
    "workspace": ("workspace", lambda t: t[:100], "workspace has 100 bytes, expected at least"),
}
MODEL: dict[str, tuple[dict[str, Any], str]] = {
    "act": ({"act": "tanh"}, "act is 'tanh', expected one of silu, gelu, gelu_tanh, relu2"),
    "eps": ({"eps": -1.0}, "eps is -1, expected >= 0"),
    "heads": ({"heads": 3}, "heads is 3, expected 1 to 8 for each of kv_heads=2"),
    "head_dim": ({"head_dim": 32}, "head_dim is 32, expected one of 64, 128"),
    "norms": ({"attn_norm": ()}, "attn_norm has 0 tensors, expected 3"),
    "k_norm": ({"k_norm": [torch.ones(64)] * 2}, "k_norm has 2 tensors, expected 3"),
    "weights": ({"up": [torch.zeros(384, 64, dtype=BF16)] * 3}, r"up\[0\] \.size\(1\) is 64, expected d=128"),
    "scales": ({"o_scale": [torch.ones(128)] * 3}, "o_scale has 3 tensors, expected 0"),
    "norm": ({"norm": torch.ones(128, dtype=BF16)}, "norm is bfloat16, expected float32"),
    "ffn": ({"up": [torch.zeros(60, 128, dtype=BF16)] * 3}, "F is 30, expected a multiple of 64"),
}


def test_sizes_whose_rows_fill_the_shared_memory() -> None:
    """x takes 2 F bytes a row and a gap; 84,752 bytes are for the weights and pointers to them, 1,024 for a row's sums."""
    assert [most_rows(4096, ffn, 32, 8, 128) for ffn in (14336, 17856, 17920, 24064, 24128, 32768)] == [4, 4, 3, 3, 2, 2]


def test_workspaces() -> None:
    """Llama 3.1 8B, 4 rows: two sets of 2 * (6144 + 4096 + 8192 + 14336) bytes a row and layer, 256 pieces of attention of 4 heads."""
    rows = 2 * (6144 + 4096 + 8192 + 14336)
    assert workspace_bytes(4, 32, 4096, 32, 8, 128, 14336) == 9216 + 256 * 4 * 130 * 8 + 2 * 4 * 32 * rows


@pytest.mark.parametrize("case", WRONG)
def test_arguments_that_do_not_fit(case: str) -> None:
    name, change, message = WRONG[case]
    given = made()[2]
    with pytest.raises(ValueError, match=f"^decode_step: {message}"):
        ops.decode_step(**given | {name: change(given[name])})


@pytest.mark.parametrize("case", MODEL)
def test_models_that_do_not_fit(case: str) -> None:
    changes, message = MODEL[case]
    given = made()[2]
    with pytest.raises(ValueError, match=f"^decode_step: {message}"):
        ops.decode_step(**given | {"model": replace(given["model"], **changes)})
