"""The one error of the loaders, and how text from a file is quoted in it."""

from __future__ import annotations

MAX_MESSAGE = 500


def show(value: object, limit: int = 80) -> str:
    """Quote a name or value that came from a file: escaped (it may hold newlines or terminal codes) and cut to `limit` characters."""
    text = ascii(value[: limit + 1] if isinstance(value, (str, bytes)) else value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class CheckpointError(ValueError):
    """A model file is missing, damaged, hostile or not supported. The message is one line that names the file and the field."""

    def __init__(self, message: str) -> None:
        line = "".join(c if c.isprintable() else " " for c in message[:MAX_MESSAGE])
        super().__init__(line if len(message) <= MAX_MESSAGE else line + "...")
