"""How many nodes of each role a cluster has."""

from __future__ import annotations

import re
from typing import NamedTuple

from pd_cluster.errors import StartupError

_NAME = re.compile(r"(?=.)(?:([1-9]\d*)P)?(?:([1-9]\d*)D)?(?:\+?([1-9]\d*)M)?")


class RoleCounts(NamedTuple):
    """Numbers of nodes. Something must decode."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @classmethod
    def parse(cls, name: str) -> RoleCounts:
        """ "2P1D", "4M" or "1P2D+1M". Raises StartupError."""
        found = _NAME.fullmatch(name)
        roles = cls(*(int(number or 0) for number in found.groups())) if found else cls()
        roles.check(name)
        return roles

    def check(self, name: str = "") -> None:
        """Raises StartupError if no node decodes."""
        if min(self) < 0 or not self.decode + self.mixed:
            raise StartupError(f"{name or self.name!r} has no node that decodes, or is not like 2P1D, 4M or 1P2D+1M")

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def name(self) -> str:
        pair = "".join(f"{number}{role}" for number, role in ((self.prefill, "P"), (self.decode, "D")) if number)
        return "+".join(part for part in (pair, f"{self.mixed}M" if self.mixed else "") if part)
