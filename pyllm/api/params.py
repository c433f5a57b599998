"""How to sample: `SamplingParams`, named as in TensorRT-LLM's LLM API. Unknown arguments and bad values are errors that name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

from pyllm.api.refuse import Checked, is_text, listed, shown

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_SAMPLES = 1024
MAX_WIDTH = MAX_LOGPROBS // 2  # a step of a beam search looks at twice as many tokens as there are beams, as each of them may end
MAX_REAL, MIN_REAL = (2 - 2**-23) * 2.0**127, 2.0**-126  # of fp32, in which the device keeps all numbers
_FP32 = f"0, or {MIN_REAL:.2g} to {MAX_REAL:.2g} in magnitude (fp32)"
MAX_LENGTH_PENALTY = 10.0  # lengths to this power are far inside fp64

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


_SAMPLE = "it takes the likeliest beams; leave that out, or sample: n and best_of without use_beam_search"
_PLAIN = "it takes the model's logits as they are; leave that out, or use_beam_search"
UNSEARCHED: dict[str, tuple[Any, str]] = {
    "temperature": (0, _SAMPLE), "top_k": (0, _SAMPLE), "top_p": (1, _SAMPLE), "min_p": (0, _SAMPLE),
    "stop": ((), "use stop_token_ids"), "prompt_logprobs": (None, "ask for them with a request of its own"),
    "repetition_penalty": (1, _PLAIN), "presence_penalty": (0, _PLAIN), "frequency_penalty": (0, _PLAIN), "logit_bias": ((), _PLAIN),
    "bad": ((), _PLAIN), "bad_token_ids": ((), _PLAIN), "min_tokens": (0, _PLAIN), "logits_processor": ((), _PLAIN),
}  # fmt: skip
"""What does not go with a beam search: the value that is none, and what to do instead."""


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
    Numbers are 0, or from 1.2e-38 to 3.4e38 (fp32) in magnitude; a logit_bias may be infinite. Greedy rows need no seed and no cuts (top_k,
    top_p, min_p), which are then of no effect; what else would have none is an error.
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
        cut = any(v is not None for v in (self.top_k, self.top_p, self.min_p)) and self.use_beam_search is not True
        defaults = {"temperature": 1.0 if cut else 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("stop_token_ids", "bad_token_ids"):
            object.__setattr__(self, name, id_tuple(f"SamplingParams: {name}", getattr(self, name)))
        for name in ("stop", "bad"):
            object.__setattr__(self, name, self._texts(name))
        object.__setattr__(self, "logit_bias", self._bias())
        given = self.logits_processor
        processors = (given,) if callable(given) else () if given is None else listed(given)
        self._need("logits_processor", processors is not None, "a function or a list of functions")
        object.__setattr__(self, "logits_processor", processors)
        self._check()

    def _check(self) -> None:
        self._real("temperature", "a finite number, 0 or more", lambda v: v >= 0)
        self._integer("top_k", 0, 2**31 - 1)
        self._real("top_p", "more than 0, at most 1", lambda v: 0 < v <= 1)
        self._real("min_p", "0 to 1", lambda v: 0 <= v <= 1)
        self._real("repetition_penalty", "a finite number, more than 0", lambda v: v > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            self._real(name, "a finite number", lambda v: True)
        most = MAX_LENGTH_PENALTY
        self._real("length_penalty", f"a number from {-most:g} to {most:g}", lambda v: abs(v) <= most)
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
                raise ValueError(f"SamplingParams: logits_processor holds {shown(processor)}, expected functions")
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
        if not (self.skip_special_tokens or self.detokenize):
            raise ValueError("SamplingParams: skip_special_tokens is False, but so is detokenize, and there is no text; leave it out")
        if self.include_stop_str_in_output and not self.stop:
            where = "a token of stop_token_ids is the last of token_ids, and never in the text"
            raise ValueError(f"SamplingParams: include_stop_str_in_output is given without stop; {where}")

    def _check_beams(self) -> None:
        if not 2 <= self.samples <= MAX_WIDTH:
            raise ValueError(f"SamplingParams: n or best_of is {self.samples}, expected 2 to {MAX_WIDTH} beams with use_beam_search")
        for name, (off, instead) in UNSEARCHED.items():
            if getattr(self, name) != off:
                raise ValueError(f"SamplingParams: use_beam_search with {name}={shown(getattr(self, name))}; {instead}")

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
        finite = isinstance(value, (int, float)) and -math.inf < value < math.inf and not isinstance(value, bool)
        self._need(name, is_real(value) and allowed(value), _FP32 if finite and not is_real(value) else expected)

    def _integer(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        self._need(name, type(value) is int and low <= value <= high, f"an integer from {low} to {high}")

    def _texts(self, name: str) -> tuple[str, ...]:
        value = getattr(self, name)
        texts = (value,) if isinstance(value, str) else () if value is None else listed(value)
        if texts is None:
            raise ValueError(f"SamplingParams: {name} is {shown(value)}, expected a text or a list of texts")
        for text in texts:
            if not is_text(text) or not text:
                raise ValueError(f"SamplingParams: {name} holds {shown(text)}, expected texts that are not empty")
        return texts

    def _bias(self) -> tuple[tuple[int, float], ...]:
        value = self.logit_bias
        pairs = tuple(value.items()) if isinstance(value, Mapping) else () if value is None else listed(value)
        if pairs is None:
            raise ValueError(f"SamplingParams: logit_bias is {shown(value)}, expected {{token id: number}}")
        for pair in pairs:
            good = (
                isinstance(pair, tuple) and len(pair) == 2 and not isinstance(pair[0], bool) and isinstance(pair[0], int) and pair[0] >= 0
            )
            if not good or not (is_real(pair[1]) or pair[1] in (math.inf, -math.inf)):
                raise ValueError(f"SamplingParams: logit_bias holds {shown(pair)}, expected token ids with numbers: infinite, {_FP32}")
        return tuple((t, float(v)) for t, v in pairs)


def is_real(value: Any) -> bool:
    """A number that fp32 holds; 0, or neither too large nor too small for it."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and (value == 0 or MIN_REAL <= abs(value) <= MAX_REAL)


def id_tuple(where: str, ids: Any) -> tuple[int, ...]:
    """Token ids, or one, as a tuple; the error begins with `where`."""
    values = (ids,) if isinstance(ids, int) else listed(ids)
    if values is None:
        raise ValueError(f"{where} is {shown(ids)}, expected token ids")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"{where} holds {shown(value)}, expected token ids")
    return values


def check_ids(name: str, ids: Sequence[int], vocab: int) -> None:
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab):
        return  # all at once: hundreds of prompts may come together, and the GPU waits for the first step
    bad = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= i < vocab]
    if bad:
        raise ValueError(f"submit: {name} holds {shown(bad[0])}, expected token ids from 0 to {vocab - 1}")


def check_prompt(prompt_token_ids: Any, params: Any, vocab: int, limit: int) -> list[int]:
    """The prompt's token ids. ValueError for what a model with `vocab` tokens and a context of `limit` could never run."""
    if not isinstance(params, SamplingParams):
        raise ValueError(f"submit: params is {shown(params)}, expected SamplingParams")
    if (given := listed(prompt_token_ids)) is None:
        raise ValueError(f"submit: the prompt is {shown(prompt_token_ids)}, expected token ids")
    prompt = list(given)
    if not prompt:
        raise ValueError("submit: the prompt is empty, expected at least one token")
    if len(prompt) >= limit:
        raise ValueError(f"submit: the prompt has {len(prompt)} tokens, expected at most {limit - 1} (the context is {limit} positions)")
    bias = [t for t, _ in params.logit_bias]
    lists = {"the prompt": prompt, "stop_token_ids": params.stop_token_ids, "bad_token_ids": params.bad_token_ids, "logit_bias": bias}
    for name, ids in lists.items():
        check_ids(name, ids, vocab)
    return prompt if set(map(type, prompt)) == {int} else [int(i) for i in prompt]


def check_order(priority: object, salt: object) -> None:
    """ValueError for what would raise only in the engine's thread."""
    if type(priority) is not int:
        raise ValueError(f"submit: priority is {shown(priority)}, expected an integer")
    if not is_text(salt):
        raise ValueError(f"submit: the cache salt is {shown(salt)}, expected a text")
