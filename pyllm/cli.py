"""The `pyllm` command: generate, explain, plan, bench, inspect, env. A mistake of the user's is one line on stderr and exit code 2."""

from __future__ import annotations

import platform
import shutil
import subprocess
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from pyllm import cli_bench, cli_inspect

MAX_LINE = 2000


def one_line(text: str) -> str:
    """Without control characters, and cut: a field of a config.json may hold terminal codes or megabytes."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: MAX_LINE + 1]).split())
    return line if len(text) <= MAX_LINE else f"{line[:MAX_LINE]}..."


class Commands(TyperGroup):
    """Turns the errors that a user can cause into one line; `pyllm --traceback ...` shows where they came from."""

    def invoke(self, ctx: Any) -> Any:
        warnings.showwarning = lambda message, *_, **__: typer.echo(f"pyllm: warning: {one_line(str(message))}", err=True)
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(141) from None  # the reader went away, as in `pyllm generate ... | head`: 128 + SIGPIPE
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            # Of the RuntimeErrors, only running out of memory is the user's to mend (a smaller model, a free GPU).
            memory = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
            internal = isinstance(error, RuntimeError) and not memory
            if internal or ctx.params.get("traceback"):
                raise
            typer.echo("pyllm: " + one_line(str(error)), err=True)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models with pyllm's CUDA kernels, or on a CPU through their references.\n\n"
    "MODEL is a Hugging Face directory (config.json, safetensors, tokenizer.json), a .gguf file, or demo: SmolLM2-135M-Instruct.",
)

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face directory, .gguf file, or demo.")]


@app.callback()
def options(traceback: Annotated[bool, typer.Option("--traceback", help="Show the Python traceback of an error.")] = False) -> None:
    pass


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="Text to answer, or to continue (a model without a chat template, or --raw).")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0: greedy. Default: 0, or 1 with --top-k, --top-p or --min-p.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep the K likeliest tokens; 0: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the smallest set of tokens that reaches this probability.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Keep tokens of at least this share of the likeliest one's probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text. Default: drawn anew.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Default: the GPU where there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16. Default: fp32 on a CPU, the checkpoint's on a GPU.")] = None,
    stats: Annotated[bool, typer.Option(help="Print speeds, and where the kernels ran, on stderr.")] = True,
) -> None:
    """Complete a prompt, streaming the text to stdout."""
    from pyllm.api.llm import LLM
    from pyllm.api.params import SamplingParams

    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens)
    with LLM(model, device=device, dtype=dtype or "auto", max_batch_size=1) as llm:
        if llm.tokenizer is None:
            raise ValueError(f"{model}: the checkpoint has no tokenizer")
        ids = llm.encode_chat([{"role": "user", "content": prompt}]) if llm.has_chat_template and not raw else prompt
        out = llm.generate_async(ids, params, streaming=True)
        for look in out:
            typer.echo(look.outputs[0].text_diff, nl=False)
        if out.outputs[0].error:
            typer.echo(f"\npyllm: {out.outputs[0].error}", err=True)
            raise typer.Exit(1)
        typer.echo()
        if stats:
            typer.echo(_speeds(out), err=True)
            typer.echo(_where(llm), err=True)


def _speeds(out: Any) -> str:
    """Prefill is the time from admission to the first token, decode the time from there to the last."""
    t, prompt, output = out.timing, len(out.prompt_token_ids), out.outputs[0].length
    prefill = f"prefill {prompt} tokens, {prompt / (t.first_token - t.admitted):.1f} tokens/s"
    decode = f"decode {output} tokens" + (f", {(output - 1) / (t.last_token - t.first_token):.1f} tokens/s" if output > 1 else "")
    why = {"stop": "the model ended", "length": "max-tokens or the context was reached"}[out.outputs[0].finish_reason]
    return f"{prefill}; {decode}; {why}"


def _where(llm: Any) -> str:
    from pyllm import _native

    if llm.device.type == "cpu" and _native.kernels_available():
        return "kernels: CPU references (device cpu was asked for)"
    return _native.status_line()


@app.command()
def explain(
    model: cli_bench.PlanModel,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences in a decode step.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of context of each sequence.")] = 1024,
    gpu: Annotated[str, typer.Option(help="The GPU whose floor times are shown.")] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Print what runs in a decode step: op, kernel, bytes, FLOPs and floor time of each. Reads no weights and needs no GPU."""
    from pyllm.api.model import model_config
    from pyllm.models import spec_from_config
    from pyllm.plan.explain import explain as explain_spec

    spec = spec_from_config(model_config(model))
    report = explain_spec(spec, tp=tp, batch=batch, context=context, gpu=gpu)
    typer.echo(report.json() if as_json else str(report).rstrip())


app.add_typer(cli_bench.app, name="bench")
app.command()(cli_bench.plan)
app.command()(cli_inspect.inspect)


@app.command()
def env() -> None:
    """Print versions, devices and the state of the native parts: what to paste into a bug report."""
    import torch

    import pyllm
    from pyllm import _native
    from pyllm.runtime import host

    report = _native.build_report()
    rows = {
        "pyllm": pyllm.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "kernels": _native.status_line().removeprefix("kernels: "),
        "built for": ", ".join(f"sm_{a}" for a in report.get("architectures", [])) or "no GPU architecture",
        "built with": f"nvcc {report['nvcc']}" if "nvcc" in report else "no nvcc",
        "host code": "native" if host.NATIVE else "Python (pyllm._runtime is not built)",
        "nvcc here": _version("nvcc", "release") or "not on the path",
        "g++ here": _version("g++", "g++") or "not on the path",
    }
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        rows[f"cuda:{i}"] = f"{p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} SMs"
    for name, value in rows.items():
        typer.echo(f"{name:<11} {value}")


def _version(program: str, marker: str) -> str | None:
    """The line of `program --version` that holds the version."""
    path = shutil.which(program)
    if path is None:
        return None
    out = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    return next((line.strip() for line in out.splitlines() if marker in line), None)
