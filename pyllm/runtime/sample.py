"""From the logits of a step to its tokens and log-probabilities: one op call for all rows, each with its own parameters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pyllm.ops.sampling import sample_tokens, token_logprobs
from pyllm.runtime.request import Request, TokenLogprob


def sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Token ids `[R]` int32 on the logits' device, row i for requests[i]; -1 where a row has a NaN. All greedy: no parameters travel."""
    if all(r.params.greedy for r in requests):
        return sample_tokens(logits)
    columns: dict[str, np.ndarray] = {
        "seed": np.array([r.seed for r in requests], np.int64),
        "temperature": np.array([r.params.temperature for r in requests], np.float32),
        "top_k": np.array([r.params.top_k for r in requests], np.int32),
        "top_p": np.array([r.params.top_p for r in requests], np.float32),
        "min_p": np.array([r.params.min_p for r in requests], np.float32),
        "index": np.zeros(len(requests), np.int32),
        "position": np.array([r.length for r in requests], np.int32),
    }
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    columns = {name: c for name, c in columns.items() if name not in off or (c != off[name]).any()}
    return sample_tokens(logits, **_to_device(columns, logits.device))


def _to_device(columns: dict[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """One copy for all of them: the bytes side by side, the widest first so that each stays aligned."""
    whole = torch.from_numpy(np.frombuffer(bytearray(b"".join(c.tobytes() for c in columns.values())), np.uint8)).to(device)
    out, at = {}, 0
    for name, c in columns.items():
        out[name] = whole[at : at + c.nbytes].view(torch.from_numpy(c).dtype)
        at += c.nbytes
    return out


def logprobs_of(logits: Tensor, tokens: Tensor, requests: Sequence[Request]) -> dict[int, TokenLogprob]:
    """Row -> the log-probability of its token, for the rows whose request asked."""
    rows = [i for i, r in enumerate(requests) if r.params.logprobs is not None]
    if not rows:
        return {}
    if len(rows) < len(requests):
        index = torch.tensor(rows, device=logits.device)
        logits, tokens = logits[index], tokens[index]
    top_n = max(requests[i].params.logprobs or 0 for i in rows)
    # A row that failed (-1) is never reported; it only must not index outside the row.
    logprob, rank, top, top_ids = (t.tolist() for t in token_logprobs(logits, tokens.clamp_min(0), top_n))
    out = {}
    for j, (i, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
        n = requests[i].params.logprobs or 0
        out[i] = TokenLogprob(token, logprob[j], rank[j], tuple(zip(top_ids[j][:n], top[j][:n], strict=True)))
    return out
