"""The order that a node obeyed last, in the node's own words: its sender, why, and how long ago."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pd_http.names import plain_text

MAX_WORD_CHARS = 300  # of a node's text, which GET /nodes repeats


@dataclass(frozen=True, slots=True)
class RoleOrderNote:
    """`at_s`: by this router's clock, from the age that the node told: wall clocks may differ."""

    sender: str  # "": an operator
    reason: str
    at_s: float

    @classmethod
    def read(cls, told: object, now_s: float) -> RoleOrderNote | None:
        """What /health tells; None for nothing that can be read."""
        if not isinstance(told, dict):
            return None
        sender, reason, age_s = told.get("sender"), told.get("reason"), told.get("age_s")
        if not isinstance(sender, str) or not isinstance(reason, str) or not isinstance(age_s, int | float):
            return None
        return cls(plain_text(sender, MAX_WORD_CHARS), plain_text(reason, MAX_WORD_CHARS), now_s - max(0.0, age_s))

    def told(self, now_s: float) -> dict[str, Any]:
        return {"sender": self.sender, "reason": self.reason, "age_s": round(now_s - self.at_s, 1)}
