"""Plots a load test: distributions on the left and in the middle, the course of the test on the right."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pd_cluster.bench.statistics import RequestRecord, Summary

Window: TypeAlias = tuple[float, float]  # seconds
BLUE, ORANGE, GREY, RED = "#1f5fa8", "#d9762b", "#8a8f98", "#c0392b"


def check_plotting() -> None:
    """Raise StartupError without matplotlib. Call it before the measurement."""
    try:
        import matplotlib
    except ImportError as error:
        raise StartupError("--plot needs matplotlib: pip install -e '.[bench]'") from error
    matplotlib.use("Agg")


def plot_serve(
    path: Path, summary: Summary, records: Sequence[RequestRecord], title: str, window_s: Window | None = None
) -> None:
    """Write the plot to `path`, its distributions of what was sent within the window. Raises StartupError without
    matplotlib, and OSError.
    """
    check_plotting()
    from matplotlib import pyplot

    begin_s, end_s = window_s or (-inf, inf)
    good = [record for record in records if record.ok and begin_s <= record.sent_s <= end_s]
    figure, (first, gaps, course) = pyplot.subplots(1, 3, figsize=(15, 4.4), layout="constrained")
    try:
        later = [record.ttft_s for record in good if record.turn]
        _distribution(first, [record.ttft_s for record in good if not record.turn], "first token", BLUE)
        _distribution(first, later, "first token of later turns", RED)
        _distribution(first, [value for record in good if (value := record.ttst_s) is not None], "second token", ORANGE)
        _finish_distribution(first, "time since sending, ms", summary.objectives_ms.get("ttft"))
        _distribution(gaps, [gap for record in good for gap in record.itl_s], "ITL (each token)", GREY)
        _distribution(
            gaps, [value for record in good if (value := record.tpot_s) is not None], "TPOT (per request)", BLUE
        )
        longest = [value for record in good if (value := record.longest_gap_s) is not None]
        _distribution(gaps, longest, "longest gap (per request)", ORANGE)
        limit_ms = summary.objectives_ms.get("tpot", summary.objectives_ms.get("longest_gap"))
        _finish_distribution(gaps, "time between tokens, ms", limit_ms)
        if window_s is not None:
            course.axvspan(begin_s, end_s, color=GREY, alpha=0.15, label="counted")
        _course(course, records)
        figure.suptitle(title, fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    finally:
        pyplot.close(figure)


def _distribution(axes: Any, values_s: list[float], label: str, colour: str) -> None:
    if not values_s:
        return
    values_ms = np.sort(np.asarray(values_s) * 1e3)
    shares = np.arange(1, len(values_ms) + 1) / len(values_ms)
    p50, p99 = np.percentile(values_ms, (50, 99))
    axes.step(values_ms, shares, where="post", color=colour, label=f"{label}: p50 {p50:.4g}, p99 {p99:.4g}")


def _finish_distribution(axes: Any, label: str, objective_ms: float | None) -> None:
    if objective_ms is not None:
        axes.axvline(objective_ms, color=RED, linestyle="--", linewidth=1, label=f"objective {objective_ms:g}")
    from matplotlib.ticker import LogFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    axes.set(xlabel=label, ylabel="share of requests or gaps", ylim=(0, 1.02))
    axes.grid(alpha=0.3, which="both")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize=8)


def _course(axes: Any, records: Sequence[RequestRecord]) -> None:
    """TTFT by time of sending, failures as crosses, and the number of open requests."""
    good = [record for record in records if record.ok]
    bad = [record for record in records if not record.ok]
    axes.scatter([r.sent_s for r in good], [r.ttft_s * 1e3 for r in good], s=12, color=BLUE, label="TTFT, ms")
    if bad:
        times, label = [r.sent_s for r in bad], f"failed ({len(bad)})"
        axes.scatter(times, [0.0] * len(bad), s=24, marker="x", color=RED, clip_on=False, label=label)
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    times, open_now = [at_s for at_s, _ in changes], np.cumsum([change for _, change in changes])
    right = axes.twinx()
    right.step(times, open_now, where="post", color=GREY, linewidth=1, label="requests in flight")
    right.set(ylabel="requests in flight", ylim=(0, max(1, int(open_now.max())) * 1.15))
    axes.set(xlabel="time of sending, s", ylabel="TTFT, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    handles = [a + b for a, b in zip(axes.get_legend_handles_labels(), right.get_legend_handles_labels(), strict=True)]
    axes.legend(*handles, loc="upper left", fontsize=8)
