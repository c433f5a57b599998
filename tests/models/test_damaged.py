"""Damaged config.json files: whatever stands in a field, the answer is a declaration or one ValueError, soon."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

from pyllm.layers import Decoder
from pyllm.models import spec_from_config
from tests.models.test_published import FILES
from tests.models.test_text_part import GEMMA_4B, SCOUT

JUNK: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 1 << 40, -(1 << 70), 0.0, -0.5, 0.3, 1e-300, 1e-20, 1e20, 1e308, float("inf"), float("nan"),
    "", "x", "silu", "default", [], [1], [[]], [None], ["full_attention"], [True] * 4, [1.5] * 48, {}, {"a": 1}, {"rope_type": "yarn"},
    {"type": []}, {"factor": {}}, {"full_attention": {"rope_type": "default"}},
    {"rope_type": "longrope", "short_factor": [0], "long_factor": "x"},
]  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {name: config | {"num_hidden_layers": 4} for name, (_, config) in FILES.items() if name != "gpt2"}
CONFIGS |= {
    "gpt2": FILES["gpt2"][1] | {"n_layer": 2},
    "scout": {"architectures": ["Llama4ForConditionalGeneration"], "text_config": SCOUT},
    "gemma": {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": GEMMA_4B},
}
TIMES, SEED = 150, 0


def damaged(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One to three fields with junk in them, or gone, also of what is nested."""
    out = {k: dict(v) if isinstance(v, dict) else v for k, v in config.items()}
    for _ in range(rng.randint(1, 3)):
        places = [d for d in (out, *out.values()) if isinstance(d, dict) and d]
        if not places:
            break
        place = rng.choice(places)
        name = rng.choice(sorted(place, key=str))
        if rng.random() < 0.2:
            del place[name]
        else:
            place[name] = rng.choice(JUNK)
    return out


@pytest.mark.parametrize("name", CONFIGS)
def test_a_declaration_or_a_value_error(name: str) -> None:
    rng, refused = random.Random(f"{name} {SEED}"), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(TIMES):
            config = damaged(CONFIGS[name], rng)
            try:
                assert isinstance(spec_from_config(config), Decoder)
            except ValueError as error:
                refused += 1
                assert str(error), config
            except Exception as error:
                raise AssertionError(f"{config}") from error
    assert refused > 0
