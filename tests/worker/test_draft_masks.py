"""Masks after drafts hold, slow down and end no row: also not the one that has the drafts."""

from __future__ import annotations

import time
from collections import defaultdict
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.worker import mask_threads
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.logits_stages import draft_masks, grammar_masks
from pd_cluster.worker.logits_stages.grammar_masks import GrammarMasks
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.mask_threads import CALM, Pace
from pd_cluster.worker.verification import NO_TOKEN
from tests.worker.test_grammars import EOS, VOCAB_SIZE, Rows, grammars, ids, moved, patience, rows, settle
from tests.worker.test_shared_lexers import HOSTILE, exhaust, restarts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pd_cluster.worker.grammars import GrammarState

__all__ = ["grammars", "ids", "patience", "restarts", "rows"]

# After "1b" a mask is more than the lexer may do
THREE_WAYS = f'start: "3"* ("1" X | "2" /[34]+/)\n{HOSTILE}'
FORCED = 'start: "8"? (/[12]/ "7")+'


def expect(rows: Rows, row: int, *drafts: int, is_known: bool = True) -> None:
    rows.stage.expect(np.array([row]), [drafts], np.array([is_known]))


def tried(rows: Rows, row: int) -> None:
    """Wait until all masks after the drafts of a row were tried."""
    future = rows.stage._constraint(row).tried
    assert future is not None
    future.result(60.0)


def allowed_after(rows: Rows, row: int, *drafts: int) -> list[set[int]]:
    """The tokens that a row may draw at each place of a run; none where nothing is drawn."""
    before = np.full((len(drafts) + 1, len(drafts)), NO_TOKEN)
    for place in range(len(drafts)):
        before[place + 1 :, place] = drafts[place]
    at = np.full(len(before), row)
    inputs = rows.stage.prepare_behind(at, np.full(len(at), 2), before)
    assert inputs is not None
    logits = torch.zeros(len(at), VOCAB_SIZE)
    rows.stage.apply(logits, inputs)
    void = set() if inputs.void is None else set(inputs.void.tolist())
    return [set() if place in void else set(np.flatnonzero(own == 0).tolist()) for place, own in enumerate(logits)]


@pytest.mark.parametrize("is_known", [False, True])
def test_masks_after_drafts_that_are_allowed(rows: Rows, ids: dict[str, int], is_known: bool) -> None:
    """Found by the thread that computes the row's mask, or told when it is ready."""
    rows.start(0, "start: /[12]/ /[34]/ /[56]/")
    settle(rows, 0)
    expect(rows, 0, ids["3"], ids["7"], ids["5"], is_known=False)
    assert rows.stage._constraint(0).tried is None, "the mask that is ready is not the one before them"
    rows.note(0, ids["1"])
    settle(rows, 0)
    if is_known:
        mask = rows.stage._constraint(0).masks[()]
        expect(rows, 0, ids["4"], ids["6"])
        assert rows.stage._constraint(0).is_ready
        tried(rows, 0)
        assert rows.stage._constraint(0).masks[()] is mask, "kept"
        first, *after = allowed_after(rows, 0, ids["4"], ids["6"])
        assert after == [{ids["5"], ids["6"]}, {EOS}]
    else:
        tried(rows, 0)
        first, *after = allowed_after(rows, 0, ids["3"], ids["7"], ids["5"])
        assert after == [{ids["5"], ids["6"]}, set(), set()]
    assert first == {ids["3"], ids["4"]}


def test_rows_of_one_call_have_drafts_of_any_number(rows: Rows, ids: dict[str, int]) -> None:
    for row in range(2):
        rows.start(row, FORCED)
        settle(rows, row)
    short, long = (ids["8"],), (ids["1"], ids["7"], ids["2"])
    rows.stage.expect(np.array([0, 1]), [short, long], np.array([True, True]))
    tried(rows, 1)
    digits = {ids["1"], ids["2"]}
    assert allowed_after(rows, 0, *short) == [digits | {ids["8"]}, digits]
    assert allowed_after(rows, 1, *long) == [digits | {ids["8"]}, {ids["7"]}, digits | {EOS}, {ids["7"]}]


@pytest.fixture
def held(rows: Rows) -> Iterator[Event]:
    """No mask after drafts is computed before it is set."""
    is_open = Event()
    rows.grammars.mask_threads.follow(lambda: check(is_open))
    yield is_open
    is_open.set()


def check(is_open: Event) -> None:
    assert is_open.wait(60)


def begin_all(rows: Rows, *of: int, token_id: int) -> None:
    """Note a token of several rows, in one call for all."""
    for row in of:
        rows.stage._constraint(row).pace = Pace.QUICK
    rows.stage.note(np.array(of), torch.tensor([token_id] * len(of)))


def test_rows_do_not_wait_for_masks_after_drafts(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those without drafts in the same call, nor those with. What is late ends the run, and no later one."""
    for row in range(2):
        rows.start(row, FORCED)
    settle(rows, 0, 1)
    expect(rows, 0, ids["1"], ids["7"], is_known=False)
    begin_all(rows, 0, 1, token_id=ids["8"])
    settle(rows, 0, 1)
    digits = {ids["1"], ids["2"]}
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.0)
    assert rows.stage.absent(np.array([0, 1])) == set()
    assert allowed_after(rows, 0, ids["1"], ids["7"]) == [digits, set(), set()]
    assert rows.allowed(1) == [digits]
    late = rows.stage._constraint(0).tried
    rows.stage.note(np.array([0]), torch.tensor([ids["2"]]))
    settle(rows, 0)
    assert late is not None
    assert not late.done()
    held.set()
    late.result(60.0)
    expect(rows, 0, ids["7"], ids["1"])
    tried(rows, 0)
    assert allowed_after(rows, 0, ids["7"], ids["1"]) == [{ids["7"]}, {EOS} | digits, {ids["7"]}]


@pytest.fixture
def gates(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Event]]:
    """The first masks after drafts are computed until the event of their grammar is set."""
    gates, draft_state = defaultdict[str, Event](Event), rows.grammars.draft_state

    def gated(grammar: str) -> GrammarState:
        check(gates[grammar])
        return draft_state(grammar)

    monkeypatch.setattr(rows.grammars, "draft_state", gated)
    yield gates
    for gate in gates.values():
        gate.set()


def test_a_step_waits_for_masks_after_drafts_as_for_others(
    rows: Rows, ids: dict[str, int], gates: dict[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no longer than MASK_WAIT_S after the token: they have no least time."""
    rows.start(0, FORCED)
    settle(rows, 0)
    expect(rows, 0, ids["8"], ids["1"])
    waits = list[float]()

    def wait(are_done: Callable[[], bool], deadline_s: float) -> None:
        assert not are_done()
        waits.append(deadline_s)

    with monkeypatch.context() as patch:
        patch.setattr(rows.grammars.mask_threads, "wait", wait)
        assert rows.stage.absent(np.array([0])) == set()
        patch.setattr(grammar_masks, "MASK_WAIT_S", 0.0)
        assert rows.stage.absent(np.array([0])) == set()
    assert waits[0] > 0
    assert waits[1] <= 0
    gates[FORCED].set()
    assert rows.stage.absent(np.array([0])) == set()
    assert len(allowed_after(rows, 0, ids["8"], ids["1"])[2]) == 1, "waited for"


def test_a_step_waits_for_the_drafts_of_all_of_its_rows(
    rows: Rows, ids: dict[str, int], gates: dict[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread computes them, one call after the other."""
    grammars = FORCED, "start: /[12]+/"
    for row, grammar in enumerate(grammars):
        rows.start(row, grammar)
    settle(rows, 0, 1)
    rows.stage.expect(np.array([0, 1]), [(ids["1"],), (ids["1"],)], np.array([True, True]))

    def wait(are_done: Callable[[], bool], _: float) -> None:
        for row, grammar in enumerate(grammars):
            assert not are_done()
            gates[grammar].set()
            tried(rows, row)
        assert are_done()

    monkeypatch.setattr(rows.grammars.mask_threads, "wait", wait)
    assert rows.stage.absent(np.array([0, 1])) == set()
    assert allowed_after(rows, 1, ids["1"]) == [{ids["1"], ids["2"]}, {ids["1"], ids["2"], EOS}]


def test_a_step_waits_for_no_drafts_while_those_of_an_earlier_one_are_computed(
    rows: Rows, ids: dict[str, int], gates: dict[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take long: of another grammar, which is hostile or is compiled."""
    grammars = FORCED, "start: /[12]+/"
    for row, grammar in enumerate(grammars):
        rows.start(row, grammar)
    settle(rows, 0, 1)
    expect(rows, 0, ids["1"])
    rows.stage.note(np.array([0]), torch.tensor([ids["8"]]))
    settle(rows, 0)
    rows.stage.expect(np.array([0, 1]), [(ids["1"],), (ids["1"],)], np.array([True, True]))

    def wait(are_done: Callable[[], bool], _: float) -> None:
        assert are_done()

    with monkeypatch.context() as patch:
        patch.setattr(rows.grammars.mask_threads, "wait", wait)
        assert rows.stage.absent(np.array([0, 1])) == set()
        for row in (0, 1):
            assert rows.stage._constraint(row).is_trying
    late = rows.stage._constraint(0).tried
    assert late is not None
    assert allowed_after(rows, 0, ids["1"]) == [{ids["1"], ids["2"]}, set()]
    for grammar in grammars:
        gates[grammar].set()
    late.result(60.0)
    assert rows.stage.absent(np.array([0, 1])) == set()
    assert allowed_after(rows, 1, ids["1"])[1] == {ids["1"], ids["2"], EOS}, "it is computed then, and waited for"


def test_a_row_goes_on_from_its_own_place_beside_drafts(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the masks after drafts are those of the place where they were told."""
    rows.start(0, FORCED)
    settle(rows, 0)
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.0)
    masks = rows.stage._constraint(0).masks
    expect(rows, 0, ids["1"], ids["7"])
    late = rows.stage._constraint(0).tried
    for digit in "827":
        assert ids[digit] in rows.allowed(0)[0]
        rows.note(0, ids[digit])
        settle(rows, 0)
    held.set()
    assert late is not None
    late.result(60.0)
    assert rows.allowed(0) == [{ids["1"], ids["2"], EOS}]
    assert list(masks) == list(rows.stage._constraint(0).masks) == [()], "none is computed that the row has passed"
    expect(rows, 0, ids["1"], ids["7"])
    tried(rows, 0)
    assert allowed_after(rows, 0, ids["1"], ids["7"])[1:] == [{ids["7"]}, {ids["1"], ids["2"], EOS}]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_masks_after_drafts_make_no_row_slow(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Measured alone, by CPU time, or with others."""
    for row in range(num_rows):
        rows.start(row, "start: /[12]+/")
        settle(rows, row)
        expect(rows, row, ids["1"], ids["1"], is_known=False)
        rows.stage._constraint(row).root.is_lone = False  # quick ones have been computed before
    for of in (mask_threads, draft_masks):
        monkeypatch.setattr(of, "SLOW_S", 1.5)
        monkeypatch.setattr(of, "SLOW_GROUP_S", 1.5)
    calls, advance = [], Grammars.advance

    def counted(grammars: Grammars, states: Any) -> None:
        calls.append(len(states))
        advance(grammars, states)

    monkeypatch.setattr(Grammars, "advance", counted)
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, clock, lambda: float(len(calls)))
    begin_all(rows, *range(num_rows), token_id=ids["2"])
    settle(rows, *range(num_rows))
    assert {rows.stage._constraint(row).pace for row in range(num_rows)} == {Pace.QUICK}
    held.set()
    tried(rows, 0)
    assert calls == [num_rows] * 4, "the rows' own masks, the place of the drafts, and the masks after each of two"


@pytest.fixture
def calls(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows of each call for masks that was made since it was cleared."""
    masks_after, found = rows.grammars.masks_after, list[int]()

    def noted(states: list[tuple[GrammarState, tuple[int, ...]]]) -> Any:
        found.append(len(states))
        return masks_after(states)

    monkeypatch.setattr(rows.grammars, "masks_after", noted)
    return found


def test_a_row_with_slow_drafts_rests(
    rows: Rows, ids: dict[str, int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of other rows wait after them: the call that was slow is the last one for CALM tokens."""
    rows.start(0, "start: /[12]+/")
    settle(rows, 0)
    calls.clear()
    monkeypatch.setattr(draft_masks, "SLOW_S", -1.0)
    expect(rows, 0, ids["1"], ids["1"], ids["1"])
    tried(rows, 0)
    assert calls == [1], "of three drafts"
    monkeypatch.setattr(draft_masks, "SLOW_S", 60.0)
    for num_noted in range(1, 1 + CALM):
        rows.note(0, ids["2"])
        settle(rows, 0)
        expect(rows, 0, ids["1"], ids["1"])
        assert (rows.stage._constraint(0).tried is not None) == (num_noted == CALM)
    tried(rows, 0)
    assert allowed_after(rows, 0, ids["1"], ids["1"]) == [{ids["1"], ids["2"], EOS}] * 3


def test_rows_with_drafts_that_may_be_slow_have_calls_of_their_own(
    rows: Rows, ids: dict[str, int], calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ones, and those of a call for several that was slow. None of these rests for that."""
    monkeypatch.setattr(draft_masks, "SLOW_S", 60.0)
    for row in (0, 1):
        rows.start(row, "start: /[12]+/")
        settle(rows, row)
    for group_s, numbers in ((60.0, [1, 1]), (-1.0, [2]), (60.0, [1, 1]), (60.0, [2])):
        monkeypatch.setattr(draft_masks, "SLOW_GROUP_S", group_s)
        calls.clear()
        rows.stage.expect(np.array([0, 1]), [(ids["1"],), (ids["2"],)], np.array([True, True]))
        for row in (0, 1):
            tried(rows, row)
        assert calls == numbers
        for row in (0, 1):
            rows.allowed(row)
            rows.note(row, ids["1"])
        settle(rows, 0, 1)


def test_an_exception_after_drafts_leaves_no_wrong_place(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has not taken the output, or has taken a part: it begins again."""
    rows.start(0, 'start: "8" /[12]+/ | /[12]+/ "9"')
    rows.note(0, ids["8"])
    settle(rows, 0)

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Grammars, "advance", broken)
        expect(rows, 0, ids["1"])
        tried(rows, 0)
    for _ in range(CALM):
        rows.note(0, ids["1"])
        settle(rows, 0)
    expect(rows, 0, ids["2"])
    tried(rows, 0)
    assert allowed_after(rows, 0, ids["2"])[1] == {ids["1"], ids["2"], EOS}


def test_masks_after_places_that_were_passed_are_not_awaited(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps without a draft of the row, however late the masks are."""
    rows.start(0, "start: /[12]+/")
    settle(rows, 0)
    expect(rows, 0, ids["1"])
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(rows.grammars.mask_threads, "wait", lambda *_: pytest.fail("a step waits for nothing"))
            expect(rows, 0)
            assert rows.stage.absent(np.array([0])) == set()
            rows.stage.note(np.array([0]), torch.tensor([ids["1"]]))
        settle(rows, 0)
    expect(rows, 0, ids["1"])
    assert rows.stage._constraint(0).is_trying
    rows.stage._constraint(0).pace = Pace.SLOW  # no masks are computed after the next drafts
    rows.stage.note(np.array([0]), torch.tensor([ids["1"]]))
    expect(rows, 0, ids["2"], is_known=False)
    settle(rows, 0)
    assert not rows.stage._constraint(0).is_trying


def test_a_system_without_threads_ends_no_row(
    demo_directory: Path, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Drafts have no masks then. It is tried and said once."""
    grammars = Grammars(demo_directory, VOCAB_SIZE, frozenset({EOS}))
    cpu = torch.device("cpu")
    rows = Rows(GrammarMasks(StageContext(2, VOCAB_SIZE, frozenset({EOS}), cpu, moved, grammars)), grammars)
    for row in (0, 1):
        rows.start(row, "start: /[12]+/")
        settle(rows, row)
        rows.note(row, ids["1"])
        settle(rows, row)
    refused = list[Thread]()

    def start(thread: Thread) -> None:
        refused.append(thread)
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", start)
        expect(rows, 0, ids["1"])
        for row in (0, 1):
            expect(rows, row, ids["2"], is_known=False)
            rows.note(row, ids["1"])
            settle(rows, row)
            assert allowed_after(rows, row, ids["2"])[1] == set()
    assert len(refused) == 1
    [said] = [record.message for record in caplog.records if "drafts" in record.message]
    assert said.endswith("can't start new thread")
    assert rows.allowed(0, 1) == [{ids["1"], ids["2"], EOS}] * 2
    grammars.close()


@pytest.mark.parametrize("num_failed", [0, 1])
def test_drafts_that_exhaust_the_lexer_end_no_row(
    rows: Rows, ids: dict[str, int], restarts: list[str], num_failed: int
) -> None:
    """Nor do they begin one again: they have a lexer of their own. Not when a row has exhausted its own before, too."""
    for row in range(2):
        rows.start(row, THREE_WAYS)
        settle(rows, row)
    if num_failed:
        exhaust(rows, 2, ids, THREE_WAYS)
    for row in range(2):
        rows.note(row, ids["3"])
        settle(rows, row)
    for row in range(2):
        expect(rows, row, ids["1"], ids["b"])
        tried(rows, row)
        assert allowed_after(rows, row, ids["1"], ids["b"])[2] == set()
    assert len(restarts) == 3 * num_failed
    for _ in range(1 + 2 * CALM):  # they rest for slow ones, and again when the place of the row has the error
        for row in range(2):
            rows.note(row, ids["3"])
            settle(rows, row)
            assert rows.allowed(row) == [{ids["1"], ids["2"], ids["3"]}]
            expect(rows, row, ids["2"])
            if rows.stage._constraint(row).tried is not None:
                tried(rows, row)
    for row in range(2):
        assert allowed_after(rows, row, ids["2"])[1] == {ids["3"], ids["4"]}, "another lexer"
        rows.note(row, ids["2"])
        settle(rows, row)
        assert rows.allowed(row) == [{ids["3"], ids["4"]}]
    assert rows.stage.take_failures() == {}
    assert len(restarts) == 3 * num_failed
    exhaust(rows, 0, ids, THREE_WAYS)  # by its own output: said as without drafts


def test_a_row_that_began_again_has_drafts(rows: Rows, ids: dict[str, int]) -> None:
    rows.start(0, THREE_WAYS)
    settle(rows, 0)
    exhaust(rows, 1, ids, THREE_WAYS)
    rows.note(0, ids["2"])
    settle(rows, 0)
    assert rows.stage._constraint(0).is_own
    expect(rows, 0, ids["3"])
    tried(rows, 0)
    assert allowed_after(rows, 0, ids["3"])[1] == {ids["3"], ids["4"], EOS}
