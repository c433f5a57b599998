"""Greedy tokens of our kernels against those of the plain compositions of a CPU: a model of the 8B shape's layers, and SmolLM2.

The GPU generates; a CPU reads the same text (teacher-forced), once in fp32 and once in the GPU's own types. The two CPU runs differ by what
rounding to these types does to a log-probability; kernels round at the same places, in another order, so theirs may differ from fp32 by
twice the largest such difference of the text, and by half more than its root mean square (of n differences of one size that varies by
1 / sqrt(2 n), 7 % of 96). Where fp32 prefers its first token by more than twice the bound to its second, no rounding within the bound can
make another one the likeliest: there the GPU's token must be that one. In FP8 random weights prefer no token by that much (0.3 is what
rounding does, 1.2 would be asked for, of logits that spread by 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pyllm import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.load.demo import demo_model_path
from pyllm.models import spec_from_config
from pyllm.runtime.request import TokenLogprob
from tools.digest import ROOT

WIDE = {"num_hidden_layers": 2, "vocab_size": 16384, "max_position_embeddings": 2048}  # a head that a CPU multiplies in reasonable time
SMALL = WIDE | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LENGTHS = (1, 5, 63, 130)  # of prompts: one, a few, a page and its neighbours, more than a tile of attention
NEW = 24
COPY = ROOT / "build" / "smollm2.gguf"  # where the package with the demo model cannot be installed


def run(model: Any, device: str, dtype: str, prompts: list[list[int]], params: SamplingParams, **options: Any) -> list[Any]:
    quant = options.pop("quant", ())
    cache = KvCacheConfig(max_tokens=4096, dtype="fp8" if quant else "auto")
    graphs = CudaGraphConfig(batch_sizes=[4], capture_num_tokens=[64])
    with LLM(model, device=device, dtype=dtype, quant=quant, kv_cache_config=cache, cuda_graph_config=graphs, max_seq_len=1024,
             max_batch_size=4, skip_tokenizer_init=True, progress=False, **options) as llm:  # fmt: skip
        return [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]


def read(model: Any, dtype: str, texts: list[list[int]], **options: Any) -> list[list[TokenLogprob]]:
    """What a CPU says of each token of these texts but the first; the two likeliest in its place with it."""
    outs = run(model, "cpu", dtype, texts, SamplingParams(max_tokens=1, prompt_logprobs=2), **options)
    return [out.prompt_logprobs[1:] for out in outs]


@dataclass
class Compared:
    """Over all generated tokens: differences of a log-probability to fp32, the largest and the root mean square, of this run and of the
    CPU's in its types; how many had to be the likeliest token, and how many of these were not."""

    difference: float
    emulated: float
    rms: float
    emulated_rms: float
    certain: int = 0
    wrong: int = 0

    @property
    def good(self) -> bool:
        return self.difference <= 2 * self.emulated and self.rms <= 1.5 * self.emulated_rms and self.wrong == 0


def compare(prompts: list[list[int]], outs: list[Any], exact: list[list[TokenLogprob]], rounded: list[list[TokenLogprob]]) -> Compared:
    rows = [
        (out.token_ids[i], out.logprobs[i].logprob, e[len(p) - 1 + i], r[len(p) - 1 + i])
        for p, out, e, r in zip(prompts, outs, exact, rounded, strict=True)
        for i in range(len(out.token_ids))
    ]
    assert all(token == want.token_id == other.token_id for token, _, want, other in rows)
    each = np.array([(logprob - want.logprob, other.logprob - want.logprob) for _, logprob, want, other in rows])
    found = Compared(*np.abs(each).max(0).tolist(), *np.sqrt(np.square(each).mean(0)).tolist())
    for token, _, want, _ in rows:
        (first, best), (_, second) = want.top[:2]
        if best - second > 2 * (2 * found.emulated):
            found.certain += 1
            found.wrong += token != first
    return found


def compared(model: Any, device: str, dtype: str, prompts: list[list[int]], **options: Any) -> Compared:
    outs = run(model, device, dtype, prompts, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0), **options)
    texts = [p + out.token_ids for p, out in zip(prompts, outs, strict=True)]
    found = compare(prompts, outs, read(model, "fp32", texts, **options), read(model, dtype, texts, **options))
    print(found)
    return found


def random_model(sizes: dict[str, Any], device: str) -> tuple[Any, dict[str, torch.Tensor], list[list[int]]]:
    spec = spec_from_config(SHAPES["llama-3.1-8b"] | sizes)
    made = DummyWeights(spec, device, torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    return spec, {n: made[n].cpu() for n in made}, [torch.randint(0, sizes["vocab_size"], (n,), generator=draw).tolist() for n in LENGTHS]


@pytest.mark.gpu
@pytest.mark.parametrize(("quant", "certain"), [((), len(LENGTHS) * NEW // 4), ("fp8", 0)], ids=["bf16", "fp8"])
def test_a_random_model_of_the_8b_shape_on_a_gpu(quant: Any, certain: int) -> None:
    spec, weights, prompts = random_model(WIDE, "cuda")
    found = compared(spec, "cuda", "bf16", prompts, weights=weights, quant=quant)
    assert found.good, found
    assert found.certain >= certain, found


@pytest.mark.gpu
def test_smollm2_on_a_gpu() -> None:
    try:
        path = COPY if COPY.is_file() else demo_model_path()
    except (FileNotFoundError, ValueError) as error:
        pytest.skip(f"{error}; and there is no {COPY.relative_to(ROOT)}")
    prompts = [[504, 3575, 282, 4649, 314], [6403, 2835, 253, 655, 28], [1604] * 70]
    found = compared(str(path), "cuda", "bf16", prompts)
    assert found.good, found
    assert found.certain >= len(prompts) * NEW // 4, found


def test_the_comparison_itself() -> None:
    """On a CPU: in its own types a run is what it is compared with, and another token or a logit further away is seen."""
    spec, weights, prompts = random_model(SMALL, "cpu")
    outs = run(spec, "cpu", "bf16", prompts, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0), weights=weights)
    texts = [p + out.token_ids for p, out in zip(prompts, outs, strict=True)]
    exact, rounded = (read(spec, dtype, texts, weights=weights) for dtype in ("fp32", "bf16"))
    found = compare(prompts, outs, exact, rounded)
    assert found.good, found
    assert 0 < found.difference < 0.2, found
    assert found.certain > len(LENGTHS) * NEW // 4, found
    far = outs[1].logprobs[3]
    outs[1].logprobs[3] = TokenLogprob(far.token_id, far.logprob + 2.1 * found.emulated + found.difference, 1)
    assert not compare(prompts, outs, exact, rounded).good
    outs[1].logprobs[3] = far
    at = len(prompts[0]) - 1
    said = exact[0][at]
    exact[0][at] = TokenLogprob(said.token_id, said.logprob, 2, ((said.token_id + 1, said.logprob + 9.0), said.top[0]))
    assert compare(prompts, outs, exact, rounded).wrong == 1
