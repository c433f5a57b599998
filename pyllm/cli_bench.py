"""`pyllm bench throughput|latency` and `pyllm plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Measure a model on this machine; names and report as in trtllm-bench.")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Directory, .gguf file, or (with --load-format dummy) a shape: llama-3.1-8b ...")
]
PlanModel = Annotated[
    str, typer.Argument(metavar="MODEL", help="Directory or its config.json alone, .gguf file, demo, or a shape: llama-3.1-8b ...")
]
Dataset = Annotated[Path | None, typer.Option(help="JSON lines with prompt or input_ids, and output_tokens. Default: random token ids.")]
InputLen = Annotated[int | None, typer.Option(help="Tokens of each random prompt. Default: 128.")]
OutputLen = Annotated[int | None, typer.Option(help="Tokens to generate for each random prompt. Default: 128.")]
NumRequests = Annotated[int | None, typer.Option(help="Requests; default 100 (latency: 10), or the whole dataset.")]
Warmup = Annotated[int, typer.Option(help="Requests before the measurement.")]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy: random weights for the model's config.json.")]
Quant = Annotated[
    str | None,
    typer.Option(help="fp8, fp8-block: quantize all products but head and routers as they are loaded; stored: take FP8 as it is stored."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU where there is one.")]
Dtype = Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")]
MaxBatch = Annotated[int, typer.Option(help="Requests in a step.")]
MaxTokens = Annotated[int, typer.Option(help="Prompt tokens in a step.")]
MaxLen = Annotated[int | None, typer.Option(help="Tokens of a request. Default: the longest of the dataset.")]
Fraction = Annotated[float, typer.Option(help="Share of the free memory for the KV cache.")]
KvDtype = Annotated[str, typer.Option(help="auto, fp8 or int8.")]
Policy = Annotated[str, typer.Option(help="GUARANTEED_NO_EVICT or MAX_UTILIZATION.")]
Draft = Annotated[str | None, typer.Option(help="ngram, or a second model: guess tokens, and verify them in one step.")]
DraftLen = Annotated[int | None, typer.Option(help="Guesses in a step. Default: 4.")]
Deterministic = Annotated[bool, typer.Option(help="The same bits for a request in any company.")]
OneKernel = Annotated[
    bool | None,
    typer.Option("--one-kernel/--no-one-kernel", help="Decode steps of up to 4 requests as one kernel. Default: where it is faster."),
]
ReportJson = Annotated[Path | None, typer.Option(help="Write the report here.")]
Against = Annotated[
    list[str] | None, typer.Option(help="hf or vllm: run the same requests there (a sweep's last concurrency), and print the ratio.")
]
Seed = Annotated[int, typer.Option(help="Of the random prompts.")]


@app.command()
def throughput(
    model: Model,
    dataset: Dataset = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_requests: NumRequests = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time; -1: all at once.")] = -1,
    sweep: Annotated[str | None, typer.Option(help="Concurrencies, as in 1,8,64: a line each, the curve, and its knee.")] = None,
    warmup: Warmup = 2,
    load_format: LoadFormat = "auto",
    quantization: Quant = None,
    device: Device = None,
    dtype: Dtype = "auto",
    max_batch_size: MaxBatch = 256,
    max_num_tokens: MaxTokens = 8192,
    max_seq_len: MaxLen = None,
    kv_cache_free_gpu_mem_fraction: Fraction = 0.9,
    kv_cache_dtype: KvDtype = "auto",
    scheduler_policy: Policy = "GUARANTEED_NO_EVICT",
    draft: Draft = None,
    draft_len: DraftLen = None,
    deterministic: Deterministic = False,
    one_kernel: OneKernel = None,
    report_json: ReportJson = None,
    against: Against = None,
    seed: Seed = 0,
) -> None:
    """Many requests together: tokens per second."""
    _bench(locals(), [concurrency] if sweep is None else _concurrencies(sweep, concurrency), 100)


@app.command()
def latency(
    model: Model,
    dataset: Dataset = None,
    input_len: InputLen = None,
    output_len: OutputLen = None,
    num_requests: NumRequests = None,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 1,
    warmup: Warmup = 2,
    load_format: LoadFormat = "auto",
    quantization: Quant = None,
    device: Device = None,
    dtype: Dtype = "auto",
    max_num_tokens: MaxTokens = 8192,
    max_seq_len: MaxLen = None,
    kv_cache_free_gpu_mem_fraction: Fraction = 0.9,
    kv_cache_dtype: KvDtype = "auto",
    draft: Draft = None,
    draft_len: DraftLen = None,
    deterministic: Deterministic = False,
    one_kernel: OneKernel = None,
    report_json: ReportJson = None,
    against: Against = None,
    seed: Seed = 0,
) -> None:
    """One request at a time: how long it takes."""
    _bench(
        {**locals(), "max_batch_size": num_requests or 10 if concurrency == -1 else concurrency, "scheduler_policy": "GUARANTEED_NO_EVICT"},
        [concurrency],
        10,
    )


def _concurrencies(sweep: str, concurrency: int) -> list[int]:
    parts = sweep.split(",")
    if not all(p.strip().isdecimal() and int(p) for p in parts):
        raise ValueError(f"bench: --sweep is {sweep!r}, expected concurrencies, as in 1,8,64")
    if concurrency != -1:
        raise ValueError("bench: --sweep and --concurrency are both given, expected one of them")
    return [int(p) for p in parts]


def _speculative(o: dict[str, Any]) -> Any:
    from pyllm.api.config import DraftTargetDecodingConfig, NGramDecodingConfig

    length = 4 if o["draft_len"] is None else o["draft_len"]
    if o["draft"] is None:
        return None
    if o["draft"] == "ngram":
        return NGramDecodingConfig(max_draft_len=length)
    how = {"load_format": o["load_format"], "quant": o["quantization"] or ()}
    return DraftTargetDecodingConfig(speculative_model=o["draft"], max_draft_len=length, **how)


def _at_least(command: str, low: int, o: dict[str, Any], *names: str) -> None:
    for name in names:
        if o.get(name) is not None and o[name] < low:
            raise ValueError(f"{command}: --{name.replace('_', '-')} is {o[name]}, expected at least {low}")


def _check(o: dict[str, Any], concurrencies: list[int]) -> None:
    for c in concurrencies:
        if c < 1 and c != -1:
            raise ValueError(f"bench: --concurrency is {c}, expected at least 1, or -1: all at once")
    _at_least("bench", 1, o, "num_requests", "input_len", "output_len", "max_batch_size", "max_num_tokens", "max_seq_len")
    _at_least("bench", 0, o, "warmup", "seed")
    for name in ("input_len", "output_len"):
        if o["dataset"] and o[name] is not None:
            raise ValueError(f"bench: --{name.replace('_', '-')} and --dataset, whose lines say it, are both given; leave one of them out")
    if o["draft"] is None and o["draft_len"] is not None:
        raise ValueError("bench: --draft-len without --draft (ngram, or a second model), which it is for")
    if o["report_json"] and not o["report_json"].absolute().parent.is_dir():
        raise ValueError(f"bench: --report-json is {str(o['report_json'])!r}, expected a file in a directory that exists")


def _bench(o: dict[str, Any], concurrencies: list[int], default_count: int) -> None:
    from pyllm.api.config import KvCacheConfig, SchedulerConfig
    from pyllm.api.llm import LLM
    from pyllm.measure import bench, peers
    from pyllm.measure.curve import curve

    _check(o, concurrencies)
    count = o["num_requests"] or default_count
    config = _config(o["model"], o["load_format"])
    vocab = int(config.get("vocab_size") or 1000)
    items = (
        bench.read_dataset(o["dataset"], o["num_requests"])
        if o["dataset"]
        else bench.synthetic(count, o["input_len"] or 128, o["output_len"] or 128, vocab, o["seed"])
    )
    peers.check_peers(o["against"] or (), o["model"], items, o["load_format"], o["kv_cache_dtype"])
    text = any(isinstance(i.prompt, str) for i in items)
    longest = None if text else max(len(i.prompt) + i.output_tokens for i in items)
    llm = LLM(
        o["model"],
        load_format=o["load_format"],
        quant=o["quantization"] or (),
        device=o["device"],
        dtype=o["dtype"],
        skip_tokenizer_init=not text,
        max_batch_size=o["max_batch_size"],
        max_num_tokens=o["max_num_tokens"],
        max_seq_len=o["max_seq_len"] or longest,
        kv_cache_config=KvCacheConfig(
            free_gpu_memory_fraction=o["kv_cache_free_gpu_mem_fraction"], dtype=o["kv_cache_dtype"], enable_block_reuse=False
        ),
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=o["scheduler_policy"]),
        speculative_config=_speculative(o),
        deterministic=o["deterministic"],
        one_kernel=o["one_kernel"],
    )
    reports = []
    with llm:
        bench.run(llm, items[: o["warmup"]], -1, title="warming up", progress=True)
        for concurrency in concurrencies:
            reports.append(bench.report(llm, o["model"], o["load_format"], o["quantization"], bench.measure(llm, items, concurrency)))
        where, kind = llm._engine.device, llm._engine.dtype
    typer.echo(bench.summary(reports[0]) if len(reports) == 1 else curve(concurrencies, reports))
    ours = reports[-1]["performance"]["system_output_throughput_tok_s"]  # of the concurrency that the peer runs
    del llm
    options = {"load_format": o["load_format"], "device": where, "dtype": kind, "max_batch": o["max_batch_size"]}
    options |= {"quantization": o["quantization"], "kv_cache_dtype": o["kv_cache_dtype"]}
    for name in o["against"] or ():
        reports[-1].setdefault("against", {})[name] = _against(name, o["model"], config, items, concurrencies[-1], options, ours)
    if o["report_json"]:
        o["report_json"].write_text(json.dumps(reports[0] if len(reports) == 1 else reports, indent=1) + "\n")


def _config(model: str, load_format: str) -> dict[str, Any]:
    from pyllm.api.dummy import SHAPES
    from pyllm.api.model import open_model_files, read_config

    if load_format == "dummy":
        return SHAPES.get(model) or read_config(model)
    return open_model_files(model).config


def _against(name: str, model: str, config: dict[str, Any], items: Any, concurrency: int, options: dict[str, Any], ours: float) -> Any:
    import gc

    import torch

    from pyllm.measure import peers

    if not peers.installed(name):
        typer.echo(f"{name:<22}not installed")
        return None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the peer shall have all the memory, too
    speed = peers.tokens_per_second(name, model, config, items, concurrency, options)
    kind = str(options["dtype"]).removeprefix("torch.")
    plain = name == "hf" and (options["quantization"] or options["kv_cache_dtype"] != "auto")
    how = f" in {kind} with a cache of {kind}" if plain else f" at concurrency {concurrency}" if concurrency > 0 else ""
    typer.echo(f"{name:<22}{speed:.1f} tokens/s{how}; pyllm is {ours / speed:.2f} times as fast")
    return {"system_output_throughput_tok_s": speed, "ratio": ours / speed}


def plan(
    model: PlanModel,
    memory: Annotated[float | None, typer.Option(help="GiB of the GPU. Default: what is free on this one, or 141.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    quantization: Quant = None,
    kv_cache_dtype: KvDtype = "auto",
    max_batch_size: MaxBatch = 256,
    max_num_tokens: MaxTokens = 8192,
    max_seq_len: Annotated[int | None, typer.Option(help="Tokens of a request. Default: the model's context.")] = None,
    free_gpu_memory_fraction: Fraction = 0.9,
) -> None:
    """Print what would take which memory: weights, activations, KV cache. Loads nothing and needs no GPU."""
    import torch

    from pyllm.api.config import CACHE_DTYPES
    from pyllm.api.model import model_config, pick_dtype, quant_plan
    from pyllm.models import spec_from_config
    from pyllm.plan.memory import memory_plan
    from pyllm.plan.pages import free_bytes

    _at_least("plan", 1, {"max_batch_size": max_batch_size, "max_num_tokens": max_num_tokens}, "max_batch_size", "max_num_tokens")
    if memory is not None and not 0 < memory < float("inf"):
        raise ValueError(f"plan: --memory is {memory}, expected GiB, more than 0")
    if not 0 < free_gpu_memory_fraction <= 1:
        raise ValueError(f"plan: --free-gpu-memory-fraction is {free_gpu_memory_fraction}, expected more than 0, at most 1")
    config = model_config(model)
    spec = spec_from_config(config)
    if max_seq_len is not None and not 1 <= max_seq_len <= spec.max_positions:
        raise ValueError(f"plan: --max-seq-len is {max_seq_len}, expected 1 to the model's context of {spec.max_positions}")
    here = torch.cuda.is_available()
    total = math.ceil(memory * 2**30) if memory is not None else free_bytes(torch.device("cuda")) if here else 141 * 10**9
    kind = pick_dtype(None if dtype == "auto" else dtype, torch.device("cuda"), config)
    if kv_cache_dtype not in CACHE_DTYPES:
        raise ValueError(f"plan: --kv-cache-dtype is {kv_cache_dtype!r}, expected {' or '.join(CACHE_DTYPES)}")
    made = memory_plan(
        spec,
        total,
        dtype=kind,
        kv_dtype=CACHE_DTYPES[kv_cache_dtype] or kind,
        tokens=max_num_tokens,
        max_batch=max_batch_size,
        fraction=free_gpu_memory_fraction,
        quant=quant_plan(quantization or ()),
        max_length=max_seq_len,
    )
    typer.echo(str(made))
    if not made.kv:
        raise typer.Exit(1)
