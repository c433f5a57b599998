"""Baselines from other libraries: vLLM's kernels, loaded as bare libraries (no vLLM package) from `peers/` at the repository root.

`peers/` is not in git. It may hold `_C_stable_libtorch.abi3.so`, `_moe_C_stable_libtorch.abi3.so` and `_vllm_fa3_C.abi3.so` of a
vLLM wheel, plain or `.xz`. Calls name their arguments as the op's schema does; a name that the schema does not know, or one that is
lacking, makes the peer "incompatible" and shows the schema.
"""

from __future__ import annotations

import lzma
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bench.case import ROOT, PeerMissing

FOLDER = ROOT / "peers"
VLLM_LIBRARIES = {
    "_C": "_C_stable_libtorch.abi3.so",
    "_C_cache_ops": "_C_stable_libtorch.abi3.so",
    "_moe_C": "_moe_C_stable_libtorch.abi3.so",
    "_vllm_fa3_C": "_vllm_fa3_C.abi3.so",
}
FP8 = torch.float8_e4m3fn


@cache
def load_library(folder: Path, name: str) -> str:
    """Load `folder/name` or `folder/name.xz`; returns "" or the reason why it is not there."""
    plain, packed = folder / name, folder / f"{name}.xz"
    if not plain.is_file() and not packed.is_file():
        return "not installed"
    with tempfile.TemporaryDirectory() as scratch:
        path = plain
        if not plain.is_file():
            path = Path(scratch) / name
            with lzma.open(packed) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 22)
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            return f"does not load: {str(error).splitlines()[0]}"
    return ""


def bind(op: Any, given: dict[str, Any]) -> tuple[Any, ...]:
    """Positional arguments for `op` (an overload packet) from names; `PeerMissing` if they do not fit its schema."""
    schema = op.default._schema
    names = [a.name for a in schema.arguments]
    unknown = sorted(set(given) - set(names))
    lacking = [a.name for a in schema.arguments if a.name not in given and not a.has_default_value()]
    if unknown or lacking:
        detail = "; ".join(f"{what} {', '.join(which)}" for what, which in (("no argument", unknown), ("needs", lacking)) if which)
        raise PeerMissing(f"incompatible: {detail}: {schema}")
    return tuple(given.get(a.name, a.default_value) for a in schema.arguments)


class Vllm:
    """The row-wise kernels of vLLM's C library. Each method allocates its outputs, as ours do, and returns them."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder

    def missing(self, namespace: str = "_C") -> str:
        """Why the library behind torch.ops.<namespace> cannot be used, or ""."""
        return load_library(self.folder, VLLM_LIBRARIES[namespace])

    def call(self, name: str, /, *, namespace: str = "_C", **given: Any) -> Any:
        """torch.ops.<namespace>.<name> with arguments named as in its schema."""
        reason = self.missing(namespace)
        if reason:
            raise PeerMissing(reason)
        op = getattr(getattr(torch.ops, namespace), name, None)
        if op is None:
            raise PeerMissing(f"incompatible: no torch.ops.{namespace}.{name}")
        return op.default(*bind(op, given))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self.call("rms_norm", result=out, input=x, weight=weight, epsilon=eps)
        return out

    def fused_add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.call("fused_add_rms_norm", input=x, residual=residual, weight=weight, epsilon=eps)
        return x

    def rms_norm_static_fp8(self, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x, dtype=FP8)
        self.call("rms_norm_static_fp8_quant", result=out, input=x, weight=weight, scale=scale, epsilon=eps)
        return out

    def fused_add_rms_norm_static_fp8(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, eps: float
    ) -> torch.Tensor:
        out = torch.empty_like(x, dtype=FP8)
        self.call("fused_add_rms_norm_static_fp8_quant", result=out, input=x, residual=residual, weight=weight, scale=scale, epsilon=eps)
        return out

    def rms_norm_token_fp8(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, scale = torch.empty_like(x, dtype=FP8), _scales(x, 1)
        given = {"result": out, "input": x, "weight": weight, "scale": scale, "epsilon": eps, "scale_ub": None, "residual": residual}
        self.call("rms_norm_dynamic_per_token_quant", **given)
        return out, scale

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = _half(x)
        self.call("silu_and_mul", result=out, input=x)
        return out

    def gelu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = _half(x)
        self.call("gelu_and_mul", out=out, input=x)
        return out

    def gelu_tanh_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        out = _half(x)
        self.call("gelu_tanh_and_mul", out=out, input=x)
        return out

    def rotary_embedding(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None, head_size: int, cos_sin: torch.Tensor, neox: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = {"positions": positions, "query": q, "key": k, "head_size": head_size, "cos_sin_cache": cos_sin, "is_neox": neox}
        self.call("rotary_embedding", **given)
        return q, k

    def fused_qk_norm_rope(
        self,
        qkv: torch.Tensor,
        H: int,
        K: int,
        D: int,
        eps: float,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cos_sin: torch.Tensor,
        neox: bool,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        heads = {"num_heads_q": H, "num_heads_k": K, "num_heads_v": K, "head_dim": D, "eps": eps}
        rope = {"q_weight": q_weight, "k_weight": k_weight, "cos_sin_cache": cos_sin, "is_neox": neox, "position_ids": positions}
        self.call("fused_qk_norm_rope", qkv=qkv, **heads, **rope)
        return qkv

    def reshape_and_cache(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        kv_dtype: str = "auto",
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"key": k, "value": v, "key_cache": k_cache, "value_cache": v_cache, "slot_mapping": slots, "kv_cache_dtype": kv_dtype}
        scales = {"k_scale": _one(k.device) if k_scale is None else k_scale, "v_scale": _one(k.device) if v_scale is None else v_scale}
        self.call("reshape_and_cache_flash", namespace="_C_cache_ops", **given, **scales)
        return k_cache, v_cache

    def fp8_static(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x, dtype=FP8)
        self.call("static_scaled_fp8_quant", result=out, input=x, scale=scale)
        return out

    def fp8_tensor(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # Not zeroed here: a fill would be a launch more in the peer's time, and what the scale starts from does not change the time.
        out, scale = torch.empty_like(x, dtype=FP8), torch.empty(1, dtype=torch.float32, device=x.device)
        self.call("dynamic_scaled_fp8_quant", result=out, input=x, scale=scale)
        return out, scale

    def fp8_token(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, scale = torch.empty_like(x, dtype=FP8), _scales(x, 1)
        self.call("dynamic_per_token_scaled_fp8_quant", result=out, input=x, scale=scale, scale_ub=None)
        return out, scale

    def fp8_group(self, x: torch.Tensor, group: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
        out, scale = torch.empty_like(x, dtype=FP8), _scales(x, x.shape[-1] // group)
        given = {"input": x, "output_q": out, "output_s": scale, "group_size": group, "eps": 1e-10, "fp8_min": -448.0, "fp8_max": 448.0}
        plain = {"scale_ue8m0": False, "dummy_is_scale_transposed": False, "dummy_is_tma_aligned": False}
        self.call("per_token_group_fp8_quant", **given, **plain)
        return out, scale


@cache
def _one(device: torch.device) -> torch.Tensor:
    """Made once, outside of the timed calls."""
    return torch.ones(1, dtype=torch.float32, device=device)


def _half(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)


def _scales(x: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.empty(*x.shape[:-1], columns, dtype=torch.float32, device=x.device)


def has(name: str) -> bool:
    """Whether a peer ("vllm", "torch") can be measured here."""
    return {"torch": lambda: True, "vllm": lambda: not vllm.missing()}[name]()


def status() -> dict[str, str]:
    """Peer library -> "" or why it is missing, for the head of a run."""
    return {library: load_library(vllm.folder, library) for library in dict.fromkeys(VLLM_LIBRARIES.values())}


def try_baseline(fn: Callable[[Any], Any], inputs: Any) -> str:
    """Run a baseline once: "" or the text for its column."""
    try:
        fn(inputs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except PeerMissing as missing:
        return str(missing)
    except Exception as error:  # whatever a peer raises must not end the run: its column says what happened
        return f"failed: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


vllm = Vllm()
