"""Masks behind drafts hold, slow down and end no row: also not the one that has the drafts."""

from __future__ import annotations

import time
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.worker import mask_threads
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.logits_stages import grammar_masks
from pd_cluster.worker.mask_threads import Pace
from pd_cluster.worker.verification import NO_TOKEN
from tests.worker.test_grammars import EOS, VOCAB_SIZE, Rows, grammars, ids, patience, rows, settle
from tests.worker.test_shared_lexers import HOSTILE, exhaust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["grammars", "ids", "patience", "rows"]

# Behind "1b" a mask is more than the lexer may do
THREE_WAYS = f'start: "3"* ("1" X | "2" /[34]+/)\n{HOSTILE}'
FORCED = 'start: "8"? (/[12]/ "7")+'


def expect(rows: Rows, row: int, *drafts: int, is_known: bool = True) -> None:
    rows.stage.expect(np.array([row]), [drafts], np.array([is_known]))


def tried(rows: Rows, row: int) -> None:
    """Wait until all masks behind the drafts of a row were tried."""
    future = rows.stage._constraint(row).tried
    assert future is not None
    future.result(60.0)


def allowed_behind(rows: Rows, row: int, *drafts: int) -> list[set[int]]:
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
def test_masks_behind_drafts_that_are_allowed(rows: Rows, ids: dict[str, int], is_known: bool) -> None:
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
        first, *behind = allowed_behind(rows, 0, ids["4"], ids["6"])
        assert behind == [{ids["5"], ids["6"]}, {EOS}]
    else:
        tried(rows, 0)
        first, *behind = allowed_behind(rows, 0, ids["3"], ids["7"], ids["5"])
        assert behind == [{ids["5"], ids["6"]}, set(), set()]
    assert first == {ids["3"], ids["4"]}


def test_rows_of_one_call_have_drafts_of_any_number(rows: Rows, ids: dict[str, int]) -> None:
    for row in range(2):
        rows.start(row, FORCED)
        settle(rows, row)
    short, long = (ids["8"],), (ids["1"], ids["7"], ids["2"])
    rows.stage.expect(np.array([0, 1]), [short, long], np.array([True, True]))
    tried(rows, 1)
    digits = {ids["1"], ids["2"]}
    assert allowed_behind(rows, 0, *short) == [digits | {ids["8"]}, digits]
    assert allowed_behind(rows, 1, *long) == [digits | {ids["8"]}, {ids["7"]}, digits | {EOS}, {ids["7"]}]


@pytest.fixture
def held(rows: Rows) -> Iterator[Event]:
    """No mask behind drafts is computed before it is set."""
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


def test_rows_do_not_wait_for_masks_behind_drafts(
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
    assert allowed_behind(rows, 0, ids["1"], ids["7"]) == [digits, set(), set()]
    assert rows.allowed(1) == [digits]
    rows.stage.note(np.array([0]), torch.tensor([ids["2"]]))
    settle(rows, 0)
    late = rows.stage._constraint(0).tried
    assert late is not None
    assert not late.done()
    held.set()
    late.result(60.0)
    expect(rows, 0, ids["7"], ids["1"])
    tried(rows, 0)
    assert allowed_behind(rows, 0, ids["7"], ids["1"]) == [{ids["7"]}, {EOS} | digits, {ids["7"]}]


def test_a_step_waits_for_masks_behind_drafts_as_for_others(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But no longer than MASK_WAIT_S behind the token: they have no least time."""
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
    held.set()
    assert rows.stage.absent(np.array([0])) == set()
    assert len(allowed_behind(rows, 0, ids["8"], ids["1"])[2]) == 1, "waited for"


def test_a_row_goes_on_from_its_own_place_beside_drafts(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While copies of its state are still to be made, the state takes nothing."""
    rows.start(0, FORCED)
    settle(rows, 0)
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.0)
    state, masks = rows.stage._constraint(0).state, rows.stage._constraint(0).masks
    expect(rows, 0, ids["1"], ids["7"])
    for digit in "827":
        assert ids[digit] in rows.allowed(0)[0]
        rows.note(0, ids[digit])
        settle(rows, 0)
    assert rows.stage._constraint(0).state is not state
    held.set()
    tried(rows, 0)
    assert rows.allowed(0) == [{ids["1"], ids["2"], EOS}]
    assert list(masks) == list(rows.stage._constraint(0).masks) == [()], "none is computed that the row has passed"


@pytest.mark.parametrize("num_rows", [1, 2])
def test_masks_behind_drafts_make_no_row_slow(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    """Measured alone, by CPU time, or with others."""
    for row in range(num_rows):
        rows.start(row, "start: /[12]+/")
        settle(rows, row)
        expect(rows, row, ids["1"], ids["1"], is_known=False)
    monkeypatch.setattr(mask_threads, "SLOW_S", 1.5)
    monkeypatch.setattr(mask_threads, "SLOW_GROUP_S", 1.5)
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
    assert calls == [num_rows] * 3


@pytest.mark.parametrize("num_failed", [0, 1])
def test_drafts_that_exhaust_the_lexer_end_no_row(rows: Rows, ids: dict[str, int], num_failed: int) -> None:
    """Neither of their row nor of others, and not when another row has exhausted it before."""
    for row in range(2):
        rows.start(row, THREE_WAYS)
        settle(rows, row)
    if num_failed:
        exhaust(rows, 2, ids, THREE_WAYS)
    for row in range(2):
        rows.note(row, ids["3"])
        settle(rows, row)
    for _ in range(3):
        expect(rows, 0, ids["1"], ids["b"])
        if rows.stage._constraint(0).tried is not None:
            tried(rows, 0)
        for row in range(2):
            assert rows.allowed(row) == [{ids["1"], ids["2"], ids["3"]}]
            rows.note(row, ids["3"])
            settle(rows, row)
    for row in range(2):
        rows.note(row, ids["2"])
        settle(rows, row)
        assert rows.allowed(row) == [{ids["3"], ids["4"]}]
    assert rows.stage.take_failures() == {}
    exhaust(rows, 0, ids, THREE_WAYS)  # by its own output: said as without drafts
