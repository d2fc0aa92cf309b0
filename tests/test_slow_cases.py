"""Cases that `make test` runs of a test over several parameters."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest

from tests.slow_cases import covering, mark_slow_cases


@pytest.mark.parametrize(
    ("values", "num_kept"), [(("ab", "c"), 2), (("ab", "cd"), 2), (("abc", "de"), 3), (("ab", "cd", "efg"), 3)]
)
def test_each_value_is_in_a_case_that_is_kept(values: tuple[str, ...], num_kept: int) -> None:
    cases = list(product(*values))
    kept = [cases[index] for index in sorted(covering(cases))]
    assert [{*column} for column in zip(*kept, strict=True)] == [{*column} for column in values]
    assert len(kept) == num_kept
    assert kept[0] == cases[0]


def test_equal_words_of_two_parameters_are_two_values() -> None:
    cases = list(product("ab", "ab"))
    assert {cases[index] for index in covering(cases)} == {("a", "a"), ("b", "b")}


def test_a_single_case_and_one_without_a_value_are_kept() -> None:
    assert covering([("a", "b")]) == {0}
    assert covering([]) == set()


class Case:
    """What `mark_slow_cases` uses of a test that pytest has collected."""

    def __init__(self, test: str, words: str, *marks: str) -> None:
        self.nodeid = f"tests/test_it.py::{test}[{'-'.join(words)}]"
        self.callspec = SimpleNamespace(_idlist=[*words])
        self.marks = {*marks}

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.marks else None

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def test_each_test_keeps_its_own_and_what_is_slow_keeps_nothing() -> None:
    own = [Case("test_a", words, "slow_cases") for words in ("ac", "ad", "bc", "bd")]
    own[0].marks.add("slow")
    other = [Case("test_b", words, "slow_cases") for words in ("ac", "bd")]
    unmarked = [Case("test_c", words) for words in ("ac", "ad", "bc", "bd")]
    mark_slow_cases(cast("list[pytest.Item]", [*own, *other, *unmarked]))
    assert [case.callspec._idlist for case in own if "slow" not in case.marks] == [["a", "d"], ["b", "c"]]
    assert not any("slow" in case.marks for case in (*other, *unmarked))


@pytest.mark.slow_cases
@pytest.mark.parametrize("one", ["a", "b"])
@pytest.mark.parametrize("other", ["c", "d"])
def test_the_mark_is_read(one: str, other: str, request: pytest.FixtureRequest) -> None:
    """By the names that pytest gives cases, of all of this test's: else each one keeps itself."""
    tests = [item for item in request.session.items if item.nodeid.startswith(request.node.nodeid.partition("[")[0])]
    kept = {item.nodeid for item in tests if not item.get_closest_marker("slow")}
    assert len(kept) == min(2, len(tests))
    assert request.node.nodeid in kept or request.node.get_closest_marker("slow")
