"""Greedy tokens of our kernels against those of the plain compositions of a CPU: a model of the 8B shape's layers, and SmolLM2.

The GPU generates; a CPU reads the same text (teacher-forced), once in fp32 and once in the GPU's own types. The two CPU runs differ by
what rounding to these types does to a log-probability; kernels round at the same places, in another order, so theirs may differ from fp32
by twice the largest such difference of the text, and by half more than its root mean square (of n differences of one size that varies by 1
/ sqrt(2 n), 7 % of 96). SmolLM2's differences do not have one size: a few places of the text make the largest, and whether roundings meet
there is chance. On a CPU, ten bf16 runs whose norms differ by up to 2^-12 (a sixteenth of bf16's roundoff; it moves fp32 by 0.005) had
largest differences of 0.15 to 0.33 (geometric mean 0.21, logarithms spread by 0.27) and root mean squares of 0.044 to 0.071 (0.15), so one
of them was 2.2 times another. There ten such runs are made, and the GPU's may be 1.5 times their largest difference and 1.3 times their
largest root mean square: by these spreads the largest of ten lies 1.5 deviations above the mean, and the factors are 1.5 and 1.7 more; one
run in a thousand goes beyond three. Where fp32 prefers its first token by more than twice the bound to its second, no rounding within the
bound can make another one the likeliest: there the GPU's token must be that one. In FP8 random weights prefer no token by that much (0.3
is what rounding does, 1.2 would be asked for, of logits that spread by 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from pyllm import LLM, CudaGraphConfig, KvCacheConfig, SamplingParams
from pyllm.api.dummy import SHAPES, DummyWeights
from pyllm.api.model import open_model_files
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
    draws: int
    certain: int = 0
    wrong: int = 0

    @property
    def most(self) -> float:
        """What the largest difference may be."""
        return (2 if self.draws == 1 else 1.5) * self.emulated

    @property
    def good(self) -> bool:
        return self.difference <= self.most and self.rms <= (1.5 if self.draws == 1 else 1.3) * self.emulated_rms and self.wrong == 0


def compare(prompts: list[list[int]], outs: list[Any], exact: list[list[TokenLogprob]], *rounded: list[list[TokenLogprob]]) -> Compared:
    """rounded: runs in the types of `outs`."""
    rows = [
        (out.token_ids[i], out.logprobs[i].logprob, e[len(p) - 1 + i], [r[len(p) - 1 + i] for r in others])
        for p, out, e, *others in zip(prompts, outs, exact, *rounded, strict=True)
        for i in range(len(out.token_ids))
    ]
    assert all({token} == {one.token_id for one in (want, *others)} for token, _, want, others in rows)
    each = np.array([[value - want.logprob for value in (logprob, *(o.logprob for o in others))] for _, logprob, want, others in rows])
    largest, rms = np.abs(each).max(0), np.sqrt(np.square(each).mean(0))
    found = Compared(largest[0].item(), largest[1:].max().item(), rms[0].item(), rms[1:].max().item(), len(rounded))
    for token, _, want, _ in rows:
        (first, best), (_, second) = want.top[:2]
        if best - second > 2 * found.most:
            found.certain += 1
            found.wrong += token != first
    return found


def moved(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The same model within far less than rounding, whose roundings fall otherwise: its norms differ by up to 2^-12."""
    draw = torch.Generator().manual_seed(seed)
    return {n: w * (1 + (2 * torch.rand(w.shape, generator=draw) - 1) * 2**-12) if "norm" in n else w for n, w in weights.items()}


def compared(model: Any, device: str, dtype: str, prompts: list[list[int]], draws: int = 1, **options: Any) -> Compared:
    outs = run(model, device, dtype, prompts, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0), **options)
    texts = [p + out.token_ids for p, out in zip(prompts, outs, strict=True)]
    more = [read(model, dtype, texts, **options | {"weights": moved(options["weights"], seed)}) for seed in range(1, draws)]
    found = compare(prompts, outs, read(model, "fp32", texts, **options), read(model, dtype, texts, **options), *more)
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
    file = open_model_files(path)
    weights = {name: file.tensors[name].float() for name in file.tensors}
    found = compared(spec_from_config(file.config), "cuda", "bf16", prompts, draws=10, weights=weights)
    assert found.good, found
    assert found.certain >= len(prompts) * NEW // 8, found  # a CPU draw in the place of the GPU had 18 of 72 certain


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
