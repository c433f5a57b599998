"""transformers as the oracle: tiny random models of any architecture it knows, and what a declaration must reproduce of them."""

from __future__ import annotations

from typing import Any

import torch

from pyllm.layers import bind, plan
from pyllm.models import spec_from_config
from tests.models.paged import Paged

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SIZES |= {"num_hidden_layers": 4, "vocab_size": 73, "max_position_embeddings": 256}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LENGTHS = (1, 15, 16, 17, 33, 70)  # around pages of 16

Made = tuple[Any, dict[str, Any], dict[str, torch.Tensor]]


def make(name: str, kind: str, changes: dict[str, Any]) -> Made:
    """A `{kind}ForCausalLM` with random weights and biases, its config as a dict, its tensors as a checkpoint would name them."""
    import transformers

    torch.manual_seed(sum(map(ord, name)))
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes), attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3 if p.dim() > 1 else 0.5)
    head = [k for k in model.state_dict() if k in ("lm_head.weight", "embed_out.weight")]
    tied = getattr(config, "tie_word_embeddings", False)
    state = {k: v for k, v in model.state_dict().items() if not (tied and k in head)}
    return model, config.to_dict() | {"architectures": [f"{kind}ForCausalLM"]}, state


def expected(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None], use_cache=False).logits[0]


def assert_logits(got: torch.Tensor, want: torch.Tensor) -> None:
    error, limit = (got - want).abs().max().item(), 1e-4 * want.abs().max().item()
    assert error <= limit, f"max |difference| {error:.2e} > {limit:.2e}"


def check_prefill(made: Made, length: int) -> None:
    """One pass over `length` tokens; the plan names exactly the checkpoint."""
    model, config, state = made
    spec = spec_from_config(config)
    assert sorted(s for i in plan(spec) for s in i.sources) == sorted(state)
    ids = torch.randint(0, config["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))
    assert_logits(bind(spec, state)(Paged(spec, 1, length).step([ids])), expected(model, ids))


def check_ragged_chunks_and_decode(made: Made) -> None:
    """Three sequences in one batch: chunks, single tokens and pauses; every row must equal the full pass of its own sequence."""
    model, config, state = made
    spec = spec_from_config(config)
    bound, generator, lengths = bind(spec, state), torch.Generator().manual_seed(3), (18, 5, 33)
    texts = [torch.randint(0, config["vocab_size"], (n,), generator=generator) for n in lengths]
    want = [expected(model, t) for t in texts]
    pages, at, rows = Paged(spec, len(texts), max(lengths)), [0, 0, 0], [[], [], []]
    for chunk in ([15, 1, 0], [1, 1, 16], [1, 0, 1], [0, 3, 15], [1, 0, 1]):
        batch = pages.step([t[a : a + n] for t, a, n in zip(texts, at, chunk, strict=True)])
        parts = bound(batch).split(chunk)
        for i, n in enumerate(chunk):
            at[i] += n
            rows[i].append(parts[i])
    assert tuple(at) == lengths
    for got, w in zip(rows, want, strict=True):
        assert_logits(torch.cat(got), w)


def check_two_ranks_and_separate_ops(made: Made) -> None:
    """Two tensor-parallel ranks, and the ops of every fusion run apart, give the same logits."""
    from tests.layers.test_tensor_parallel import IDS, run_ranks

    _, config, state = made
    spec = spec_from_config(config)
    want, separate = (bind(spec, state, fuse=fuse)(Paged(spec, 1, len(IDS)).step([IDS])) for fuse in (True, False))
    for got in (separate, *run_ranks(spec, state, 2)):
        assert_logits(got, want)
