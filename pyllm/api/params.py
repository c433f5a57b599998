"""How to sample: `SamplingParams`, named as in TensorRT-LLM's LLM API. Unknown arguments and bad values are errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from pyllm.api.refuse import Checked

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 1024
MAX_WIDTH = MAX_LOGPROBS // 2  # a step of a beam search looks at twice as many tokens as there are beams, as each of them may end

HINTS = {
    "beam_search_diversity_rate": "beams are not grouped",
    "beam_width": "use use_beam_search=True with best_of",
    "guided_decoding": "constrained decoding is not served; a logits_processor can restrict tokens",
    "lookahead_config": "use LLM(speculative_config=NGramDecodingConfig())",
    "embedding_bias": "use logit_bias={token: value}",
    "no_repeat_ngram_size": "use a logits_processor",
    "top_p_decay": "top_p is constant over a request",
    "top_p_min": "top_p is constant over a request",
    "top_p_reset_ids": "top_p is constant over a request",
    "end_id": "the model's end tokens are those of its files; add stop_token_ids, or set ignore_eos=True",
    "pad_id": "nothing is padded",
    "return_context_logits": "use prompt_logprobs",
    "return_generation_logits": "use logprobs",
    "max_new_tokens": "use max_tokens",
    "bad_words": "use bad",
    "prompt_ignore_length": "the prompt counts for repetition_penalty alone",
    "return_perf_metrics": "times are always there: RequestOutput.timing",
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams(Checked):
    """temperature: 0 is greedy; None (the default) is greedy too, unless top_k, top_p or min_p is given: then 1.
    top_k: keep the k likeliest (0: all). top_p: keep the smallest set that reaches p, in (0, 1].
    min_p: keep p >= min_p * p_max, in [0, 1].
    seed: the same seed gives the same text in any batch; None draws one when the request is admitted.
    n: samples of one prompt. best_of: take the n likeliest of so many.
    use_beam_search: the n best of best_of beams (2 to 10), by sum of log-probabilities / length ** length_penalty; early_stopping ends when
    so many beams have ended, else when no other can be better. With max_tokens, end tokens and logprobs alone.
    max_tokens: tokens to generate at most; min_tokens: no end token before so many.
    stop: texts to end at, left out of the text unless include_stop_str_in_output. stop_token_ids: also end after one of these.
    ignore_eos: go on past the model's own end tokens.
    repetition_penalty (1: off), presence_penalty, frequency_penalty (0: off), logit_bias {token: added value}: see `shape.py`.
    bad: texts, bad_token_ids: tokens that are never generated.
    logits_processor: functions (token ids so far, logits [V] on the device) -> logits, or one; such requests run without overlap.
    logprobs, prompt_logprobs: None, or how many likeliest alternatives to report beside each token's own log-probability (0 to 20).
    add_special_tokens: around a prompt given as text. truncate_prompt_tokens: keep so many tokens of the prompt, the last ones.
    detokenize: make text at all. skip_special_tokens: leave them out of the text.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int = 32
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad: tuple[str, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    logits_processor: tuple[Callable, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    bad_words: ClassVar[tuple[tuple[int, ...], ...]] = ()  # `bad` as token ids, put in by whoever has the tokenizer
    HINTS = HINTS

    def __post_init__(self) -> None:
        shaped = any(v is not None for v in (self.top_k, self.top_p, self.min_p))
        defaults = {"temperature": 1.0 if shaped else 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("stop_token_ids", "bad_token_ids"):
            object.__setattr__(self, name, id_tuple(f"SamplingParams: {name}", getattr(self, name)))
        for name in ("stop", "bad"):
            object.__setattr__(self, name, self._texts(name))
        object.__setattr__(self, "logit_bias", self._bias())
        processors = self.logits_processor
        object.__setattr__(self, "logits_processor", (processors,) if callable(processors) else _several("logits_processor", processors))
        self._check()

    def _check(self) -> None:
        self._real("temperature", "a finite number, 0 or more", lambda v: v >= 0)
        self._integer("top_k", 0, 2**31 - 1)
        self._real("top_p", "more than 0, at most 1", lambda v: 0 < v <= 1)
        self._real("min_p", "0 to 1", lambda v: 0 <= v <= 1)
        self._real("repetition_penalty", "more than 0", lambda v: v > 0)
        for name in ("presence_penalty", "frequency_penalty", "length_penalty"):
            self._real(name, "a finite number", lambda v: True)
        for name in ("seed", "truncate_prompt_tokens", "logprobs", "prompt_logprobs", "best_of"):
            low, high = {"seed": (0, MAX_SEED), "truncate_prompt_tokens": (1, 2**31 - 1), "best_of": (1, MAX_SAMPLES)}.get(
                name, (0, MAX_LOGPROBS)
            )
            if getattr(self, name) is not None:
                self._integer(name, low, high)
        self._integer("n", 1, MAX_SAMPLES)
        self._integer("max_tokens", 1, 2**31 - 1)
        self._integer("min_tokens", 0, 2**31 - 1)
        for name in (
            "use_beam_search",
            "early_stopping",
            "ignore_eos",
            "include_stop_str_in_output",
            "add_special_tokens",
            "detokenize",
            "skip_special_tokens",
        ):
            self._need(name, isinstance(getattr(self, name), bool), "True or False")
        for processor in self.logits_processor:
            if not callable(processor):
                raise ValueError(f"SamplingParams: logits_processor holds {processor!r}, expected functions")
        self._check_pairs()

    def _check_pairs(self) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"SamplingParams: min_tokens is {self.min_tokens}, expected at most max_tokens={self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"SamplingParams: best_of is {self.best_of}, expected at least n={self.n}")
        if self.use_beam_search:
            self._check_beams()
        elif (self.length_penalty, self.early_stopping) != (1.0, False):
            raise ValueError("SamplingParams: length_penalty or early_stopping is given without use_beam_search=True")
        elif self.samples > 1 and self.greedy:
            raise ValueError(f"SamplingParams: n or best_of is {self.samples}, but greedy samples are all alike; set a temperature")
        if self.stop and not self.detokenize:
            raise ValueError("SamplingParams: stop needs the text, but detokenize is False; use stop_token_ids")

    def _check_beams(self) -> None:
        if not 2 <= self.samples <= MAX_WIDTH:
            raise ValueError(f"SamplingParams: n or best_of is {self.samples}, expected 2 to {MAX_WIDTH} beams with use_beam_search")
        used = {"a temperature": not self.greedy, "stop": self.stop, "prompt_logprobs": self.prompt_logprobs is not None}
        used |= {"penalties, logit_bias, bad tokens, min_tokens or a logits_processor": self.shaped or self.bad}
        for name, given in used.items():
            if given:
                raise ValueError(f"SamplingParams: use_beam_search with {name}, expected neither")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def samples(self) -> int:
        return self.best_of or self.n

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def shaped(self) -> bool:
        """Logits are changed before sampling."""
        return bool(self.penalized or self.logit_bias or self.bad_token_ids or self.bad_words or self.min_tokens or self.logits_processor)

    @property
    def waits(self) -> bool:
        """The next step depends on tokens that the host must know."""
        return bool(self.logits_processor) or any(len(word) > 1 for word in self.bad_words)

    def _real(self, name: str, expected: str, allowed: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        self._need(name, number and math.isfinite(value) and allowed(value), expected)

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        self._need(name, type(value) is int and low <= value <= high, f"an integer from {low} to {high}")

    def _texts(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else () if value is None else (value,)
        for text in texts:
            if not isinstance(text, str) or not text:
                raise ValueError(f"SamplingParams: {name} holds {text!r}, expected texts that are not empty")
        return texts

    def _bias(self) -> tuple[tuple[int, float], ...]:
        value = self.logit_bias
        pairs = tuple(value.items()) if isinstance(value, Mapping) else _several("logit_bias", value)
        for pair in pairs:
            good = (
                isinstance(pair, tuple) and len(pair) == 2 and not isinstance(pair[0], bool) and isinstance(pair[0], int) and pair[0] >= 0
            )
            if not good or isinstance(pair[1], bool) or not isinstance(pair[1], (int, float)) or math.isnan(pair[1]):
                raise ValueError(f"SamplingParams: logit_bias holds {pair!r}, expected token ids with numbers")
        return tuple((t, float(v)) for t, v in pairs)


def _several(name: str, value: Any) -> tuple:
    if value is not None and not isinstance(value, Iterable):
        raise ValueError(
            f"SamplingParams: {name} holds {value!r}, expected {'functions' if name == 'logits_processor' else 'token: value'}"
        )
    return tuple(value or ())


def id_tuple(where: str, ids: Any) -> tuple[int, ...]:
    """Token ids, or one, as a tuple; the error begins with `where`."""
    if not isinstance(ids, Iterable | int):
        raise ValueError(f"{where} is {ids!r}, expected token ids")
    values = (ids,) if isinstance(ids, int) else tuple(ids)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{where} holds {value!r}, expected token ids")
    return values


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
        return  # all at once: hundreds of prompts may come together, and the GPU waits for the first step
    bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= i < vocab]
    if bad:
        raise ValueError(f"submit: {name} holds {bad[0]!r}, expected token ids from 0 to {vocab - 1}")


def check_order(priority: object, salt: object) -> None:
    """ValueError for what would raise only in the engine's thread."""
    if type(priority) is not int:
        raise ValueError(f"submit: priority is {priority!r}, expected an integer")
    if not isinstance(salt, str) or any("\ud800" <= c <= "\udfff" for c in salt):
        raise ValueError(f"submit: the cache salt is {salt!r}, expected a text")
