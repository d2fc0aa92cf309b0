"""The five workloads of the disaggregation table, and a peer's figures for them.

The peer ran on two H200s, with the shape and the method that are the defaults of `python -m benchmarks disagg`. Compare
with these figures on that hardware only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd_cluster.bench.turns import TurnsPlan
from pd_cluster.bench.workload import Arrival, Length, at_rate, poisson, read_trace, rescale

if TYPE_CHECKING:
    from pathlib import Path

PEER = "vLLM 0.25.1"
AZURE_FILE = "dev_azure2023_conv_4000.csv"
MOONCAKE_FILE = "dev_mooncake_conv_0-15min.jsonl"
AZURE_ROWS, MOONCAKE_ROWS = 500, 150
MOONCAKE_MAX_INPUT, MOONCAKE_MAX_OUTPUT = 14_999, 1_000


@dataclass(frozen=True, slots=True)
class PeerRow:
    """The peer's figures in milliseconds, and shares of all requests."""

    setting: str
    ttft: tuple[float, float, float]  # p50, p90, p99
    leg: tuple[float, float] | None  # p50, p99 of the prefill leg
    tpot: tuple[float, float, float]
    itl: tuple[float, float]  # p50, p99
    attained: tuple[float, float]  # within 200 ms TTFT and 10 ms TPOT; within 400 and 15


@dataclass(frozen=True, slots=True)
class Preset:
    """A workload. `trace`: a file in the data directory; "": fixed lengths."""

    name: str
    title: str
    rate: float  # requests a second
    peers: tuple[PeerRow, ...]
    num_requests: int
    lengths: tuple[int, int] = (0, 0)  # in, out
    trace: str = ""

    def times(self, rate_scale: float) -> Preset:
        """So many times the requests in the same time, for more GPUs. The peer was not measured with them."""
        if rate_scale == 1.0:
            return self
        num_requests = round(self.num_requests * rate_scale)
        title = f"{self.title} x {rate_scale:g}"
        return replace(self, title=title, rate=self.rate * rate_scale, num_requests=num_requests, peers=())

    def arrivals(self, data: Path, seed: int) -> list[Arrival]:
        """Raises StartupError when the trace cannot be read."""
        if not self.trace:
            num_input, num_output = (Length(tokens, tokens) for tokens in self.lengths)
            return poisson(self.num_requests, self.rate, num_input, num_output, seed)
        if self.trace == MOONCAKE_FILE:
            rows = read_trace(data / self.trace, self.num_requests, MOONCAKE_MAX_INPUT)
            rows = rescale(rows, rate=None, length_scale=1.0, max_output=MOONCAKE_MAX_OUTPUT)
            rows = at_rate(rows, self.rate, seed)
        else:
            rows = rescale(
                read_trace(data / self.trace, self.num_requests), rate=self.rate, length_scale=1.0, max_output=0
            )
        return [replace(row, prefix_blocks=()) for row in rows]  # every prompt is new, so that nothing is cached


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("4096x128", "4096 in, 128 out, 6/s", 6.0, (
            PeerRow("2M", (107, 162, 350), None, (7.8, 10.6, 14.1), (5.7, 92), (0.77, 0.99)),
            PeerRow("1P1D default", (381, 754, 1147), (222, 955), (9.7, 13.1, 14.6), (6.3, 114), (0.20, 0.51)),
        ), 150, (4096, 128)),
        Preset("1024x256", "1024 in, 256 out, 20/s", 20.0, (
            PeerRow("2M", (38, 48, 70), None, (7.2, 7.7, 8.0), (5.9, 20), (1.0, 1.0)),
            PeerRow("1P1D default", (94, 178, 321), (35, 191), (7.2, 8.4, 8.8), (6.6, 29), (0.94, 1.0)),
            PeerRow("1P1D tuned", (73, 133, 237), (32, 190), (6.3, 6.6, 6.6), (6.2, 7.9), (0.98, 1.0)),
        ), 400, (1024, 256)),
        Preset("azure16", "Azure conversation, 16/s", 16.0, (
            PeerRow("2M", (37, 59, 112), None, (6.8, 7.7, 9.3), (5.9, 22), (1.0, 1.0)),
            PeerRow("1P1D default", (93, 191, 342), (33, 209), (7.5, 8.5, 9.8), (6.7, 32), (0.91, 1.0)),
        ), AZURE_ROWS, trace=AZURE_FILE),
        Preset("azure28", "Azure conversation, 28/s", 28.0, (
            PeerRow("2M", (42, 84, 152), None, (9.7, 11.0, 13.9), (7.1, 43), (0.62, 1.0)),
            PeerRow("1P1D default", (148, 456, 795), (57, 522), (13.0, 14.1, 17.3), (10.0, 65), (0.19, 0.86)),
            PeerRow("1P1D tuned", (111, 329, 572), (62, 512), (8.0, 8.3, 8.6), (7.9, 11.5), (0.78, 0.92)),
        ), AZURE_ROWS, trace=AZURE_FILE),
        Preset("mooncake3", "Mooncake conversation < 15k, 3/s", 3.0, (
            PeerRow("2M", (163, 393, 505), None, (6.9, 9.1, 36.1), (5.8, 27), (0.58, 0.89)),
            PeerRow("1P1D default", (434, 897, 1494), (261, 1156), (8.4, 10.6, 11.9), (6.9, 86), (0.21, 0.45)),
            PeerRow("1P1D tuned", (308, 682, 1210), (262, 1157), (6.2, 7.3, 7.6), (6.3, 9.7), (0.31, 0.65)),
        ), MOONCAKE_ROWS, trace=MOONCAKE_FILE),
    )
}  # fmt: skip
"""By name, in the order of the table."""


@dataclass(frozen=True, slots=True)
class TurnsPreset:
    """Conversations on two GPUs, with prefix caches."""

    name: str
    title: str
    plan: TurnsPlan
    is_text: bool = False

    def scaled(self, factor: float) -> TurnsPlan:
        """The plan with other lengths. Tools take as much less time, as computing does."""
        return replace(self.plan.scaled(factor), tool_s=self.plan.tool_s * factor)

    def times(self, rate_scale: float) -> TurnsPreset:
        """So many times the conversations in the same time, for more GPUs."""
        if rate_scale == 1.0:
            return self
        plan, at_once = self.plan, self.plan.at_once and max(1, round(self.plan.at_once * rate_scale))
        num_conversations = max(1, round(plan.num_conversations * rate_scale))
        plan = replace(plan, num_conversations=num_conversations, at_once=at_once, rate=plan.rate * rate_scale)
        return replace(self, title=f"{self.title} x {rate_scale:g}", plan=plan)


_CLOSED = TurnsPlan(num_conversations=32, at_once=8, name="turns")
_OPEN = TurnsPlan(num_conversations=32, rate=0.168, name="turns-open")
_CHATS = replace(_CLOSED, name="turns-text")
TURNS = {
    preset.name: preset
    for preset in (
        TurnsPreset("turns", "8 turns, 20k to 60k tokens, 8 conversations at once", _CLOSED),
        TurnsPreset("turns-open", "8 turns, 20k to 60k tokens, 0.168 conversations/s", _OPEN),
        TurnsPreset("turns-text", "8 turns as chats with tools, 20k to 60k tokens, 8 at once", _CHATS, is_text=True),
    )
}
"""By name. The rate of `turns-open` is 0.8 of what two mixed nodes answered in a closed loop (benchmarks/LOG.md)."""
