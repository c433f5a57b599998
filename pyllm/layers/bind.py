"""bind: a declaration plus a checkpoint -> an `nn.Module`, strict both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pyllm.layers.declared import check_declared
from pyllm.layers.formats import Format, QuantPlan  # noqa: F401 (the latter means the former)
from pyllm.layers.invariant import check_invariant
from pyllm.layers.linear import check_plan
from pyllm.layers.spec import Spec, Weight, need_sizes, path_of
from pyllm.layers.stored import expand, stored_as
from pyllm.layers.typed import typed_call

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORED = (*DTYPES, torch.float64)


@dataclass
class Env:
    """What every node of one bind shares."""

    state: Mapping[str, Tensor]
    quant: QuantPlan
    rank: int
    tp: int
    device: torch.device
    dtype: torch.dtype
    progress: Callable[[str], None] | None = None
    fuse: bool = True
    invariant: bool = False
    prefix: str = ""
    used: set[str] = field(default_factory=set)

    def held(self, weight: Weight, path: str) -> list[tuple[str, tuple[int, ...] | None]]:
        """The names that a tensor is made from, with the shapes of those that the checkpoint has."""
        names = weight.sources(path)
        found = [next((n for n in (name, name.removeprefix(f"{self.prefix}.")) if n in self.state), None) for name in names]
        return [(name, None if n is None else tuple(self.state[n].shape)) for name, n in zip(names, found, strict=True)]

    def pass_over(self, weight: Weight, path: str) -> None:
        """These may be there, and are not needed."""
        self.used.update(n for name in weight.sources(path) for n in (name, name.removeprefix(f"{self.prefix}.")) if n in self.state)

    def get(self, name: str, shape: tuple[int, ...] | None, as_it_is: bool = False) -> Tensor:
        """shape: None for any. as_it_is: not expanded."""
        wanted, short, stored = name, name.removeprefix(f"{self.prefix}."), _itself if as_it_is else stored_as
        names = stored(self.state, name)
        names = stored(self.state, short) if names[0] not in self.state else names
        if names[0] not in self.state:
            with_shape = f" with shape {shape}" if shape is not None else ""
            raise ValueError(f"checkpoint has no tensor {wanted!r}, which the declaration needs{with_shape}")
        name, first = names[0], names[0] not in self.used
        self.used.update(names)
        t = expand(self.state, names, self.device)
        if not isinstance(t, Tensor) or t.is_meta:
            came = "on the meta device, without values" if isinstance(t, Tensor) else f"a {type(t).__name__}"
            raise ValueError(f"checkpoint tensor {name!r} is {came}, expected a Tensor")
        if shape is not None and tuple(t.shape) != shape:
            raise ValueError(f"checkpoint tensor {name!r} has shape {tuple(t.shape)}, the declaration expects {shape}")
        if self.progress and first:  # several parts may be rows of one tensor
            for part in names:
                self.progress(part)
        return t

    def read(self, weight: Weight, path: str) -> Tensor:
        t = weight.load(partial(self.get, as_it_is=True) if weight.keep else self.get, path, self.rank, self.tp)
        if not weight.keep and t.dtype not in STORED:  # a quantized tensor without its scales would load as noise
            raise ValueError(f"checkpoint tensor {weight.sources(path)[0]!r} is {t.dtype}, expected a plain floating-point type")
        return t.to(self.device, t.dtype if weight.keep else torch.float32 if weight.fp32 else self.dtype).contiguous()


def _itself(state: Mapping[str, Tensor], name: str) -> tuple[str, ...]:
    return (name,)


class Bound(nn.Module):
    """A spec plus its tensors. `named_parameters()` are the runtime (fused) names; hooks, `.to` and `state_dict` work as always."""

    def __init__(self, spec: Spec, path: str, env: Env) -> None:
        super().__init__()
        self.spec, self.path, self.rank, self.tp, self.fuse = spec, path_of(spec, path), env.rank, env.tp, env.fuse
        self.invariant = env.invariant
        for name, child in spec.children().items():
            if isinstance(child, tuple):
                self.add_module(name, nn.ModuleList(Bound(c, self.path, env) for c in child))
            else:
                self.add_module(name, Bound(child, self.path, env))
        spec.load(self, env)

    def put(self, name: str, t: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(t, requires_grad=False))

    def forward(self, *args: Any) -> Any:
        return self.spec.forward(self, *args)


@typed_call
def bind(
    spec: Spec,
    state: Mapping[str, Tensor],
    *,
    quant: QuantPlan = (),
    rank: int = 0,
    tp: int = 1,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    strict: bool = True,
    fuse: bool = True,
    invariant: bool = False,
    progress: Callable[[str], None] | None = None,
) -> Bound:
    """Load `state` (checkpoint name -> tensor) into `spec` for one tensor-parallel rank.

    quant: ordered (glob, Format) pairs. dtype: of weights and activations where a Format says nothing; norm weights stay fp32.
    fuse=False runs the separate ops of every fusion (the same maths with one rounding more each); `explain(fuse=False)` shows them.
    invariant=True: on CUDA the bits of a token's logits depend on its own sequence alone (`pyllm.ops.invariant`), nothing is fused, and
    what has no such kernel is refused; on a CPU it changes nothing.
    progress: called with each checkpoint name as it is read.
    What is stored quantized in a way that `pyllm.layers.stored` knows is expanded as it is read.
    Errors (ValueError): a tensor that is missing, one that nobody asked for (strict; the spec's `ignore` globs excepted), a shape that
    disagrees
    with the declaration, a `tp` that does not fit, parts of one GEMM with different formats. Each names the tensor.
    """
    need_sizes("bind", tp=tp)
    if dtype not in DTYPES:
        raise ValueError(f"bind: dtype is {dtype!r}, expected torch.float32, torch.bfloat16 or torch.float16")
    check_plan("bind", spec, quant)
    if not 0 <= rank < tp:
        raise ValueError(f"bind: rank is {rank}, expected 0 <= rank < tp={tp}")
    check_declared(spec, tp)
    try:
        where = torch.device(device)
    except RuntimeError:
        raise ValueError(f"bind: device is {device!r}, expected one of torch's, as cpu or cuda:0") from None
    if invariant and where.type == "cuda":
        check_invariant(spec, quant, dtype)
    fuse = fuse and not invariant
    env = Env(state, quant, rank, tp, where, dtype, progress, fuse, invariant, getattr(spec, "prefix", ""))
    module = Bound(spec, "", env)
    ignore = getattr(spec, "ignore", ())
    left = sorted(k for k in state if k not in env.used and not any(fnmatchcase(k, g) for g in ignore))
    if strict and left:
        shown = ", ".join(left[:4]) + (", ..." if len(left) > 4 else "")
        raise ValueError(f"checkpoint has {len(left)} tensors that no layer asked for: {shown}")
    return module.eval()
