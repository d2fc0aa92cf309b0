"""What `benchmarks grammar_abuse` makes of the gaps that it measured, and that no two of its requests are the same."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from benchmarks.grammar_abuse import ALONE, FREE, HOSTILE_PHASE, Phase, summary
from benchmarks.hostile_grammars import HOSTILE


def test_ratios_are_to_the_stream_alone() -> None:
    phases = {
        ALONE: Phase([0.01] * 100), FREE: Phase([0.015] * 100, Counter({200: 7})),
        HOSTILE_PHASE: Phase([0.01] * 90 + [0.03] * 10, Counter({400: 2, 200: 1})),
    }  # fmt: skip
    found = summary(phases)
    assert [found[name]["p99_ratio"] for name in (ALONE, FREE, HOSTILE_PHASE)] == [1.0, 1.5, 3.0]
    assert (found[HOSTILE_PHASE]["p50_ms"], found[HOSTILE_PHASE]["p99_ms"]) == (10.0, 30.0)
    assert found[HOSTILE_PHASE]["statuses"] == {"200": 1, "400": 2}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_kept_answer_serves_the_next_request(name: str) -> None:
    fields_of, _ = HOSTILE[name]
    assert len({json.dumps(fields_of(number)) for number in range(20)}) == 20
