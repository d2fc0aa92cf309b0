"""The output of `pd-cluster up`: its children's lines with a prefix, and a spinner when it is a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.status import Status

STYLES = ("cyan", "green", "magenta", "yellow", "blue")
NAME_WIDTH = 10


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich's own method ends the program


class Display:
    """A context manager; its exit removes the spinner.

    When the reader goes away (`up | head`, a closed terminal) the output stops and the cluster goes on.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = _Console(highlight=False, soft_wrap=True)
        self._quiet = quiet
        self._is_read = True
        self._styles: dict[str, str] = {}
        self._status: Status | None = None

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *exc: object) -> None:
        self.status("")

    def line(self, name: str, line: str) -> None:
        """One line that a child wrote."""
        if self._quiet:
            return
        if not self._console.is_terminal:
            self._plain(f"[{name}] {line}")
            return
        style = self._styles.setdefault(name, STYLES[len(self._styles) % len(STYLES)])
        self._rich(Text.assemble((f"{name:<{NAME_WIDTH}} ", style), line))

    def say(self, line: str) -> None:
        """One line of `up` itself."""
        if not self._console.is_terminal:
            self._plain(line)
            return
        self._rich(Text(line, style="bold" if line.startswith("ready") else ""))

    def status(self, text: str) -> None:
        """Show the current activity; "" removes it."""
        if not self._console.is_terminal:
            if text:
                self.say(f"{text} ...")
            return
        with self._reader():
            if self._status is not None:
                status, self._status = self._status, None
                status.stop()
            if text and self._is_read:
                self._status = self._console.status(text)
                self._status.start()

    def _plain(self, line: str) -> None:
        if self._is_read:
            with self._reader():
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()

    def _rich(self, text: Text) -> None:
        if self._is_read:
            with self._reader():
                self._console.print(text)

    @contextlib.contextmanager
    def _reader(self) -> Iterator[None]:
        """After the first failure, send all output to /dev/null, including what Python flushes at exit."""
        try:
            yield
        except OSError:
            self._is_read = False
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
