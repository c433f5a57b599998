"""The engines that bench.serving measures: pyllm, vLLM and transformers behind one method `run`, and a model whose output is known
beforehand."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyllm.api.dummy import SHAPES, DummyWeights

if TYPE_CHECKING:
    from torch import Tensor

    from pyllm.runtime.engine import Engine

MODELS = {
    "8b-fp8": ("llama-3.1-8b", "fp8", "fp8"),
    "8b-bf16": ("llama-3.1-8b", None, "auto"),
    "1b-bf16": ("llama-3.2-1b", None, "auto"),
}
"""Name -> shape, quantization, dtype of the KV cache. The head stays in bf16."""
BATCH, CHUNK, LENGTH = 1024, 8192, 2112


class Ours:
    """pyllm.LLM. Pages are reused, which random prompts never do; a request with a salt of its own shares nothing.

    options: other arguments of LLM than those of the table; with `weights`, `model` is the declaration.
    """

    def __init__(self, name: str, model: Any, cache_tokens: int | None = None, **options: Any) -> None:
        from pyllm import LLM, KvCacheConfig

        _, quant, kv = MODELS[name]
        common: dict[str, Any] = {"max_batch_size": BATCH, "max_num_tokens": CHUNK, "max_seq_len": LENGTH + 1, "dtype": "bf16"}
        # One kernel is faster for steps of one request in bf16, and slower in FP8.
        common |= {} if "weights" in options else {"load_format": "dummy", "one_kernel": None if quant else True}
        cache = KvCacheConfig(free_gpu_memory_fraction=0.9, max_tokens=cache_tokens, dtype=kv)
        self.llm = LLM(model, quant=quant or (), skip_tokenizer_init=True, kv_cache_config=cache, **(common | options))

    def run(self, ids: Sequence[list[int]], output_len: int, gaps: Sequence[float] | None = None, salted: bool = False) -> dict[str, Any]:
        """All requests at once, or with these seconds between them."""
        from pyllm import SamplingParams

        params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=False)

        async def one(i: int, at: float) -> Any:
            await asyncio.sleep(at)
            return await self.llm.generate_async(ids[i], params, **({"cache_salt": str(time.time_ns())} if salted else {})).aresult()

        async def everything() -> list[Any]:
            starts = np.cumsum(gaps) if gaps is not None else np.zeros(len(ids))
            return await asyncio.gather(*(one(i, float(at)) for i, at in enumerate(starts)))

        before, start = _host(self.llm._engine), time.perf_counter()
        outputs = asyncio.run(everything())
        seconds, after = time.perf_counter() - start, _host(self.llm._engine)
        failed = [c.error for o in outputs for c in o.outputs if c.error]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(ids)} requests failed: {failed[0]}")
        steps, host, decodes, decode_host = (b - a for a, b in zip(before, after, strict=True))
        return {
            "tokens": sum(o.outputs[0].length for o in outputs),
            "seconds": seconds,
            "ttft_ms": [(o.timing.tokens[0] - o.timing.submitted) * 1e3 for o in outputs],
            "steps": steps,
            "host_ms_per_step": host / max(steps, 1) * 1e3,
            "decode_steps": decodes,
            "host_ms_per_decode_step": decode_host / max(decodes, 1) * 1e3,
            **step_times([o.timing.tokens for o in outputs]),
            "ids": [o.outputs[0].token_ids for o in outputs],
        }


def step_times(seen: Sequence[Sequence[float]]) -> dict[str, float]:
    """Milliseconds from one step to the next, medians: of those that gave a request its first token, and of the others. seen: for each
    request when the host saw its tokens, which is once a step for all."""
    firsts = {times[0] for times in seen}
    gaps = [((b - a) * 1e3, b in firsts) for a, b in pairwise(sorted({t for times in seen for t in times}))]
    kinds = {"prompt_step_ms": [ms for ms, first in gaps if first], "decode_step_ms": [ms for ms, first in gaps if not first]}
    return {name: statistics.median(some) for name, some in kinds.items() if some}


def _host(engine: Engine) -> tuple[float, ...]:
    return engine.steps, engine.host_seconds, engine.decode_steps, engine.decode_host_seconds


class Vllm:
    """vLLM's offline engine, in this process. model: a folder with a config.json."""

    def __init__(self, name: str, model: Path) -> None:
        import vllm

        _, quant, kv = MODELS[name]
        self.llm = vllm.LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            quantization=quant,
            kv_cache_dtype=kv,
            max_model_len=LENGTH + 1,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
        )

    def run(self, ids: Sequence[list[int]], output_len: int) -> dict[str, Any]:
        import vllm

        params = vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"tokens": sum(len(o.outputs[0].token_ids) for o in outputs), "seconds": seconds, "ttft_ms": [seconds * 1e3]}


class Transformers:
    """`generate` of transformers on a model of its own, not compiled. model: a folder with a config.json."""

    def __init__(self, name: str, model: Path, device: str = "cuda") -> None:
        import torch
        import transformers

        if MODELS[name][1]:
            raise ValueError(f"transformers: {name} is quantized, expected a model in bf16")
        config = transformers.AutoConfig.from_pretrained(model)
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def run(self, ids: Sequence[list[int]], output_len: int) -> dict[str, Any]:
        import torch

        prompts = torch.tensor(ids, device=self.model.device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=output_len, min_new_tokens=output_len,
                do_sample=False, pad_token_id=0,
            ).cpu()  # fmt: skip
        seconds, tokens = time.perf_counter() - start, out.numel() - prompts.numel()
        if tokens != len(ids) * output_len:
            raise RuntimeError(f"transformers: {tokens} tokens came, expected {len(ids)} x {output_len}")
        return {"tokens": tokens, "seconds": seconds, "ttft_ms": [seconds * 1e3], "attention": self.model.config._attn_implementation}


ENGINES: dict[str, Callable[[str, Path], Any]] = {"pyllm": Ours, "vllm": Vllm, "hf": Transformers}


class WalkWeights(DummyWeights):
    """Weights with which token t is followed by `walk(t)`, whatever came before: the layers add next to nothing to the embedding, and row
    walk(t) of the head is the embedding of t. All products and all attention are computed, so a step takes what the shape takes."""

    EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

    def __getitem__(self, name: str) -> Tensor:
        t = super().__getitem__(self.EMBED if name == self.HEAD else name)
        if name == self.HEAD:
            return t.roll(1, 0)
        return t * 1e-4 if name.endswith(("o_proj.weight", "down_proj.weight")) else t


def walk(start: int, count: int, vocab: int) -> list[int]:
    """What the model of `WalkWeights` says behind `start`."""
    return [(start + i) % vocab for i in range(1, count + 1)]


def edited_text(length: int, vocab: int, share: float) -> list[int]:
    """A prompt whose continuation is the prompt itself but for edits: a walk from 0 with a `share` of other tokens in it, then 0 again."""
    draw = np.random.default_rng(7)
    ids = np.array([0, *walk(0, length - 2, vocab), 0])
    at = np.flatnonzero(draw.random(length - 2) < share) + 1
    ids[at] = draw.integers(vocab // 2, vocab, len(at))
    return ids.tolist()


def lookup_speed(name: str, prompt: list[int], output_len: int, device: str = "cuda", dtype: str = "bf16") -> dict[str, Any]:
    """Tokens per second of one request with guesses from its own text over those without; RuntimeError if the tokens differ."""
    from pyllm import CudaGraphConfig, NGramDecodingConfig
    from pyllm.api.model import DTYPES
    from pyllm.models import spec_from_config

    spec = spec_from_config(SHAPES[MODELS[name][0]])
    found: dict[str, dict[str, Any]] = {}
    for how, guesses in (("plain", None), ("guessing", NGramDecodingConfig())):
        engine = Ours(
            name, spec, 4 * (len(prompt) + output_len), weights=WalkWeights(spec, device, DTYPES[dtype]), device=device, dtype=dtype,
            max_batch_size=1, max_seq_len=len(prompt) + output_len, speculative_config=guesses,
            cuda_graph_config=CudaGraphConfig(batch_sizes=[1], capture_num_tokens=[8, len(prompt)]),
        )  # fmt: skip
        engine.run([prompt], 16)
        found[how] = engine.run([prompt], output_len)
        stats = engine.llm.get_stats()
        engine.llm.shutdown()
    want = walk(prompt[-1], output_len, spec.vocab_size)
    if any(got["ids"] != [want] for got in found.values()):
        raise RuntimeError(f"lookup: the tokens are not those of the model: {[got['ids'][0][:20] for got in found.values()]}")
    speed = {how: got["tokens"] / got["seconds"] for how, got in found.items()}
    return {"value": speed["guessing"] / speed["plain"], **speed, "acceptance_rate": stats["acceptance_rate"]}
