"""The C++ that NVRTC gets for one variant: its functor, then the kernel template of csrc/attention."""

from __future__ import annotations

import ctypes
import hashlib
from functools import cache
from pathlib import Path

import torch

from pyllm.jit.params import Params, shared_bytes
from pyllm.jit.variant import AttentionVariant

ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
ENTRY = "attention/variant_attention.cuh"
_HERE = Path(__file__).resolve().parent
_ARGUMENTS = "const int b, const int h, const int q_pos, const int k_pos, const int q_len, const int kv_len, const int token"
_PASSED = "at.b, at.h, at.q_pos, at.k_pos, at.q_len, at.kv_len, at.token"


def template_folder() -> Path:
    """csrc of the source tree, or the copy of its templates in an installed package."""
    for folder in (_HERE / "csrc", _HERE.parent.parent / "csrc"):
        if (folder / ENTRY).is_file():
            return folder
    raise FileNotFoundError(f"pyllm.jit: {ENTRY} is in neither {_HERE / 'csrc'} nor {_HERE.parent.parent / 'csrc'}; reinstall pyllm")


def include_folders() -> tuple[Path, Path]:
    return template_folder(), _HERE / "include"


TEMPLATES = (
    ENTRY,
    "attention/simple_attention.cuh",
    "attention/simple_tile.cuh",
    "attention/simple_params.cuh",
    "attention/mma.cuh",
    "common/pdl.cuh",
)


@cache
def templates_digest() -> str:
    sha = hashlib.sha256()
    for path in (*(template_folder() / name for name in TEMPLATES), _HERE / "include" / "cstdint"):
        sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()


def _function(variant: AttentionVariant, what: str) -> str:
    """One member function; the compiler counts lines from the user's first, in a "file" that names variant and part."""
    code, result = getattr(variant, what), "float" if what == "score" else "bool"
    arguments = f"float s, {_ARGUMENTS}" if what == "score" else _ARGUMENTS
    body = code if "return" in code.replace(";", " ").split() else f"return (\n#line 1\n{code}\n);"
    first = "" if body is not code else "#line 1\n"
    return (
        f"  __device__ __forceinline__ {result} user_{what}({arguments}) const {{\n"
        f'#line 1 "{variant.name}.{what}"\n{first}{body}\n'
        f'#line 1 "pyllm generated"\n  }}\n'
    )


def generate(variant: AttentionVariant, dim: int, value_dim: int, dtype: torch.dtype, fp8: bool = False) -> str:
    fields = "".join(f"  {p.ctype} {p.name};\n" for p in variant.params)
    reads = [
        f"{p.name}({'__int_as_float(static_cast<int>' if p.ctype == 'float' else f'reinterpret_cast<{p.ctype}>('}(p.slots[{i}])))"
        for i, p in enumerate(variant.params)
    ]
    begin = f" : {', '.join(reads)}" if reads else ""
    shapes = "\n".join(
        f"static_assert(pyllm::attention::SimpleShape<PYLLM_ELEMENT, {dim}, {value_dim}, {str(few).lower()}>::kSmem == "
        f"{shared_bytes(dim, value_dim, few)});"
        for few in (False, True)
    )
    return f"""#define INFINITY __int_as_float(0x7f800000)
#define PYLLM_ELEMENT {ELEMENTS[dtype]}
#define PYLLM_FP8 {str(fp8).lower()}
#define PYLLM_DIM {dim}
#define PYLLM_VALUE_DIM {value_dim}
#include "attention/simple_attention.cuh"
struct Variant {{
  static constexpr bool kSameScore = {str(variant.score.strip() == "s").lower()};
{fields}
  __device__ __forceinline__ explicit Variant(const pyllm::SimpleAttentionParams& p){begin} {{}}
{_function(variant, "score")}
{_function(variant, "mask")}
  __device__ __forceinline__ float score(float s, const pyllm::attention::ScorePlace& at) const {{ return user_score(s, {_PASSED}); }}
  __device__ __forceinline__ bool mask(const pyllm::attention::ScorePlace& at) const {{ return user_mask({_PASSED}); }}
}};
#include "{ENTRY}"
static_assert(sizeof(pyllm::SimpleAttentionParams) == {ctypes.sizeof(Params)});
{shapes}
"""
