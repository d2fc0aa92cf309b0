"""Statistics of a load test. Pure functions over seconds; reports are in milliseconds.

TTFT   sent to first output chunk
TTST   sent to second output chunk: an early first token does not improve it
ITL    time between two chunks over the tokens of the later one, once for each of them
longest gap  of a stream: the longest time between two chunks, however many tokens they have
predicted    by the router, of TTFT; "real of predicted": real ms of each predicted second, so that 1000 is right
TPOT   (end-to-end - TTFT) / (output tokens - 1)
leg    the prefilling node's time to its first token, if the server reports timings
goodput  requests per second that meet every objective (DistServe, arXiv 2401.09670)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

PERCENTILES = (50, 90, 99)
HANDOVER_STEPS = ("announce", "reserve", "post", "link", "confirm", "schedule")  # in a server's timings, in order
OBJECTIVES = ("ttft", "ttst", "tpot", "e2e")


@dataclass(slots=True)
class RequestRecord:
    """A request as its client saw it. Times are seconds since the test's start."""

    index: int
    scheduled_s: float  # planned time of sending
    sent_s: float
    num_input: int
    num_output: int = 0  # tokens, as the server counts them; else chunks
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    error: str = ""  # "": answered completely
    route: str = ""  # the router's x-pd-route
    predicted_s: float | None = None  # its TTFT, as the router told it
    num_cached: int = 0  # prompt tokens from a prefix cache
    timings_ms: dict[str, float] = field(default_factory=dict)  # the server's own, by phase; {}: none reported
    tokens_so_far: list[int] = field(default_factory=list)  # with each chunk, as the server counts them; else []
    conversation: int = 0
    turn: int = 0  # of the conversation

    @property
    def ok(self) -> bool:
        return not self.error and bool(self.chunk_times_s)

    @property
    def lag_s(self) -> float:
        """Delay of the client itself."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float:
        return self.chunk_times_s[0] - self.sent_s

    @property
    def ttst_s(self) -> float | None:
        return self.chunk_times_s[1] - self.sent_s if len(self.chunk_times_s) > 1 else None

    @property
    def leg_s(self) -> float | None:
        """Seconds from admission by the prefilling node to its first token; None if the server does not report it."""
        times = self.timings_ms
        if "prefill_leg" in times:
            return times["prefill_leg"] / 1e3
        return (times.get("queue", 0.0) + times["prefill"]) / 1e3 if "prefill" in times else None

    @property
    def handover_s(self) -> float | None:
        """Seconds from the announcement of the prompt's end until D can schedule; None without such a report."""
        times = self.timings_ms
        return sum(times.get(step, 0.0) for step in HANDOVER_STEPS) / 1e3 if "link" in times else None

    @property
    def join_s(self) -> float | None:
        """Seconds from when D can schedule to the end of its first decode step: the wait and the step."""
        times = self.timings_ms
        return (times["admit"] + times["first_decode"]) / 1e3 if "admit" in times and "first_decode" in times else None

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks."""
        return [after - before for before, after in pairwise(self.chunk_times_s)]

    @property
    def itl_s(self) -> list[float]:
        """Between tokens: those of a chunk share the time before it. Without the server's counts each chunk has one."""
        gaps_s, told = self.gaps_s, self.tokens_so_far
        if len(told) != len(self.chunk_times_s):
            return gaps_s
        counts = [max(1, after - before) for before, after in pairwise(told)]
        return [gap_s / num for gap_s, num in zip(gaps_s, counts, strict=True) for _ in range(num)]

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def longest_gap_s(self) -> float | None:
        return max(self.gaps_s, default=None)

    @property
    def real_by_predicted(self) -> float | None:
        """TTFT by what the router predicted of it."""
        return self.ttft_s / self.predicted_s if self.predicted_s else None

    def objective_s(self, name: str) -> float | None:
        """The value that this objective limits."""
        value: float | None = getattr(self, f"{name}_s")
        return value


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a sample, in milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class Summary:
    """A whole test. Rates are per second of `duration_s`, from the first send to the last end."""

    num_requests: int
    num_ok: int
    errors: dict[str, int]
    routes: dict[str, int]
    duration_s: float
    request_rate: float
    input_tokens: int
    output_tokens: int
    output_rate: float
    cached_share: float  # of the input tokens
    spreads: dict[str, Spread]
    phases: dict[str, Spread]  # the server's own timings
    objectives_ms: dict[str, float]
    goodput: float | None  # None without objectives
    attainment: float | None  # share of all requests, including failed ones
    attained: dict[str, float]  # the same, by pair "TTFT/TPOT" in ms


def spread(values_s: list[float]) -> Spread | None:
    """Percentiles with linear interpolation; None without values."""
    if not values_s:
        return None
    import numpy as np  # here: the command line reads OBJECTIVES

    values_ms = np.asarray(values_s) * 1e3
    p50, p90, p99 = (float(value) for value in np.percentile(values_ms, PERCENTILES))
    return Spread(len(values_s), float(values_ms.mean()), p50, p90, p99, float(values_ms.max()))


def meets(record: RequestRecord, objectives_ms: dict[str, float]) -> bool:
    """Whether the answer met every objective. One that does not apply (TPOT of a single token) is met."""
    if not record.ok:
        return False
    values = ((record.objective_s(name), limit_ms) for name, limit_ms in objectives_ms.items())
    return all(value_s is None or value_s * 1e3 <= limit_ms for value_s, limit_ms in values)


def summarize(
    records: Sequence[RequestRecord], objectives_ms: dict[str, float], slos_ms: Sequence[tuple[float, float]] = ()
) -> Summary:
    """All figures of a report. `records` must not be empty. `slos_ms`: pairs of a TTFT and a TPOT."""
    good = [record for record in records if record.ok]
    duration_s = max(record.end_s for record in records) - min(record.sent_s for record in records)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    samples = {
        "ttft": [record.ttft_s for record in good],
        "ttst": [value for record in good if (value := record.ttst_s) is not None],
        "itl": [gap for record in good for gap in record.itl_s],
        "longest gap": [value for record in good if (value := record.longest_gap_s) is not None],
        "leg": [value for record in good if (value := record.leg_s) is not None],
        "beyond leg": [record.ttft_s - value for record in good if (value := record.leg_s) is not None],
        "handover": [value for record in good if (value := record.handover_s) is not None],
        "join": [value for record in good if (value := record.join_s) is not None],
        "tpot": [value for record in good if (value := record.tpot_s) is not None],
        "e2e": [record.e2e_s for record in good],
        "predicted": [record.predicted_s for record in good if record.predicted_s is not None],
        "real of predicted": [value for record in good if (value := record.real_by_predicted) is not None],
        "client lag": [record.lag_s for record in records],
    }
    phases: dict[str, list[float]] = {}
    for record in good:
        for name, value_ms in record.timings_ms.items():
            phases.setdefault(name, []).append(value_ms / 1e3)
    num_met = sum(meets(record, objectives_ms) for record in records)
    input_tokens = sum(record.num_input for record in good)
    output_tokens = sum(record.num_output for record in good)
    return Summary(
        num_requests=len(records),
        num_ok=len(good),
        errors=dict(Counter(record.error or "no output" for record in records if not record.ok)),
        routes=dict(Counter(record.route for record in good if record.route)),
        duration_s=duration_s,
        request_rate=len(good) * per_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        output_rate=output_tokens * per_s,
        cached_share=sum(record.num_cached for record in good) / input_tokens if input_tokens else 0.0,
        spreads=_spreads(samples),
        phases=_spreads(phases),
        objectives_ms=objectives_ms,
        goodput=num_met * per_s if objectives_ms else None,
        attainment=num_met / len(records) if objectives_ms else None,
        attained={
            f"{ttft:g}/{tpot:g}": sum(meets(record, {"ttft": ttft, "tpot": tpot}) for record in records) / len(records)
            for ttft, tpot in slos_ms
        },
    )


def _spreads(samples: dict[str, list[float]]) -> dict[str, Spread]:
    return {name: found for name, values in samples.items() if (found := spread(values)) is not None}
