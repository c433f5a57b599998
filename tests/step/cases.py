"""Small random models that one kernel serves, bound in bf16, and decode steps over their paged caches."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.layers import Bound, Decoder, Fp8, bind
from pyllm.layers.one_kernel import alike
from pyllm.models import spec_from_config
from pyllm.ops.fused import ACTS, activation
from pyllm.ops.rope import rotate
from pyllm.ops.step import StepModel
from pyllm.runtime.batch import Batch, KvCache
from tests.models.paged import Paged
from tests.support.generate import normal, poison

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 264, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "head-dim-128": {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
    "mha": {"num_key_value_heads": 4},
    "group-8": {"num_attention_heads": 8, "num_key_value_heads": 1},
    "group-3": {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    "group-5": {"hidden_size": 320, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 128},
    "group-7": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "rope-half": {"partial_rotary_factor": 0.5},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
}
FORMATS: dict[str, tuple[Any, torch.dtype]] = {
    "bf16": ((), BF16),
    "fp8": ((("*lm_head", None), ("*", Fp8())), BF16),
    "fp8-cache": ((), E4M3),
    "fp8-both": ((("*lm_head", None), ("*", Fp8())), E4M3),
}


def declare(name: str, **changes: Any) -> Decoder:
    return spec_from_config(SMALL | MODELS[name] | changes)


def shape(name: str, **changes: Any) -> Decoder:
    """A published size, as `pyllm bench` names it."""
    return spec_from_config(SHAPES[name] | changes)


class Weights(DummyWeights):
    """Random vectors too (norms about 1, biases), so that none of them can be left out."""

    def __getitem__(self, name: str) -> Tensor:
        t = super().__getitem__(name)
        if t.dim() > 1:
            return t
        near = 0.0 if name.endswith("bias") else 1.0
        return (near + normal(len(t), scale=0.2, seed=zlib.crc32(name.encode()))).to(t.device)


def bound(spec: Decoder, formats: str = "bf16", device: str = "cpu", fuse: bool = True) -> Bound:
    return bind(spec, Weights(spec, device, BF16), quant=FORMATS[formats][0], device=device, dtype=BF16, fuse=fuse)


def decode_batch(spec: Decoder, lens: list[int], kv_dtype: torch.dtype, *, page: int = 64, device: str = "cpu", seed: int = 0) -> Batch:
    """One token of each sequence, which then has so many keys; what no key occupies is NaN, 0 keys: a row that is stored nowhere."""
    paged = Paged(spec, len(lens), max([*lens, 1]), page=page, dtype=BF16, device=device, seed=seed)
    paged.lens = [max(n - 1, 0) for n in lens]
    ids = torch.randint(0, spec.vocab_size, (len(lens),), generator=torch.Generator().manual_seed(seed))
    batch = paged.step([t[None] for t in ids])
    idle = torch.tensor([n == 0 for n in lens], device=device)
    caches = {slot: _filled(cache, paged, lens, kv_dtype, seed + slot) for slot, cache in paged.caches.items()}
    return replace(batch, caches=caches, max_q=1, kv_lens=torch.where(idle, 0, batch.kv_lens), slots=torch.where(idle, -1, batch.slots))


def _filled(cache: KvCache, paged: Paged, lens: list[int], dtype: torch.dtype, seed: int) -> KvCache:
    pair = []
    for offset, like in enumerate((cache.k, cache.v)):
        t = poison(torch.empty(like.shape, dtype=dtype, device=like.device))
        for i, n in enumerate(lens):
            at = torch.arange(max(n - 1, 0))
            slots = (paged.table[i][at // paged.page] * paged.page + at % paged.page).long().to(like.device)
            values = normal(len(at), *like.shape[2:], dtype=dtype, device=like.device, seed=1000 * seed + 2 * i + offset)
            t.view(torch.uint8 if dtype == E4M3 else dtype).flatten(0, 1)[slots] = values.view(torch.uint8) if dtype == E4M3 else values
        pair.append(t)
    if dtype != E4M3:
        return KvCache(*pair)
    scales = (torch.tensor([0.5 + seed % 3], device=like.device), torch.full(like.shape[2:3], 1.25, device=like.device))
    return KvCache(*pair, *scales)


def copied(batch: Batch) -> Batch:
    """The same step over caches of its own."""
    caches = {slot: replace(c, k=c.k.clone(), v=c.v.clone()) for slot, c in batch.caches.items()}
    return replace(batch, caches=caches, _rope={}, _paged={})


def arguments(spec: Decoder, batch: Batch, model: StepModel, workspace: Tensor) -> dict[str, Any]:
    """Of `ops.decode_step`."""
    caches = [batch.caches[attn.kv] for _, attn in spec.attns()]
    cos_sin, rows = batch.rope(spec.attns()[0][1].rope)  # type: ignore[arg-type]
    return {
        "model": model, "ids": batch.ids, "slots": batch.slots, "kv_lens": batch.kv_lens, "page_table": batch.page_table,
        "cos_sin": cos_sin, "rope_rows": rows, "k_caches": [c.k for c in caches], "v_caches": [c.v for c in caches],
        "workspace": workspace, "k_scale": alike([c.k_scale for c in caches]), "v_scale": alike([c.v_scale for c in caches]),
    }  # fmt: skip


def exact(given: dict[str, Any]) -> Tensor:
    """`decode_step` in fp64 without a rounding, of the same weights, caches and tokens; the caches stay as they are."""
    m: StepModel = given["model"]

    def weight(name: str, i: int) -> Tensor:
        w, scale = getattr(m, name)[i].double(), getattr(m, f"{name}_scale")
        return w * scale[i].double()[:, None] if scale else w

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps) * w.double()

    h = m.embed[given["ids"].long()].double()
    for i in range(len(m.qkv)):
        qkv = norm(h, m.attn_norm[i]) @ weight("qkv", i).T + (m.qkv_bias[i].double() if m.qkv_bias else 0.0)
        q, k, v = qkv.unflatten(1, (-1, m.head_dim)).split([m.heads, m.kv_heads, m.kv_heads], 1)
        q, k = (norm(q, m.q_norm[i]), norm(k, m.k_norm[i])) if m.q_norm else (q, k)
        q, k = (rotate(t, given["cos_sin"], given["rope_rows"], False) for t in (q, k))
        h = h + torch.stack([_attend(given, i, row, q[row], k[row], v[row]) for row in range(len(h))]) @ weight("o", i).T
        gate, up = (norm(h, m.mlp_norm[i]) @ weight("up", i).T).chunk(2, -1)
        h = h + (activation(gate, ACTS[m.act]) * up) @ weight("down", i).T
    return norm(h, m.norm) @ m.head.double().T


def assert_near(got: Tensor, want: Tensor, layers: int, formats: str) -> None:
    """Logits of a step against `exact`, row by row.

    Nine tensors of a layer are rounded to bf16, each element by 2^-8 of itself at most, and the logits; the inputs of four products to
    e4m3 with e4m3 weights, by 2^-4, and so are keys and values of an e4m3 cache. What is added to the residual stream has about the
    stream's size here, so a row is off by the sum of all these times its largest logit, if all roundings point one way; the mean square
    adds as if they were independent.
    """
    coarse = 4 * (FORMATS[formats][0] != ()) + 2 * (FORMATS[formats][1] == E4M3)
    most, square = ((9 * layers + 1) * u(8) + layers * coarse * u(4) for u in (lambda n: 2.0**-n, lambda n: 4.0**-n))
    error = (got.double() - want).abs()
    assert (error.amax(-1) <= most * want.abs().amax(-1)).all(), (error.amax(-1) / want.abs().amax(-1)).tolist()
    mean = error.square().mean(-1) / want.square().mean(-1)
    assert (mean <= square).all(), f"mean square error of rows {mean.tolist()}, at most {square}"


def _attend(given: dict[str, Any], i: int, row: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One row's attention `[H * D]` over its cached keys and its own."""
    m, n = given["model"], int(given["kv_lens"][row])
    if n == 0:
        return torch.zeros_like(q).flatten()
    page = given["k_caches"][i].shape[1]
    own = []
    for name, new in (("k", k), ("v", v)):
        pages = given[f"{name}_caches"][i][given["page_table"][row, : -(-n // page)].long()]
        t = pages.flatten(0, 1)[: n - 1].double()
        if given[f"{name}_scale"]:
            t = t * given[f"{name}_scale"][i].double()[:, None]
        own.append(torch.cat([t, new[None]]).repeat_interleave(m.heads // m.kv_heads, 1))
    p = torch.softmax(m.softmax_scale * torch.einsum("hd,nhd->hn", q, own[0]), -1)
    return torch.einsum("hn,nhd->hd", p, own[1]).flatten()
