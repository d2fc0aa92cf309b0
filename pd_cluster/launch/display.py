"""What `pd-cluster up` shows: prefixed lines of its children, a spinner on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.status import Status

STYLES = ("cyan", "green", "magenta", "yellow", "blue")
NAME_WIDTH = 10


class Display:
    """Use as a context manager: leaving it takes the spinner off the terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._quiet = quiet
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
            sys.stdout.write(f"[{name}] {line}\n")
            sys.stdout.flush()
            return
        style = self._styles.setdefault(name, STYLES[len(self._styles) % len(STYLES)])
        self._console.print(Text.assemble((f"{name:<{NAME_WIDTH}} ", style), line))

    def say(self, line: str) -> None:
        """One line of `up` itself."""
        if not self._console.is_terminal:
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            return
        self._console.print(Text(line, style="bold" if line.startswith("ready") else ""))

    def status(self, text: str) -> None:
        """What is going on now; "" for nothing any more."""
        if not self._console.is_terminal:
            if text:
                self.say(f"{text} ...")
            return
        if self._status is not None:
            self._status.stop()
            self._status = None
        if text:
            self._status = self._console.status(text)
            self._status.start()
