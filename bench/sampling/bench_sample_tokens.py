"""sample_tokens against torch and vLLM: reads the row of logits once, so bytes = B * V * size; the floor adds about 2 us of launch."""

from __future__ import annotations

import torch

from bench import Case, Goal, compiled
from bench.shapes import Shapes
from pyllm.ops.sampling import sample_tokens

Set = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "top-k top-p min-p": {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    "top-p": {"top_p": 0.9},
}
TYPES = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}


def sets(n: int, B: int, V: int, dtype: torch.dtype, filters: dict[str, float]) -> list[Set]:
    """Normal logits of deviation 2; the third tensor is the torch baselines' noise, drawn beforehand in their favour."""
    out = []
    for _ in range(n):
        given = {name: torch.full((B,), v, dtype=TYPES[name], device="cuda") for name, v in {"temperature": 0.8, **filters}.items()}
        given["seed"] = torch.randint(0, 2**62, (B,), device="cuda")
        given["index"] = torch.zeros(B, dtype=torch.int32, device="cuda")
        given["position"] = torch.arange(B, dtype=torch.int32, device="cuda")
        out.append(((torch.randn(B, V, device="cuda") * 2).to(dtype), given, torch.empty(B, V, device="cuda").exponential_()))
    return out


def plain(s: Set) -> torch.Tensor:
    """The usual composition: sort, mask, softmax, race of exponentials."""
    logits, given, noise = s
    x = logits.float() / given["temperature"][:, None].clamp(min=1e-5)
    if "top_k" in given or "top_p" in given:
        x, ids = x.sort(dim=-1, descending=True)
        if "top_k" in given:
            x = x.masked_fill(torch.arange(x.shape[1], device=x.device) >= given["top_k"][:, None], -torch.inf)
        p = x.softmax(-1)
        if "top_p" in given:
            p = p.masked_fill(p.cumsum(-1) - p >= given["top_p"][:, None], 0.0)
    else:
        p, ids = x.softmax(-1), None
    if "min_p" in given:
        p = p.masked_fill(p < given["min_p"][:, None] * p.amax(-1, keepdim=True), 0.0)
    at = (p / noise).argmax(-1, keepdim=True)
    return (at if ids is None else ids.gather(1, at))[:, 0].int()


def argmax(s: Set) -> torch.Tensor:
    return s[0].argmax(-1)


def flashinfer(s: Set) -> torch.Tensor:
    """FlashInfer's fused sampler, as vLLM calls it: top-k and top-p in one kernel after a softmax; it has no min-p there."""
    from bench.peers import PeerMissing

    try:
        import flashinfer.sampling as peer
    except ImportError as error:
        raise PeerMissing("not installed") from error
    logits, given, _ = s
    p = torch.softmax(logits.float() / given["temperature"][:, None], -1)
    if "top_k" in given:
        return peer.top_k_top_p_sampling_from_probs(p, given["top_k"], given["top_p"])
    return peer.top_p_sampling_from_probs(p, given["top_p"]) if "top_p" in given else peer.sampling_from_probs(p)


def goal(B: int, V: int, kind: str) -> Goal:
    if V > 128256:
        return Goal()
    few, many = {"greedy": (8.0, 40.0)}.get(kind, (15.0, 60.0))
    return Goal(us=few) if B == 1 else Goal(us=many) if B == 256 else Goal()


def case(B: int, V: int, dtype: torch.dtype, kind: str) -> Case:
    label = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return Case(
        name=f"B={B} V={V} {kind} {label}",
        dtype=label,
        bytes=B * V * dtype.itemsize,
        make=lambda n: sets(n, B, V, dtype, FILTERS[kind]),
        ours=lambda s: sample_tokens(s[0], **s[1]),
        baselines={"torch": argmax, "torch.compile": compiled(argmax)}
        if kind == "greedy"
        else {"torch": plain, "torch.compile": compiled(plain), "flashinfer": flashinfer},
        goal=goal(B, V, kind),
    )


def cases(shapes: Shapes) -> list[Case]:
    return [case(B, shapes.V, dtype, kind) for B in shapes.batches for dtype in (torch.bfloat16, torch.float32) for kind in FILTERS]
