"""What long work says on stderr: a bar on a terminal, and notes.

    with Bar("Counting") as bar:
        bar.show(done, total, "1,024 tokens")      # bytes, bytes, and what else there is to say

In a pipe there is no bar.
"""

from __future__ import annotations

from typing import Any

import click


class Bar:
    """A progress bar with its speed and the time left; silence where there is no terminal."""

    def __init__(self, word: str) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(word),
            BarColumn(),
            TaskProgressColumn(),
            TransferSpeedColumn(),
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(word, total=None, said="")
        self._begun = False

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, done: int, total: int, said: str) -> None:
        """How far it is; what was done before the first call is not part of the speed."""
        if not self._begun:
            self._bar.reset(self._task, completed=done, total=total)
            self._begun = True
        self._bar.update(self._task, completed=done, total=total, said=said)


def note(message: Warning | str, *_: Any, **__: Any) -> None:
    """A note on stderr; it serves as `warnings.showwarning` too."""
    click.echo(f"Note: {message}", err=True)
