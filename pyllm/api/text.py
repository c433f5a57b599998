"""The text of a growing output, and the stop strings in it: across the borders of tokens, never sent before it is certain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyllm.load.tokenizer import Tokenizer


class TextOutput:
    """`text` is certain: no piece of a character, and (with `certain()`) no beginning of a stop string at its end."""

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, include_stop: bool = False, skip_special_tokens: bool = True
    ) -> None:
        self._decoder = tokenizer.stream(skip_special_tokens)
        self._stops, self._include = tuple(stops), include_stop
        self._longest = max(map(len, stops), default=0)
        self._seen = 0
        self.text = ""

    def push(self, token_ids: Sequence[int]) -> None:
        """token_ids: the whole output so far."""
        self.text = self._pushed(token_ids)

    def _pushed(self, token_ids: Sequence[int]) -> str:
        pieces = [self._decoder.push(token) for token in token_ids[self._seen :]]
        self._seen = len(token_ids)
        return self.text + "".join(pieces)

    def find_stop(self, token_ids: Sequence[int], min_tokens: int = 0) -> str | None:
        """The stop string that the output has come to, the earliest in the text; the text then ends at it."""
        before, text = len(self.text), self._pushed(token_ids)
        stop = None
        if len(token_ids) >= min_tokens and len(text) > before:  # only one that ends in the new text: others came too early
            found = [(at, s) for s in self._stops if (at := text.find(s, max(0, before - len(s) + 1))) >= 0]
            if found:
                at, stop = min(found, key=lambda f: (f[0], -len(f[1])))
                text = text[: at + len(stop) * self._include]
        self.text = text  # at once: a reader in another thread never sees the stop string
        return stop

    def finish(self) -> None:
        """The output has ended without a stop string: what the decoder has held back belongs to it."""
        self.text += self._decoder.flush()

    def certain(self) -> int:
        """Length of the text that no later stop string can cut."""
        text = self.text  # the engine may replace it meanwhile
        for held in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-held:]) for stop in self._stops):
                return len(text) - held
        return len(text)
