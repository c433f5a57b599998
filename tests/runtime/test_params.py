"""SamplingParams: defaults, what unset means, and an error for everything that is not allowed."""

from __future__ import annotations

import contextlib
import math
import warnings

import numpy as np
import pytest

from pyllm.api.params import SamplingParams


def test_unset_is_greedy_and_a_cut_alone_samples() -> None:
    p = SamplingParams()
    assert (p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.max_tokens, p.logprobs) == (0.0, 0, 1.0, 0.0, None, 32, None)
    assert p.greedy
    assert SamplingParams(top_p=0.9).temperature == 1.0
    assert SamplingParams(min_p=0.1).temperature == 1.0
    assert SamplingParams(temperature=0, top_k=5).greedy
    assert not SamplingParams(temperature=0.1).greedy
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=3).stop_token_ids == (3,)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected a finite number, 0 or more"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True, expected a finite number"),
        ({"temperature": 1e308}, "temperature is 1e+308, expected 0, or 1.2e-38 to 3.4e+38 in magnitude (fp32)"),
        ({"temperature": 1e-300}, "temperature is 1e-300, expected 0, or 1.2e-38 to"),
        ({"temperature": 10**400}, f"temperature is 1{'0' * 76}..., expected 0, or 1.2e-38 to"),
        ({"temperature": 10**5000}, "temperature is a int, expected 0, or 1.2e-38 to"),
        ({"top_p": 1e-60}, "top_p is 1e-60, expected 0, or 1.2e-38 to"),
        ({"min_p": 1e-60}, "min_p is 1e-60, expected 0, or 1.2e-38 to"),
        ({"repetition_penalty": 1e39}, "repetition_penalty is 1e+39, expected 0, or 1.2e-38 to"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a finite number, more than 0"),
        ({"presence_penalty": -(10**39)}, "presence_penalty is -1000000000000000000000000000000000000000, expected 0, or 1.2e-38 to"),
        ({"frequency_penalty": 1e300}, "frequency_penalty is 1e+300, expected 0, or 1.2e-38 to"),
        ({"logit_bias": {1: 1e39}}, "logit_bias holds (1, 1e+39), expected token ids with numbers: infinite, 0, or 1.2e-38 to"),
        ({"logit_bias": {1: 10**400}}, "logit_bias holds (1, 1000000"),
        ({"logit_bias": {1: math.nan}}, "logit_bias holds (1, nan)"),
        ({"logit_bias": {1: 1e-39}}, "logit_bias holds (1, 1e-39)"),
        (
            {"include_stop_str_in_output": True},
            "include_stop_str_in_output is given without stop; a token of stop_token_ids is",
        ),
        ({"include_stop_str_in_output": True, "stop_token_ids": 3}, "include_stop_str_in_output is given without stop"),
        ({"skip_special_tokens": False, "detokenize": False}, "skip_special_tokens is False, but so is detokenize"),
        ({"stop": "x", "detokenize": False}, "stop needs the text, but detokenize is False; use stop_token_ids"),
        ({"top_k": -1}, "top_k is -1, expected an integer from 0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_p": 0}, "top_p is 0, expected more than 0, at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": 1.5}, "min_p is 1.5, expected 0 to 1"),
        ({"seed": -1}, "seed is -1"),
        ({"stop_token_ids": None}, "stop_token_ids is None, expected token ids"),
        ({"stop_token_ids": 5.5}, "stop_token_ids is 5.5, expected token ids"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": True}, "seed is True"),
        ({"max_tokens": 0}, "max_tokens is 0, expected an integer from 1"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"logprobs": 21}, "logprobs is 21, expected an integer from 0 to 20"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected True or False"),
        ({"stop_token_ids": (1, -5)}, "stop_token_ids holds -5"),
        ({"stop_token_ids": ("a",)}, "stop_token_ids holds 'a'"),
    ],
)
def test_errors(options, text) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**options)
    assert str(caught.value).startswith(f"SamplingParams: {text}")


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", FLOATS)
def test_every_number_that_is_taken_is_the_same_kind_of_number_in_fp32(name) -> None:
    """No warning of numpy's, no infinity, and no 0 that was none: the device has fp32."""
    largest, smallest = float(np.finfo(np.float32).max), float(np.finfo(np.float32).smallest_normal)
    edges = [largest, smallest, np.nextafter(largest, math.inf), np.nextafter(smallest, 0), 1.0, 0.5, 1e30, 1e-30]
    taken = []
    for value in map(float, edges):
        with contextlib.suppress(ValueError):
            taken.append(getattr(SamplingParams(**{name: value}), name))
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        narrow = np.array(taken).astype(np.float32)
    assert np.isfinite(narrow).all() and (narrow > 0).all() and len(taken) >= 3
    assert float(np.nextafter(largest, math.inf)) not in taken and float(np.nextafter(smallest, 0)) not in taken


def test_unknown_and_positional_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="frequency"):
        SamplingParams(frequency=1.0)
    with pytest.raises(TypeError):
        SamplingParams(0.5)
