"""From a path, "demo" or a declaration to bound weights, with what the files say beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pyllm import _native
from pyllm.api.refuse import listed, shown
from pyllm.plan.memory import weight_bytes
from pyllm.plan.pages import free_bytes, show_bytes
from pyllm.progress import progress_bar

if TYPE_CHECKING:
    from pyllm.layers import Decoder
    from pyllm.layers.formats import QuantPlan
    from pyllm.load import Checkpoint
    from pyllm.load.tokenizer import Tokenizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {str(d).removeprefix("torch."): d for d in DTYPES.values()}
CHUNK = {
    "cpu": 512,
    "cuda": 8192,
}  # prompt tokens per step: a GPU wants few large steps, on a CPU a step must not stall the others for long


@dataclass
class Parts:
    """A model's declaration and bound weights, and what its files say beside them."""

    name: str
    spec: Decoder
    module: Callable[..., torch.Tensor]
    device: torch.device
    dtype: torch.dtype
    checkpoint: Checkpoint | None
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]


def load_parts(
    model: str | Path | Decoder,
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    tokenizer: Tokenizer | str | Path | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    load_format: str = "auto",
    quant: str | QuantPlan = (),
    invariant: bool = False,
    progress: bool = True,
) -> Parts:
    """A path or a declaration with its weights (checkpoint name -> tensor), bound on the device. load_format="dummy": random weights.

    quant: as in `bind`, or "fp8", "fp8-block": all products but the head and routers (by blocks, but experts too), or "stored": those that
    the checkpoint stores in FP8, as it stores them (`as_stored`). invariant: as in `bind`.
    """
    from pyllm.api.dummy import SHAPES, DummyWeights
    from pyllm.layers import Decoder, as_stored, bind
    from pyllm.layers.linear import check_plan
    from pyllm.load.staging import on_device
    from pyllm.models import spec_from_config

    if not isinstance(load_format, str) or load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format is {shown(load_format)}, expected 'auto' or 'dummy'")
    if weights is not None and not isinstance(weights, Mapping):
        raise ValueError(f"weights is {shown(weights)}, expected a mapping, checkpoint name -> tensor")
    if not isinstance(model, (str, Path, Decoder)):
        raise ValueError(f"model is a {type(model).__name__}, expected a Decoder, a directory, a .gguf file or demo")
    where, checkpoint, config = pick_device(device), None, {}
    if isinstance(model, Decoder):
        spec, name = model, "model"
        if (weights is None) == (load_format == "auto"):
            raise ValueError("a model that is a declaration needs weights (checkpoint name -> tensor), or load_format='dummy'; one of them")
    elif weights is not None:
        raise ValueError("weights are given beside a path; pass the declaration as model, or leave weights out")
    elif load_format == "dummy":
        config = SHAPES[str(model)] if str(model) in SHAPES else read_config(model)
        spec, name = spec_from_config(config), str(model)
    else:
        checkpoint = open_model_files(model)
        spec, name, config, weights = spec_from_config(checkpoint.config), checkpoint.name, checkpoint.config, checkpoint.tensors
        _check_tied(checkpoint, spec)
    kind = pick_dtype(dtype, where, config)
    source = on_device(weights, where) if weights is not None else DummyWeights(spec, where, kind)
    stored = isinstance(quant, str) and quant == "stored" and weights is not None
    plan = as_stored(spec, weights) if stored and weights is not None else quant_plan(quant)
    check_plan("LLM", spec, () if isinstance(quant, str) else plan)
    if not plan and weights is not None and (wide := as_stored(spec, weights)):
        warnings.warn(
            f"{name}: {len(wide)} weights are stored in FP8 and expanded to {kind}; quant='stored' takes them as they are", stacklevel=3
        )
    _check_room(name, weight_bytes(spec, kind, plan), kind, where)
    with progress_bar(f"loading {name}", len(source), "tensors", progress) as advance:
        module = bind(spec, source, quant=plan, device=where, dtype=kind, invariant=invariant, progress=advance)
    found = _tokenizer(tokenizer) if tokenizer is not None else checkpoint.tokenizer if checkpoint is not None else None
    return Parts(name, spec, module, where, kind, checkpoint, found, checkpoint.eos_ids if checkpoint is not None else ())


def read_config(model: str | Path) -> dict[str, Any]:
    """config.json of a directory, or the file itself: all that random weights need."""
    from pyllm.api.dummy import SHAPES
    from pyllm.load.jsonfile import read_json_object

    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model is {str(model)!r}, expected a directory with a config.json, or one of {', '.join(SHAPES)}")
    return read_json_object(path, 4 << 20)


def model_config(model: str | Path) -> dict[str, Any]:
    """What explains and plans a model: a config.json, whose weights need not be there, what a .gguf file says, or a known shape."""
    from pyllm.api.dummy import SHAPES

    path = Path(model)
    if str(model) in SHAPES:
        return SHAPES[str(model)]
    return read_config(path) if path.name == "config.json" or (path / "config.json").is_file() else open_model_files(model).config


def _tokenizer(given: Tokenizer | str | Path) -> Tokenizer:
    from pyllm.load.tokenizer import Tokenizer

    if isinstance(given, Tokenizer):
        return given
    if not isinstance(given, (str, Path)):
        raise ValueError(f"tokenizer is {shown(given)}, expected a Tokenizer, a directory or a tokenizer.json")
    path = Path(given)
    return Tokenizer.from_file(path / "tokenizer.json" if path.is_dir() else path)


def quant_plan(quant: str | QuantPlan) -> QuantPlan:
    if not isinstance(quant, str):
        pairs = listed(quant)
        if pairs is None:
            raise ValueError(f"quant is {shown(quant)}, expected 'fp8', or pairs (glob, Format) as in bind")
        return pairs
    from pyllm.layers import Fp8

    known = {"fp8": Fp8(), "fp8-block": Fp8(granularity="block")}
    if quant not in known:
        words = ", ".join(map(repr, known))
        raise ValueError(f"quant is {quant!r}, expected {words}, 'stored' with a checkpoint, or pairs (glob, Format) as in bind")
    plain = ("*lm_head", "*embed_out", "*.gate", "*.router", "*.shared_expert_gate")  # head and routers: few bytes, and much hangs on them
    experts = ("*.experts.*",) if quant == "fp8-block" else ()
    return (*((name, None) for name in (*plain, *experts)), ("*", known[quant]))


def _check_room(name: str, need: int, dtype: torch.dtype, device: torch.device) -> None:
    free = free_bytes(device)
    if need > free:
        raise MemoryError(f"{name}: the weights take {show_bytes(need)} in {dtype}, {show_bytes(free)} are free on {device}")


def _check_tied(checkpoint: Checkpoint, spec: Decoder) -> None:
    """A head beside a config that says it is tied: stored twice is fine, another one must not be dropped unsaid."""
    tensors, first = checkpoint.tensors, f"{spec.at}." if spec.at else ""
    names = f"{first}lm_head.weight", f"{first}{spec.embed.name}.weight"
    if spec.head is None and names[0] in tensors:
        head, embed = (tensors[name] for name in names)
        if head.shape != embed.shape or not torch.equal(head, embed):
            raise ValueError(f"{checkpoint.path}: tie_word_embeddings is set, but {names[0]} differs from {names[1]}")


def open_model_files(path: str | Path) -> Checkpoint:
    """The checkpoint at a path, or the demo model's for "demo" (a directory of that name is reached as ./demo)."""
    from pyllm.api.dummy import SHAPES
    from pyllm.load.checkpoint import open_checkpoint
    from pyllm.load.demo import demo_model_path

    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"model is {shown(path)}, expected a directory, a .gguf file or demo")
    if str(path) in SHAPES and not Path(path).exists():
        raise ValueError(f"model is {str(path)!r}, a shape without weights: load_format='dummy' (--load-format dummy) makes random ones")
    return open_checkpoint(demo_model_path() if str(path) == "demo" else path)


def pick_device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if _native.kernels_available() else "cpu")
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"device is {shown(device)}, expected cpu, cuda or cuda:N") from None
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
    """None or "auto": fp32 on a CPU, on a GPU the checkpoint's 16-bit type, bf16 where it has none."""
    if isinstance(dtype, torch.dtype):
        name = str(dtype).removeprefix("torch.")
    elif dtype is not None and not (isinstance(dtype, str) and dtype == "auto"):
        name = dtype if isinstance(dtype, str) else ""
    elif device.type == "cpu":
        return torch.float32
    else:
        saved = str(config.get("dtype") or config.get("torch_dtype"))
        return torch.float16 if saved == "float16" else torch.bfloat16
    if name not in DTYPES:
        raise ValueError(f"dtype is {shown(dtype)}, expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
