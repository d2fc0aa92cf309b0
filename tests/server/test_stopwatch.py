"""Times between tokens at a node: those of a delivery share the time before it."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from pd_cluster.server.node.metrics import NodeMetrics
from pd_cluster.server.node.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Sequence


class Delivered:
    """A request that begins at 10 s: `at` notes outputs, `figure` reads a metric once it is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now_s = 10.0
        monkeypatch.setattr("time.monotonic", lambda: self._now_s)
        self._watch = Stopwatch(self._now_s)
        self._metrics = NodeMetrics()
        self._lead = 0

    def at(self, now_s: float, *num_new: int) -> None:
        self._now_s = now_s
        self._lead += num_new[0] if num_new else 0
        self._watch.delivered(num_new, self._lead)

    def end(self, num_tokens: int) -> None:
        self._watch.observe(self._metrics, num_tokens, complete=True)

    def figure(self, name: str, **labels: str) -> float:
        found = self._metrics.registry.get_sample_value(f"pd_{name}", labels)
        assert found is not None
        return found

    def gaps(self) -> list[float]:
        return self._watch._gaps_s


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Delivered:
    return Delivered(monkeypatch)


def test_single_tokens_have_the_gaps_between_their_deliveries(seen: Delivered) -> None:
    times_s = [10.3, 10.31, 10.3237, 10.9]
    for now_s in times_s:
        seen.at(now_s, 1)
    assert seen.gaps() == [after - before for before, after in pairwise(times_s)]


def test_a_run_shares_the_time_before_it(seen: Delivered) -> None:
    seen.at(10.5, 1)
    seen.at(10.53, 3)
    seen.at(10.57, 1)
    assert seen.gaps() == pytest.approx([0.01, 0.01, 0.01, 0.04])
    seen.end(5)
    assert seen.figure("inter_token_latency_seconds_count") == 4
    assert seen.figure("inter_token_latency_seconds_sum") == pytest.approx(0.07)
    assert seen.figure("inter_token_latency_seconds_bucket", le="0.01") == 3
    assert seen.figure("time_per_output_token_seconds_sum") == pytest.approx(0.07 / 4)
    assert seen.figure("time_to_second_token_seconds_sum") == pytest.approx(0.53)


@pytest.mark.parametrize("num_new", [(3, 1), (1, 3), (3, 3)])
def test_sequences_go_on_side_by_side(seen: Delivered, num_new: Sequence[int]) -> None:
    seen.at(10.5, 1, 1)
    seen.at(10.53, *num_new)
    assert seen.gaps() == pytest.approx([0.01] * 3)


def test_an_output_without_tokens_is_no_gap(seen: Delivered) -> None:
    seen.at(10.5)
    seen.at(11.0, 0)  # what `max_tokens` 0 asks for
    seen.at(11.2, 0)
    seen.end(0)
    assert seen.gaps() == []
    assert seen.figure("time_to_first_token_seconds_sum") == pytest.approx(1.0)
