"""A table's row, and a record's columns, of conversations: measured or simulated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pd_cluster.bench.statistics import RequestRecord, Summary
    from pd_cluster.bench.turn_statistics import TurnsSummary

HEADERS = (
    "", "requests/s", "output tokens/s", "TTFT of first turns p50/90/99", "of later turns", "TPOT p50/90",
    "longest gap p50/90", "uncached tokens, later turns", "found again: prompts, answers", "targets",
    "left out: share, TTFT p50/99",
)  # fmt: skip
COLUMNS = (
    "conversation", "turn", "sent_s", "num_input", "num_cached", "num_output", "ttft_ms", "tpot_ms", "longest_gap_ms",
    "predicted_ms", "route", "error",
)  # fmt: skip


def turn_row(setting: str, summary: TurnsSummary) -> list[str]:
    """Times are in ms. Targets: the shares that are within them, as `TurnsSummary.attained` has them."""

    def cell(part: Summary | None, name: str, *ranks: int) -> str:
        found = part.spreads.get(name) if part else None
        return "" if found is None else "/".join(f"{getattr(found, f'p{rank}_ms'):.0f}" for rank in ranks)

    whole, first, later = summary.whole, *(summary.parts.get(name) for name in ("first turns", "later turns"))
    failed = f" ({sum(summary.errors.values())} failed)" if summary.errors else ""
    uncached = later.input_tokens * (1 - later.cached_share) / max(1, later.num_ok) if later else 0.0
    tpot = whole.spreads.get("tpot")
    return [
        setting + failed, f"{whole.request_rate:.2f}", f"{whole.output_rate:.0f}", cell(first, "ttft", 50, 90, 99),
        cell(later, "ttft", 50, 90, 99), "" if tpot is None else f"{tpot.p50_ms:.1f}/{tpot.p90_ms:.1f}",
        cell(whole, "longest gap", 50, 90), f"{uncached:.0f}",
        f"{summary.found_history:.0%}, {summary.found_answers:.0%}",
        "/".join(f"{share:.2f}" for share in summary.attained.values()),
        f"{1 - whole.num_requests / summary.num_requests:.0%} {cell(summary.parts.get('left out'), 'ttft', 50, 99)}",
    ]  # fmt: skip


def route_lines(summary: TurnsSummary) -> list[str]:
    """Of each route: its share, TTFT p50/90, and what the router predicted of it."""
    lines = []
    for name, part in summary.parts.items():
        ttft, ratio = (part.spreads.get(kind) for kind in ("ttft", "real of predicted"))
        if name.endswith((" turns", "left out")) or ttft is None:
            continue
        told = f", real / predicted p50 {ratio.p50_ms / 1e3:.2f}, p90 {ratio.p90_ms / 1e3:.2f}" if ratio else ""
        share = part.num_ok / summary.whole.num_ok
        lines.append(f"{name}: {share:.0%}, TTFT {ttft.p50_ms:.0f}/{ttft.p90_ms:.0f}{told}")
    return lines


def turn_columns(record: RequestRecord) -> list[Any]:
    """A request's COLUMNS; null for a missing value. All times of a failed request are null."""
    times = (record.ttft_s, record.tpot_s, record.longest_gap_s) if record.ok else (None,) * 3
    return [
        record.conversation, record.turn, round(record.sent_s, 3), record.num_input, record.num_cached,
        record.num_output,
        *(None if value is None else round(value * 1e3, 2) for value in (*times, record.predicted_s)),
        record.route, record.error,
    ]  # fmt: skip
