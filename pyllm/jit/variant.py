"""AttentionVariant: what a user writes. No CUDA here: declarations with variants are made, compared and printed everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "int32": torch.int32}
PLACES = ("b", "h", "q_pos", "k_pos", "q_len", "kv_len", "token")
MOST = 8  # parameters: the slots of SimpleAttentionParams

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_KNOWN: dict[AttentionVariant, int] = {}


@dataclass(frozen=True)
class Param:
    """A named parameter of a variant.

    value: a number (float in C++), a tuple of numbers (`const float*`, kept in fp32 on the device), or "float32" / "int32": a tensor of
    that dtype that each call brings (`const float*` / `const int*`, contiguous). Values are no part of the compiled code.
    """

    name: str
    value: float | tuple[float, ...] | str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name) or self.name in (*PLACES, "s", "p"):
            raise ValueError(f"Param: name is {self.name!r}, expected an identifier other than s, p, {', '.join(PLACES)}")
        if isinstance(self.value, list):
            object.__setattr__(self, "value", tuple(self.value))
        if isinstance(self.value, str):
            ok = self.value in DTYPES
        else:
            ok = all(isinstance(x, int | float) for x in (self.value if isinstance(self.value, tuple) else (self.value,)))
        if not ok or self.value == ():
            raise ValueError(f"Param {self.name}: value is {self.value!r}, expected a number, a tuple of numbers, 'float32' or 'int32'")

    @property
    def ctype(self) -> str:
        if isinstance(self.value, str):
            return "const int*" if self.value == "int32" else "const float*"
        return "const float*" if isinstance(self.value, tuple) else "float"


@dataclass(frozen=True)
class ScorePlaces:
    """Where the scores `[H, rows, keys]` of one sequence stand, for a reference: tensors that broadcast to them, or plain numbers."""

    b: int
    h: Tensor  # [H, 1, 1]
    q_pos: Tensor  # [1, rows, 1]
    k_pos: Tensor  # [1, 1, keys]
    q_len: int
    kv_len: int
    token: Tensor  # [1, rows, 1]


@dataclass(frozen=True)
class AttentionVariant:
    """How attention's scores are changed and masked, as C++.

    score: an expression (or, with a `return` in it, a function body) of type float: the new score. mask: the same of type bool: whether the
    row sees the key; it is asked only about keys inside length, causality, window and custom mask, and a score only where it says yes.
    Both see `float s` (score only: scale * q k^T), `int b` (sequence), `int h` (query head, of all ranks' heads), `int q_pos`, `int k_pos`
    (positions in the sequence), `int q_len`, `int kv_len` (rows and keys of the sequence), `int token` (row of q), the parameters by
    name, and CUDA's device functions. A softcap of the call is applied after `score`.
    reference: the same in PyTorch, which is what a CPU runs: `reference(s, at, **params)` gets the scores fp32 `[H, rows, keys]` of one
    sequence and their `ScorePlaces`, and returns the new ones, with -inf where the mask says no.
    name: an identifier, for messages, explain and the compiler's line numbers.
    """

    name: str
    score: str = "s"
    mask: str = "true"
    params: tuple[Param, ...] = ()
    reference: Callable[..., Tensor] | None = None
    number: int = field(init=False, repr=False, compare=False)  # what ops get instead of the object

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"AttentionVariant: name is {self.name!r}, expected an identifier")
        for what in ("score", "mask"):
            if not isinstance(getattr(self, what), str) or not getattr(self, what).strip():
                raise ValueError(f"AttentionVariant {self.name}: {what} is {getattr(self, what)!r}, expected C++ code")
        object.__setattr__(self, "params", tuple(self.params))
        for p in self.params:
            if not isinstance(p, Param):
                raise ValueError(f"AttentionVariant {self.name}: params holds {p!r}, expected a Param")
        names = [p.name for p in self.params]
        if len(set(names)) < len(names) or len(names) > MOST:
            raise ValueError(f"AttentionVariant {self.name}: params are {', '.join(names)}, expected at most {MOST} different names")
        if self.reference is not None and not callable(self.reference):
            raise ValueError(f"AttentionVariant {self.name}: reference is {self.reference!r}, expected a function")
        object.__setattr__(self, "number", _KNOWN.setdefault(self, len(_KNOWN)))

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the tensors that each call brings."""
        return tuple(p.name for p in self.params if isinstance(p.value, str))

    def tensors(self, given: Mapping[str, Tensor] | None) -> list[Tensor]:
        """The tensors that a call brings, in the order of params. Raises where names, dtypes or layout are not those of params."""
        given = dict(given or {})
        found = []
        for p in self.params:
            if not isinstance(p.value, str):
                continue
            if p.name not in given:
                raise ValueError(f"variant_attention: tensors has no {p.name!r}, which variant {self.name} takes ({p.value})")
            t = given.pop(p.name)
            if t.dtype != DTYPES[p.value] or not t.is_contiguous():
                kind = f"{t.dtype}{'' if t.is_contiguous() else ', not contiguous'}"
                raise ValueError(f"variant_attention: tensors[{p.name!r}] is {kind}, expected contiguous {p.value}")
            found.append(t)
        if given:
            raise ValueError(f"variant_attention: tensors has {', '.join(given)}, which variant {self.name} does not take")
        return found


def numbered(number: int) -> AttentionVariant:
    """The variant that an op was called with."""
    return list(_KNOWN)[number]


def apply_reference(variant: AttentionVariant, s: Tensor, at: ScorePlaces, tensors: list[Tensor]) -> Tensor:
    """What a CPU runs in place of the C++."""
    if variant.reference is None:
        raise ValueError(f"variant_attention: variant {variant.name} has no reference, which is what runs on a CPU; give it reference=")
    brought = iter(tensors)
    values: dict[str, Tensor | float] = {}
    for p in variant.params:
        if isinstance(p.value, str):
            values[p.name] = next(brought)
        else:
            values[p.name] = torch.tensor(p.value, dtype=torch.float32) if isinstance(p.value, tuple) else p.value
    out = variant.reference(s, at, **values)
    if not isinstance(out, Tensor) or out.shape != s.shape:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"variant_attention: reference of variant {variant.name} returned {got}, expected scores of shape {tuple(s.shape)}"
        )
    return out


PLAIN = AttentionVariant("plain", reference=lambda s, at: s)
"""Head dims that the ahead-of-time build leaves out go through this one."""
