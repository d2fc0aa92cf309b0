"""The parser of `pd-cluster` and of each of its commands."""

from __future__ import annotations

import argparse
import difflib
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Sequence

REMOVED = {"--max-tokens-beside-decodes": "a node's --slo-itl-ms bounds what prompts add to the gaps of streams, in ms"}


class CommandParser(argparse.ArgumentParser):
    """Tells a mistake in two lines: argparse would print the command's whole usage first, which hides the reason."""

    def parse_known_args(  # type: ignore[override]  # argparse's has one signature for each type of namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """As argparse's, but arguments that nothing reads are an error of this command, not of `pd-cluster`.

        argparse calls it for a command with everything after its name.
        """
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            for flag in unknown:
                if told := REMOVED.get(flag.partition("=")[0]):
                    self.error(f"{flag} was removed: {told}")
            alike = difflib.get_close_matches(
                unknown[0].partition("=")[0], self._option_string_actions, n=1, cutoff=0.75
            )
            hint = f" (did you mean {alike[0]}?)" if alike else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return known, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` explains what it takes\n")
