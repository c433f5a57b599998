"""The same requests through another engine in the same process, for `pyllm bench --against`: plain Hugging Face, or vLLM."""

from __future__ import annotations

import importlib.util
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pyllm.measure.bench import Item

PEERS = ("hf", "vllm")


def installed(name: str) -> bool:
    return importlib.util.find_spec({"hf": "transformers", "vllm": "vllm"}[name]) is not None


def check_peers(names: Sequence[str], model: str, items: Sequence[Item], load_format: str, kv_cache_dtype: str) -> None:
    """ValueError for what a peer cannot run, before anything is measured."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"bench: --against is {name!r}, expected one of {', '.join(PEERS)}")
    if names and any(isinstance(item.prompt, str) for item in items):
        raise ValueError("bench: --against needs prompts as token ids (a synthetic dataset, or input_ids)")
    if names and load_format == "auto" and not Path(model, "config.json").is_file():  # a peer would look for it on a hub
        raise ValueError(f"bench: --against needs a Hugging Face directory, or --load-format dummy; MODEL is {model}")
    if "vllm" in names and kv_cache_dtype == "int8":
        raise ValueError("bench: --against vllm with --kv-cache-dtype int8, which it has not, expected auto or fp8")


def tokens_per_second(
    name: str, model: str, config: dict[str, Any], items: Sequence[Item], concurrency: int, options: dict[str, Any]
) -> float:
    """Output tokens per second of a peer; options: load_format, dtype, device, max_batch, and for vLLM quantization and
    kv_cache_dtype. Prompts are token ids (`check_peers`)."""
    run = _hf if name == "hf" else _vllm
    return run(model, config, items, concurrency, options)


def _hf(model: str, config: dict[str, Any], items: Sequence[Item], concurrency: int, options: dict[str, Any]) -> float:
    """`generate` of transformers, eager, in batches of `concurrency` requests of one length (at most 64)."""
    import transformers

    kind = getattr(transformers, config["architectures"][0])
    settings = transformers.AutoConfig.for_model(**config)
    device, dtype = options["device"], options["dtype"]
    if options["load_format"] == "dummy":
        with torch.device(device):
            net = kind(settings).to(dtype).eval()
    else:
        net = kind.from_pretrained(model, dtype=dtype).to(device).eval()
    size, done, seconds = min(concurrency if concurrency > 0 else 64, 64), 0, 0.0
    rounds = [items[:1], *(items[first : first + size] for first in range(0, len(items), size))]  # the first one warms up
    for n, some in enumerate(rounds):
        longest, most = max(len(i.prompt) for i in some), max(i.output_tokens for i in some)
        ids = torch.tensor([[0] * (longest - len(i.prompt)) + list(i.prompt) for i in some], device=device)
        mask = torch.tensor([[0] * (longest - len(i.prompt)) + [1] * len(i.prompt) for i in some], device=device)
        start = time.perf_counter()
        with torch.inference_mode():
            net.generate(ids, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, pad_token_id=0)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if n:
            done, seconds = done + sum(i.output_tokens for i in some), seconds + time.perf_counter() - start
    return done / seconds


def _vllm(model: str, config: dict[str, Any], items: Sequence[Item], concurrency: int, options: dict[str, Any]) -> float:
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        if options["load_format"] == "dummy":
            Path(folder, "config.json").write_text(json.dumps(config))
        longest = max(len(i.prompt) + i.output_tokens for i in items) + 1
        llm = vllm.LLM(
            model=folder if options["load_format"] == "dummy" else model,
            load_format=options["load_format"],
            skip_tokenizer_init=True,
            dtype=str(options["dtype"]).removeprefix("torch."),
            quantization=options["quantization"],
            kv_cache_dtype=options["kv_cache_dtype"],
            max_model_len=longest,
            max_num_seqs=min(options["max_batch"], concurrency) if concurrency > 0 else options["max_batch"],
            enable_prefix_caching=False,
        )
        params = [vllm.SamplingParams(temperature=0, max_tokens=i.output_tokens, ignore_eos=True, detokenize=False) for i in items]
        prompts = [{"prompt_token_ids": list(i.prompt)} for i in items]
        llm.generate(prompts[:2], params[:2], use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds
