"""SamplingParams: defaults, what unset means, and an error for everything that is not allowed."""

from __future__ import annotations

import math

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


def test_unknown_and_positional_arguments_are_errors() -> None:
    with pytest.raises(TypeError, match="frequency"):
        SamplingParams(frequency=1.0)
    with pytest.raises(TypeError):
        SamplingParams(0.5)
