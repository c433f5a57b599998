"""`load_model`: from a path (or "demo") to an engine with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyllm import _native
from pyllm.runtime.engine import Engine
from pyllm.runtime.progress import progress_bar

if TYPE_CHECKING:
    from pyllm.layers import Decoder
    from pyllm.load import Checkpoint
    from pyllm.load.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {str(d).removeprefix("torch."): d for d in DTYPES.values()}
CHUNK = {
    "cpu": 512,
    "cuda": 8192,
}  # prompt tokens per step: a GPU wants few large steps, on a CPU a step must not stall the others for long


@dataclass
class LoadedModel:
    """A model that is ready to run: its declaration, engine, checkpoint files and tokenizer."""

    name: str
    spec: Decoder
    engine: Engine
    checkpoint: Checkpoint
    tokenizer: Tokenizer

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def encode(self, prompt: str | Sequence[int], *, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Text goes through the chat template as a user's message where the model has one, unless `raw`."""
        if not isinstance(prompt, Sequence):
            raise ValueError(f"encode: the prompt is {prompt!r}, expected text or token ids")
        if not isinstance(prompt, str):
            return list(prompt)
        if raw or self.checkpoint.chat_template is None:
            return self.tokenizer.encode(prompt)
        text = self.checkpoint.render_chat([{"role": "user", "content": prompt}])
        return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written BOS already

    def status_line(self) -> str:
        """One line for people: where the kernels run."""
        if self.device.type == "cpu" and _native.kernels_available():
            return "kernels: CPU references (device cpu was asked for)"
        return _native.status_line()


def load_model(
    path: str | Path,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    progress: bool = True,
    **engine: Any,
) -> LoadedModel:
    """Open a Hugging Face directory, a `.gguf` file or "demo", bind its weights and make an engine.

    device: None takes the GPU where pyllm's kernels run, else the CPU. dtype: None takes fp32 on a CPU, on a GPU what the checkpoint was
    saved in (bf16 or fp16; bf16 where it says neither). engine: further arguments of `Engine` (max_batch, chunk, page_size, pages,
    max_tokens, kv_dtype).
    Errors: ValueError (CheckpointError for the files) of one line.
    """
    from pyllm.layers import bind
    from pyllm.models import spec_from_config

    checkpoint = open_model_files(path)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{checkpoint.path}: the checkpoint has no tokenizer")
    where = pick_device(device)
    kind = pick_dtype(dtype, where, checkpoint.config)
    spec = spec_from_config(checkpoint.config)
    _check_tied(checkpoint, spec)
    with progress_bar(f"loading {checkpoint.name}", len(checkpoint.tensors), "tensors", progress) as advance:
        module = bind(spec, checkpoint.tensors, device=where, dtype=kind, progress=advance)
    arguments: dict[str, Any] = {"chunk": CHUNK[where.type], "eos_ids": checkpoint.eos_ids, "progress": progress} | engine
    return LoadedModel(checkpoint.name, spec, Engine(spec, module, device=where, dtype=kind, **arguments), checkpoint, checkpoint.tokenizer)


def _check_tied(checkpoint: Checkpoint, spec: Decoder) -> None:
    """A head beside a config that says it is tied: stored twice is fine, another one must not be dropped unsaid."""
    tensors = checkpoint.tensors
    if spec.head is None and "lm_head.weight" in tensors:
        head, embed = tensors["lm_head.weight"], tensors[f"{spec.embed.name}.weight"]
        if head.shape != embed.shape or not torch.equal(head, embed):
            raise ValueError(f"{checkpoint.path}: tie_word_embeddings is set, but lm_head.weight differs from {spec.embed.name}.weight")


def open_model_files(path: str | Path) -> Checkpoint:
    """The checkpoint at a path, or the demo model's for "demo" (a directory of that name is reached as ./demo)."""
    from pyllm.load.checkpoint import open_checkpoint
    from pyllm.load.demo import demo_model_path

    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"model is {path!r}, expected a directory, a .gguf file or demo")
    return open_checkpoint(demo_model_path() if str(path) == "demo" else path)


def pick_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if _native.kernels_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device is {device!r}, expected cpu, cuda or cuda:N") from None
    if found.type not in ("cpu", "cuda") or (found.type == "cpu" and found.index):
        raise ValueError(f"device is {str(device)!r}, expected cpu, cuda or cuda:N")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device is {str(device)!r}, but torch finds no CUDA device")
        if (found.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device is {str(device)!r}, but there are {torch.cuda.device_count()} CUDA devices")
        if not _native.kernels_available():
            raise ValueError(f"device is {str(device)!r}, but pyllm's kernels do not run there: {_native.load()}")
    return found


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    elif dtype is not None:
        name = dtype
    elif device.type == "cpu":
        return torch.float32
    else:
        saved = str(config.get("dtype") or config.get("torch_dtype"))
        return torch.float16 if saved == "float16" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
