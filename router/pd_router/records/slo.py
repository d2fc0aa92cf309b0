"""Whether a request met the targets of latency. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_router.records.call_record import CallRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds; 0: no target."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    @property
    def is_set(self) -> bool:
        return bool(self.ttft_s or self.tpot_s)

    def result(self, record: CallRecord) -> str:
        """failed, ttft or tpot: what was missed first; met. "": it does not count, refused or left by its client.

        A target that was not measured counts as met: no node reported it, or there was one token.
        """
        if record.has_failed:
            return "failed"
        if record.outcome != "ok":
            return ""
        if self.ttft_s and (record.ttft_s or 0.0) > self.ttft_s:
            return "ttft"
        return "tpot" if self.tpot_s and (record.tpot_s or 0.0) > self.tpot_s else "met"


NO_SLO = Slo()
