"""What one request did and where its time went: the source of its log line, its spans and its metrics. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_router.calls.trace_context import TraceContext

if TYPE_CHECKING:
    from pd_http.node_report import NodeReport

FAILED = frozenset({"failed", "broken", "crashed", "stopped"})
_NO_TRACE = TraceContext()


class CallRecord:
    """Filled while the request runs; nothing is added after `end`. All times are seconds of the router's clock.

    It has no text of the client or of an answer, except the request's id, which has safe characters, and the names of
    models that nodes serve. Invariant: once a node has reported, the phases add up to `ttft_s`.
    """

    __slots__ = (
        "arrived_s", "asked_s", "ended_s", "failures", "first_s", "is_retried", "key", "last_s", "longest_gap_s",
        "model", "num_gaps", "order", "outcome", "path", "phases", "predicted_s", "prefill_by", "reason", "report",
        "request_id", "served_by", "status", "stream", "trace", "until_s", "wall_s",
    )  # fmt: skip

    def __init__(self, path: str, request_id: str, arrived_s: float, wall_s: float) -> None:
        self.path = path
        self.request_id = request_id
        self.arrived_s = self.until_s = arrived_s
        self.wall_s = wall_s  # Unix time of the arrival
        self.trace = _NO_TRACE
        self.key = ""  # the name of the client's API key
        self.model = ""  # that the client named, if a node serves it
        self.order = self.reason = "none"
        self.outcome = "ok"
        self.status = 0  # of the answer; 0: none was begun
        self.stream = False
        self.prefill_by = self.served_by = ""  # nodes
        self.failures: list[str] = []  # of legs: which leg, the node, the kind
        self.is_retried = False  # a leg failed before the first token
        self.phases: dict[str, float] = {}  # until the first token, one after the other
        self.predicted_s: float | None = None  # `ttft_s`, told before a node was asked; None: no figures yet
        self.report: NodeReport | None = None  # of the node that ended the answer
        self.asked_s = 0.0  # the decode node that answered
        self.first_s = self.last_s = self.ended_s = 0.0  # the first and the last piece of a stream; 0: not yet
        self.num_gaps = 0  # between the tokens of a stream
        self.longest_gap_s = 0.0  # between its pieces, however many tokens they have

    def until(self, now_s: float, phase: str) -> None:
        """The time since the last call, or the arrival, was `phase`."""
        self.phases[phase] = self.phases.get(phase, 0.0) + now_s - self.until_s
        self.until_s = now_s

    def predict(self, now_s: float, left_s: float | None) -> None:
        """The first token is expected `left_s` from now; None: not known. Ignored when a leg has failed."""
        if not self.is_retried:
            self.predicted_s = None if left_s is None else now_s - self.arrived_s + left_s

    def failed(self, leg: str) -> None:
        """A leg failed: which one, the node, the kind. A stream that has begun had its first token as predicted."""
        self.failures.append(leg)
        self.is_retried = self.is_retried or not self.first_s

    def answered(self, now_s: float, node: str) -> None:
        """The answer of the decode node that was asked at the last `until` has begun."""
        self.asked_s, self.served_by = self.until_s, node
        self.until(now_s, "answer")

    def first_piece(self, now_s: float) -> None:
        """The first piece of the stream goes to the client. `ModelTotals.piece` notes the others."""
        self.first_s = self.last_s = now_s
        self.until(now_s, "send")

    def reported(self, report: NodeReport | None, *, is_first_node: bool) -> None:
        """Take the node's report, and split the first token's time by it: of a continued stream another node had it."""
        self.report = report
        if report is None:
            return
        if not is_first_node:
            return
        left_s = self.phases.pop("answer", 0.0)
        if not self.stream:  # the rest is the generation's
            left_s = min(left_s, report.first_s)
        reported = report.phases
        if leg_s := reported.get("prefill_leg", 0.0):  # the decode node is asked while the prefill node computes
            left_s += self.phases.pop("ticket", 0.0)
            queue_s = reported.get("prefill_queue", 0.0)
            parts, rest = {"prefill_queue": queue_s, "prefill": leg_s - queue_s}, "handoff"
        else:
            parts, rest = {name: reported[name] for name in ("queue", "prefill") if name in reported}, "network"
            parts["node"] = report.first_s - sum(parts.values())
        for name, seconds in parts.items():  # measured by other clocks: together never more than the router measured
            self.phases[name] = min(max(0.0, seconds), left_s)
            left_s -= self.phases[name]
        self.phases[rest] = left_s
        if "send" in self.phases:  # it comes last
            self.phases["send"] = self.phases.pop("send")

    def end(self, now_s: float, outcome: str, status: int) -> None:
        self.ended_s, self.outcome, self.status = now_s, outcome, status

    @property
    def has_failed(self) -> bool:
        """Whether the cluster failed the client. Refusals and clients that leave are no failures."""
        return self.outcome in FAILED

    @property
    def ttft_s(self) -> float | None:
        """From the arrival to the first token: to the client, or at the node if the answer is not streamed.

        None: no node reported it.
        """
        if self.first_s:
            return self.first_s - self.arrived_s
        return sum(self.phases.values()) if self.report is not None else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token after the first one. None: there was none, or it was not streamed."""
        tokens = self.report.num_output_tokens if self.report is not None else 0
        return (self.last_s - self.first_s) / (tokens - 1) if self.num_gaps and tokens > 1 else None

    def line(self) -> dict[str, Any]:
        """The record as one JSON object. Times are in ms, except `time`: Unix seconds."""
        report = self.report
        line: dict[str, Any] = {
            "event": "request",
            "time": round(self.wall_s, 3),
            "id": self.request_id,
            "trace": self.trace.trace_id,
            "key": self.key,
            "path": self.path,
            "model": self.model,
            "stream": self.stream,
            "route": self.order,
            "reason": self.reason,
            "outcome": self.outcome,
            "status": self.status,
            "prefill": self.prefill_by,
            "decode": self.served_by,
            "total_ms": _ms(self.ended_s - self.arrived_s),
            "phases_ms": {name: _ms(seconds) for name, seconds in self.phases.items()},
        }
        if (ttft_s := self.ttft_s) is not None:
            line["ttft_ms"] = _ms(ttft_s)
        if self.predicted_s is not None:
            line["predicted_ttft_ms"] = _ms(self.predicted_s)
        if self.num_gaps:
            line["itl_ms"] = {"mean": _ms((self.last_s - self.first_s) / self.num_gaps), "max": _ms(self.longest_gap_s)}
        if report is not None:
            line["tokens"] = {
                "prompt": report.num_prompt_tokens,
                "cached": report.num_cached_tokens,
                "output": report.num_output_tokens,
            }
            if report.num_drafts:
                line["drafts"] = {"verified": report.num_drafts, "accepted": report.num_accepted_drafts}
            line["node_ms"] = {name: _ms(seconds) for name, seconds in report.phases.items()}
        if self.failures:
            line["failures"] = self.failures
        return line


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
