"""`LLM`: a model and an engine behind TensorRT-LLM's names."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyllm.api.beam import run_searches
from pyllm.api.config import CudaGraphConfig, DraftTargetDecodingConfig, KvCacheConfig, NGramDecodingConfig, SchedulerConfig
from pyllm.api.model import CHUNK, Parts, load_parts
from pyllm.api.outputs import RequestOutput
from pyllm.api.params import SamplingParams
from pyllm.api.prompts import check_messages, for_each, one_prompt, prompt_ids
from pyllm.api.refuse import GENERATE_HINTS, LLM_HINTS, check_llm, need_flags, of_type, refuse_unknown, shown
from pyllm.api.retention import KvCacheRetentionConfig
from pyllm.api.text import TextOutput
from pyllm.layers.one_kernel import in_one_kernel
from pyllm.plan.memory import activation_bytes
from pyllm.progress import progress_bar
from pyllm.runtime.engine import Engine
from pyllm.runtime.loop import EngineLoop
from pyllm.runtime.offload import WatchedPool
from pyllm.runtime.request import Request

if TYPE_CHECKING:
    from pyllm.layers import Decoder
    from pyllm.layers.formats import QuantPlan
    from pyllm.load.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}


class LLM:
    """A model that is ready to run.

    model: a Hugging Face directory, a .gguf file, "demo", or a declaration (`pyllm.layers.Decoder`) with `weights` (checkpoint name ->
    tensor). tokenizer: a `pyllm.load.tokenizer.Tokenizer`, a directory or a tokenizer.json; None: the model's own.
    skip_tokenizer_init: token ids in and out. load_format: "auto", or "dummy": random weights for the directory's config.json.
    quant: "fp8" or "fp8-block" quantizes all products but the head and routers (the latter: and experts) as they are loaded, "stored" takes
    those that the checkpoint stores in FP8 as they are, not expanded; or pairs (glob, Format) as in `pyllm.layers.bind`.
    device: None takes the GPU where pyllm's kernels run, else the CPU. dtype: "auto", "fp32", "bf16" or "fp16".
    max_batch_size: requests in a step. max_num_tokens: tokens in a step with prompts (None: 8192 on a GPU, 512 on a CPU).
    max_seq_len: tokens of a request, prompt and output.
    deterministic: the same prompt, parameters and seed give the same tokens bit for bit, whatever else is in the batch; slower.
    one_kernel: decode steps of up to 4 requests as one kernel (`pyllm.ops.decode_step`): True wherever the model is served (ValueError: it
    is not), False never, None by a rule of what is measured faster and safe, which takes none today (docs/executor.md).
    cuda_graph_config: None runs every step without a graph. watchdog_timeout: seconds a step may take until requests fail.
    Errors: ValueError or TypeError for an argument, MemoryError for a model or cache that does not fit, each one sentence.
    """

    def __init__(
        self,
        model: str | Path | Decoder,
        tokenizer: Tokenizer | str | Path | None = None,
        *,
        weights: Mapping[str, Tensor] | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype = "auto",
        load_format: str = "auto",
        quant: str | QuantPlan = (),
        skip_tokenizer_init: bool = False,
        max_batch_size: int = 256,
        max_num_tokens: int | None = None,
        max_seq_len: int | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        cuda_graph_config: CudaGraphConfig | None = CudaGraphConfig(),  # noqa: B008 (frozen)
        speculative_config: NGramDecodingConfig | DraftTargetDecodingConfig | None = None,
        deterministic: bool = False,
        one_kernel: bool | None = None,
        disable_overlap_scheduler: bool = False,
        watchdog_timeout: float = 300.0,
        progress: bool = True,
        **unsupported: Any,
    ) -> None:
        refuse_unknown("LLM", unsupported, [n for n in inspect.signature(LLM).parameters if n != "unsupported"], LLM_HINTS)
        kv = of_type("kv_cache_config", kv_cache_config, KvCacheConfig) or KvCacheConfig()
        scheduler = of_type("scheduler_config", scheduler_config, SchedulerConfig) or SchedulerConfig()
        graphs = of_type("cuda_graph_config", cuda_graph_config, CudaGraphConfig)
        draft = of_type("speculative_config", speculative_config, NGramDecodingConfig, DraftTargetDecodingConfig)
        sizes = {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens, "max_seq_len": max_seq_len}
        of_type("one_kernel", one_kernel, bool)
        need_flags("LLM", skip_tokenizer_init=skip_tokenizer_init, deterministic=deterministic, progress=progress)
        need_flags("LLM", disable_overlap_scheduler=disable_overlap_scheduler)
        check_llm(watchdog_timeout, sizes, tokenizer if skip_tokenizer_init else None)
        parts = load_parts(model, weights=weights, tokenizer=tokenizer, device=device, dtype=dtype,
                           load_format=load_format, quant=quant, invariant=deterministic, progress=progress)  # fmt: skip
        self.tokenizer, self._checkpoint = None if skip_tokenizer_init else parts.tokenizer, parts.checkpoint
        cuda, chunk = parts.device.type == "cuda", max_num_tokens or CHUNK[parts.device.type]
        guessing, second = _guessing(draft, parts, None if one_kernel else one_kernel, progress)
        spare = [activation_bytes(p, chunk, max_batch_size, kv.tokens_per_block) for p in (parts, second or parts)] if cuda else [0]
        module = in_one_kernel(parts.module, one_kernel, kv.torch_dtype or parts.dtype)
        self._engine = Engine(
            parts.spec, module, device=parts.device, dtype=parts.dtype, eos_ids=parts.eos_ids, max_batch=max_batch_size, chunk=chunk,
            max_length=max_seq_len, page_size=kv.tokens_per_block, max_tokens=kv.max_tokens, kv_dtype=kv.torch_dtype,
            spare_bytes=max(spare), memory_share=kv.free_gpu_memory_fraction if cuda else None,
            reserve=scheduler.capacity_scheduler_policy == "GUARANTEED_NO_EVICT",
            reuse=kv.enable_block_reuse, partial=kv.enable_partial_reuse, tiers=(kv.host_cache_size, kv.event_buffer_max_size),
            overlap=False if disable_overlap_scheduler else None,
            graph_sizes=graphs.sizes(max_batch_size) if graphs and cuda else [],
            mixed_sizes=graphs.token_sizes(chunk) if graphs and cuda else [],
            deterministic=deterministic, progress=progress, **guessing,
        )  # fmt: skip
        self._reuse = kv.enable_block_reuse
        gc.collect()  # else the first full collection comes amid the first requests, and nothing is launched for 0.1 s
        self._loop = EngineLoop(self._engine, watchdog_timeout)

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | Sequence[KvCacheRetentionConfig | None] | None = None,
        **unsupported: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Complete one prompt or many, and wait for all. A prompt that can never run is a ValueError, and none is run; one that fails while
        it runs has finish_reason "error". sampling_params and kv_cache_retention_config: one for all, or one for each."""
        _refuse("generate", unsupported)
        need_flags("LLM.generate", use_tqdm=use_tqdm)
        one = isinstance(inputs, (str, Mapping)) or one_prompt(inputs)
        prompts: list[Any] = [inputs] if one else list(inputs)
        each = for_each("sampling_params", sampling_params, len(prompts))
        kept = for_each("kv_cache_retention_config", kv_cache_retention_config, len(prompts))
        made = [self._make(p, s, priority, cache_salt, k, False) for p, s, k in zip(prompts, each, kept, strict=True)]
        beams = [out._requests for out in made if out._requests[0].params.use_beam_search]
        self._loop.submit([r for out in made if out._requests not in beams for r in out._requests])
        try:
            if beams:
                run_searches(partial(self._generate_all, priority=priority, cache_salt=cache_salt), beams)
            with progress_bar("generating", len(made), "requests", use_tqdm) as advance:
                for out in made:
                    out.result()
                    advance()
        except BaseException:
            for out in made:
                out.abort()
            raise
        return made[0] if one else made

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_cache_retention_config: KvCacheRetentionConfig | None = None,
        **unsupported: Any,
    ) -> RequestOutput:
        """Start one prompt. streaming: the handle can be iterated over, a look per step; else only its end can be waited for."""
        _refuse("generate_async", unsupported)
        need_flags("LLM.generate_async", streaming=streaming)
        if sampling_params is not None and getattr(sampling_params, "use_beam_search", False):
            raise ValueError("LLM.generate_async: a beam search is known at its end alone; use generate")
        out = self._make(inputs, sampling_params, priority, cache_salt, kv_cache_retention_config, streaming)
        self._loop.submit(out._requests)
        return out

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation (objects with role and content) by the model's own chat template: an input of `generate`."""
        if self._checkpoint is None or self.tokenizer is None:
            raise ValueError("LLM.encode_chat: there is no chat template without a model's files and its tokenizer")
        text = self._checkpoint.render_chat(check_messages(messages), **variables)
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written BOS already

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def has_chat_template(self) -> bool:
        return self._checkpoint is not None and self._checkpoint.chat_template is not None

    def get_stats(self) -> dict[str, float]:
        """Counts of this moment: requests, pages, steps, and host seconds per step (the time in which it did not wait for the device)."""
        e = self._engine
        pages = {"used_pages": e.pool.used, "cached_pages": e.pool.cached, "free_pages": e.pool.free_pages, "total_pages": e.pool.total}
        queues = {"running": len(e.running), "waiting": len(e.waiting), "preemptions": e.preemptions}
        drafts = {"drafted_tokens": e.drafted, "accepted_tokens": e.accepted, "acceptance_rate": e.accepted / max(e.drafted, 1)}
        return {**queues, **pages, **drafts, "steps": e.steps, "host_seconds_per_step": e.host_seconds / max(e.steps, 1)}

    def get_kv_cache_events(self) -> list[dict[str, Any]]:
        """What has come into the cache of prefixes and left it since the last call: `{"event_id": n, "data": {"type": "stored" or
        "removed", "block_hashes": names of pages}}`, at most the latest `event_buffer_max_size` (gaps in event_id are lost ones)."""
        pool = self._engine.pool
        if not isinstance(pool, WatchedPool):
            raise ValueError("LLM.get_kv_cache_events: none are kept; set kv_cache_config=KvCacheConfig(event_buffer_max_size=...)")
        return pool.take_events()

    def shutdown(self) -> None:
        """End all requests; the object is of no more use."""
        self._loop.shutdown()

    def __del__(self) -> None:
        if hasattr(self, "_loop"):
            self._loop.close()  # its thread would keep the model's memory

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()

    def _make(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        salt: str | None,
        retention: KvCacheRetentionConfig | None,
        streaming: bool,
    ) -> RequestOutput:
        params = of_type("sampling_params", params, SamplingParams) or SamplingParams()
        if of_type("kv_cache_retention_config", retention, KvCacheRetentionConfig) and not self._reuse:
            raise ValueError("LLM: kv_cache_retention_config with enable_block_reuse=False, which keeps no pages; leave one of them out")
        if streaming and params.samples > params.n:
            raise ValueError("LLM.generate_async: streaming cannot know the best samples before the end; set best_of=None")
        count = params.n if params.use_beam_search else params.samples
        hidden = params.samples > params.n and params.logprobs is None
        params, text, ids = self._resolve(prompt, replace(params, logprobs=0) if hidden else params)
        requests: list[Request] = []
        for index in range(count):
            request = self._engine.prepare(ids, params, priority=priority, salt="" if salt is None else salt)
            request.index, request.streaming, request.retention = index, streaming, retention
            if params.stop:
                assert self.tokenizer is not None
                include, skip = params.include_stop_str_in_output, params.skip_special_tokens
                request.text = TextOutput(self.tokenizer, params.stop, include_stop=include, skip_special_tokens=skip)
            requests.append(request)
        return RequestOutput(text, requests, self.tokenizer, params.n, self._abort)

    def _generate_all(self, prompts: list[list[int]], params: list[SamplingParams], retention: list, **options: Any) -> list[RequestOutput]:
        outs = self.generate(prompts, params, False, kv_cache_retention_config=retention, **options)
        assert isinstance(outs, list)
        return outs

    def _abort(self, request: Request) -> None:
        """Handles hold this, and so the model, for as long as they live."""
        self._loop.abort(request)

    def _resolve(self, prompt: Prompt, params: SamplingParams) -> tuple[SamplingParams, str | None, list[int]]:
        """Parameters with bad texts as token ids; the prompt as text, if it was, and as token ids."""
        if isinstance(prompt, Mapping):
            known = [k for k in ("prompt_token_ids", "prompt") if k in prompt]
            if len(known) != 1 or len(prompt) != 1:
                given = f"the fields {', '.join(map(str, prompt))}" if prompt else "no fields"
                raise ValueError(f"LLM: an input has {given}, expected prompt or prompt_token_ids")
            prompt = prompt[known[0]]
            if isinstance(prompt, str) != (known[0] == "prompt"):
                raise ValueError(f"LLM: {known[0]} is {shown(prompt)}, expected {'text' if known[0] == 'prompt' else 'token ids'}")
        text = prompt if isinstance(prompt, str) else None
        if text is None:
            prompt = prompt_ids(prompt)
        if self.tokenizer is None and (text is not None or params.stop or params.bad):
            what = "a prompt given as text" if text is not None else "stop" if params.stop else "bad"
            raise ValueError(f"LLM: {what} needs a tokenizer, and there is none; use token ids")
        ids = self.tokenizer.encode(text, params.add_special_tokens) if self.tokenizer and text is not None else list(prompt)
        if params.bad:
            assert self.tokenizer is not None
            spelled = [self.tokenizer.encode(w, add_special_tokens=False) for word in params.bad for w in (word, " " + word)]
            params = replace(params)
            object.__setattr__(params, "bad_words", tuple({tuple(s): None for s in spelled if s}))
        keep = params.truncate_prompt_tokens
        return params, text, ids[-keep:] if keep else ids  # type: ignore[return-value]


def _refuse(method: str, unsupported: Mapping[str, Any]) -> None:
    if unsupported:
        known = inspect.signature(getattr(LLM, method)).parameters
        refuse_unknown(f"LLM.{method}", unsupported, [n for n in known if n not in ("self", "unsupported")], GENERATE_HINTS)


def _guessing(
    draft: NGramDecodingConfig | DraftTargetDecodingConfig | None, first: Parts, one_kernel: bool | None, progress: bool
) -> tuple[dict[str, Any], Parts | None]:
    """Arguments of the engine; and the model that guesses, where one does, on the device and in the dtype of the first."""
    if draft is None:
        return {}, None
    if isinstance(draft, NGramDecodingConfig):
        return {"draft_len": draft.max_draft_len, "draft_ngram": draft.max_matching_ngram_size}, None
    where: dict[str, Any] = {"device": first.device, "dtype": first.dtype}
    try:
        second = load_parts(
            draft.speculative_model, weights=draft.weights, load_format=draft.load_format, quant=draft.quant, progress=progress, **where
        )
    except (ValueError, MemoryError) as error:  # else nobody knows which of the two models it is about
        raise type(error)(f"speculative_config: {error}") from None
    return {"draft_len": draft.max_draft_len, "draft_model": (second.spec, in_one_kernel(second.module, one_kernel, second.dtype))}, second
