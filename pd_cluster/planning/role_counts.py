"""How many nodes of each role a cluster has."""

from __future__ import annotations

from typing import NamedTuple

from pd_cluster.errors import StartupError


class RoleCounts(NamedTuple):
    """Numbers of nodes. Something must decode."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    def check(self) -> None:
        """Raises StartupError if no node decodes."""
        if min(self) < 0 or not self.decode + self.mixed:
            raise StartupError(f"{self.name!r} has no node that decodes")

    @property
    def name(self) -> str:
        pair = "".join(f"{number}{role}" for number, role in ((self.prefill, "P"), (self.decode, "D")) if number)
        return "+".join(part for part in (pair, f"{self.mixed}M" if self.mixed else "") if part)
