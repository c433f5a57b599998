"""A progress bar on stderr, gone when done; nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def progress_bar(text: str, total: int, unit: str, shown: bool = True) -> Iterator[Callable[..., None]]:
    """Gives a function that moves the bar on by one, whatever it is called with."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(text, total=total)

        def advance(*_: Any) -> None:
            bar.advance(task)

        yield advance
