"""The parser of `pd-cluster` and of each of its commands."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

REMOVED = {"--max-tokens-beside-decodes": "a node's --slo-itl-ms bounds what prompts add to the gaps of streams, in ms"}

_FLAG = re.compile(r"--?[A-Za-z]")  # -5 is a value


class CommandParser(argparse.ArgumentParser):
    """Tells mistakes in a line each: argparse would print the command's whole usage first, which hides the reasons.

    A value that argparse cannot read is told alone.
    """

    def parse_known_args(  # type: ignore[override]  # argparse's has one signature for each type of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's, but arguments that nothing reads are an error of this command, not of `pd-cluster`.

        argparse calls it for a command with everything after its name.
        """
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error("\n".join(map(self._problem, _by_flag(unknown))))
        return known, unknown

    def _problem(self, words: Sequence[str]) -> str:
        flag = words[0].partition("=")[0]
        if told := REMOVED.get(flag):
            return f"{words[0]} was removed: {told}"
        alike = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.75)
        return f"unrecognized arguments: {' '.join(words)}" + "".join(f" (did you mean {one}?)" for one in alike)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains what it takes\n")


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    """Each flag with the words after it, which may be its values. A `--` that ends flags is none of them."""
    found: list[list[str]] = []
    for word in [word for word in words if word != "--"] or words:
        if _FLAG.match(word) or not found:
            found.append([])
        found[-1].append(word)
    return found
