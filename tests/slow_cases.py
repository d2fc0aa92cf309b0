"""Which cases of a test over several parameters `make test` runs: enough that each value is in one; the rest are slow.

    @pytest.mark.slow_cases
    @pytest.mark.parametrize("budget", [1, 16, 512])
    @pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt-oss"])      # 4 cases of 12

For parameters that the code under test does not relate to each other: a defect of one value shows beside any other one.
What has to meet a certain value (a window and a block's edge) is a case of its own, or the test has no such mark.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence


def mark_slow_cases(items: Sequence[pytest.Item]) -> None:
    """Of all tests with this mark. A case that is slow by itself keeps no value for the others."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("slow_cases") and not item.get_closest_marker("slow"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        kept = covering([case.callspec._idlist for case in cases])  # one name for all that a decorator gives at once
        for index in {*range(len(cases))} - kept:
            cases[index].add_marker(pytest.mark.slow)


def covering(cases: Sequence[Sequence[str]]) -> set[int]:
    """Indices of the cases that are kept. A case: its value of each parameter. The first of equally good ones is."""
    values = [{*enumerate(case)} for case in cases]
    left = set[tuple[int, str]]().union(*values)
    kept = set[int]()
    while left:
        best = max(range(len(cases)), key=lambda index: len(values[index] & left))
        kept.add(best)
        left -= values[best]
    return kept
