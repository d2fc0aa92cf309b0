"""Rows of one grammar share a lexer, and none of them ends another."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import Future
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.worker.grammars import Grammars, GrammarState
from pd_cluster.worker.logits_stages.grammar_masks import GrammarMasks
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.mask_threads import Pace
from tests.worker.test_grammars import (
    DIGITS,
    EOS,
    VOCAB_SIZE,
    Rows,
    grammars,
    ids,
    moved,
    never,
    patience,
    rows,
    settle,
)

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["grammars", "ids", "patience", "rows"]

# A mask within the first word after "1" is more than the lexer may do. After "2" it has little to do
HOSTILE = "X: /(?s:.{1,5000})/ & /(\\S+\\s+){0,99}\\S+/"
TWO_WAYS = f'start: "1" X | "2" /[34]+/\n{HOSTILE}'


@pytest.fixture
def restarts(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The grammars that were compiled for one row alone."""
    restart, found = rows.grammars.restart, list[str]()

    def noted(grammar: str, failed: Future[Any]) -> Future[Any]:
        found.append(grammar)
        return restart(grammar, failed)

    monkeypatch.setattr(rows.grammars, "restart", noted)
    return found


def exhaust(rows: Rows, row: int, ids: dict[str, int], grammar: str = TWO_WAYS) -> None:
    """Let a row fail by its own lexer."""
    rows.start(row, grammar)
    settle(rows, row)
    for letter in "1b":
        rows.note(row, ids[letter])
        settle(rows, row)
    assert rows.allowed(row) == [set(range(VOCAB_SIZE))], "a row that cannot go on is free"
    [(failed, said)] = rows.stage.take_failures().items()
    assert (failed, said.code) == (row, "grammar_failed")
    assert "lexer error" in str(said)


def test_a_lexer_that_a_row_has_exhausted_ends_no_other_row(
    rows: Rows, ids: dict[str, int], restarts: list[str]
) -> None:
    """At each place in its answer: before the first token, and after some."""
    more = {ids["3"], ids["4"]}
    for row, output in enumerate(["", "2", "23", "2343"]):
        rows.start(row, TWO_WAYS)
        settle(rows, row)
        for digit in output:
            rows.note(row, ids[digit])
            settle(rows, row)
    exhaust(rows, 4, ids)
    assert restarts == [TWO_WAYS], "the others have not asked the lexer since"
    first, second, *_ = ids["2"], ids["3"]
    for row, token_id in enumerate([first, second, second, second]):
        rows.note(row, token_id)
    settle(rows, 0, 1, 2, 3)
    assert rows.allowed(0, 1, 2, 3) == [more, *[more | {EOS}] * 3]
    assert rows.stage.take_failures() == {}
    assert len(restarts) == 5


def test_a_row_begins_again_once_however_often_others_fail(
    rows: Rows, ids: dict[str, int], restarts: list[str]
) -> None:
    rows.start(0, TWO_WAYS)
    settle(rows, 0)
    rows.note(0, ids["2"])
    for num_failed in range(1, 4):
        exhaust(rows, num_failed, ids)
        rows.note(0, ids["3"])
        settle(rows, 0)
        assert rows.allowed(0) == [{ids["3"], ids["4"], EOS}]
        assert len(restarts) == num_failed + 1, "one of the row, and one of each that failed"


def test_rows_that_begin_again_do_not_hold_the_rows_beside_them(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They leave the call for all rows, and their grammars are compiled on the threads of compilations."""
    for row, grammar in enumerate([TWO_WAYS, DIGITS]):
        rows.start(row, grammar)
        settle(rows, row)
    exhaust(rows, 2, ids)
    monkeypatch.setattr(rows.grammars, "restart", lambda *_: Never())
    one, other = (rows.stage._constraint(row) for row in (0, 1))
    one.pace = other.pace = Pace.QUICK
    at = np.array([0, 1])
    rows.stage.note(at, torch.tensor([ids["2"], ids["1"]]))
    settle(rows, 1)
    assert rows.allowed(1) == [{ids["2"], ids["3"]}]
    assert not one.is_ready


def test_a_lexer_of_one_row_ends_with_it(demo_directory: Path, ids: dict[str, int]) -> None:
    """Without a collection of garbage, which the step loop seldom makes."""
    grammars = Grammars(demo_directory, VOCAB_SIZE, frozenset({EOS}))
    rows = Rows(
        GrammarMasks(StageContext(6, VOCAB_SIZE, frozenset({EOS}), torch.device("cpu"), moved, grammars)), grammars
    )
    rows.start(0, TWO_WAYS)
    settle(rows, 0)
    exhaust(rows, 1, ids)
    rows.note(0, ids["2"])
    settle(rows, 0)
    one = rows.stage._constraint(0)
    assert (one.is_own, one.error) == (True, "")
    lexer = weakref.ref(one.compiled)
    grammars.close()  # no thread computes a mask any more
    gc.disable()
    try:
        del one
        rows.start(0, "")
        assert lexer() is None
    finally:
        gc.enable()


class Watched:
    """A matcher of llguidance that notes the tokens which it takes with the interpreter's lock."""

    def __init__(self, matcher: Any, taken: list[int]) -> None:
        self.matcher, self.taken = matcher, taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def deep_copy(self) -> Watched:
        return Watched(self.matcher.deep_copy(), self.taken)

    def consume_token(self, token_id: int) -> bool:
        self.taken.append(token_id)
        return bool(self.matcher.consume_token(token_id))


class Executor:
    """llguidance's. It notes of how many matchers each call takes a token."""

    def __init__(self, executor: Any) -> None:
        self.executor, self.calls = executor, list[int]()

    def consume_token_par(self, pairs: list[tuple[Any, int]]) -> list[bool]:
        self.calls.append(len(pairs))
        found: list[bool] = self.executor.consume_token_par([(getattr(one, "matcher", one), at) for one, at in pairs])
        return found


def test_no_row_waits_for_the_lexer_with_the_interpreters_lock(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`consume_token` and a call for one matcher do. The step loop would wait for the mask of a sibling."""
    for row in range(3):
        rows.start(row, 'start: "7" "8" | "1" "2" <|im_end|>')
    settle(rows, 0, 1, 2)
    taken, computing, may_end, fill = list[int](), Event(), Event(), GrammarState.fill
    states = [rows.stage._constraint(row).state for row in range(3)]
    for state in states:
        assert state is not None
        state.matcher = Watched(state.matcher, taken)

    def slow(state: GrammarState, mask: npt.NDArray[np.int32]) -> None:
        fill(state, mask)
        if state is states[0]:
            computing.set()
            assert may_end.wait(60.0)

    monkeypatch.setattr(GrammarState, "fill", slow)
    tools = rows.grammars._tools.result()
    executor = Executor(tools.mask_executor)
    noted = Future[Any]()
    noted.set_result(tools._replace(mask_executor=executor))
    monkeypatch.setattr(rows.grammars, "_tools", noted)
    try:
        rows.note(0, ids["7"])
        assert computing.wait(60.0)
        assert (taken, executor.calls) == ([ids["7"]], []), "no mask was computed with the lexer"
        taken.clear()
        rows.stage._constraint(1).pace = Pace.SUSPECT  # another thread
        rows.stage.note(np.array([1, 1]), torch.tensor([ids["1"], ids["2"]]))
        settle(rows, 1)
        assert rows.allowed(1) == [{EOS}]
        assert (taken, executor.calls) == ([], [2] * 3), "two tokens, and the end that the grammar names"
    finally:
        may_end.set()
    settle(rows, 0)
    rows.note(2, ids["1"])
    settle(rows, 2)
    assert taken == [ids["1"]]


class Never:
    """A compilation that does not end."""

    def add_done_callback(self, _: object) -> None: ...


class PanicOfRust(BaseException):
    """As pyo3's PanicException, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("the lock is poisoned"), "poisoned"), (MemoryError(), "MemoryError"), (PanicOfRust("oh"), "oh")],
)
def test_an_exception_of_one_row_ends_no_row_of_the_same_call(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    for row in range(3):
        rows.start(row, DIGITS)
    settle(rows, 0, 1, 2)
    advance, broken = Grammars.advance, rows.stage._constraint(1)

    def raising(self: Grammars, states: list[tuple[GrammarState, list[int]]]) -> None:
        if any(state is broken.state for state, _ in states):
            raise error
        advance(self, states)

    monkeypatch.setattr(Grammars, "advance", raising)
    constraints = [rows.stage._constraint(row) for row in range(3)]
    for one in constraints:
        one.pace, one.is_lone = Pace.QUICK, False
    rows.stage.note(np.arange(3), torch.tensor([ids["1"]] * 3))
    settle(rows, 0, 1, 2)
    assert rows.allowed(0, 1, 2) == [{ids["2"], ids["3"]}, set(range(VOCAB_SIZE)), {ids["2"], ids["3"]}]
    assert said in str(rows.stage.take_failures()[1])


def test_a_grammar_that_cannot_be_compiled_again_ends_its_request(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.start(0, TWO_WAYS)
    settle(rows, 0)
    exhaust(rows, 1, ids)
    monkeypatch.setattr(rows.grammars, "_compile", never)
    rows.note(0, ids["2"])
    settle(rows, 0)
    rows.allowed(0)
    assert "cannot be compiled: never" in str(rows.stage.take_failures()[0])
