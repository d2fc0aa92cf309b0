"""What a grammar leaves no choice about is found beside the masks after drafts, and changes and holds no mask."""

from __future__ import annotations

import gc
import json
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.drafting.forced import ForcedTokens
from pd_cluster.worker import grammars as grammars_module
from pd_cluster.worker.grammars import GrammarState
from pd_cluster.worker.logits_stages import draft_masks
from pd_cluster.worker.logits_stages.draft_masks import DraftBranch, allows_one
from pd_cluster.worker.mask_threads import CALM, Pace
from tests.patient_masks import wait_for_masks
from tests.worker.test_draft_masks import FORCED, allowed_after, check, expect, gates, held, tried
from tests.worker.test_grammars import EOS, VOCAB_SIZE, Rows, grammars, ids, patience, rows, settle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from threading import Event

__all__ = ["gates", "grammars", "held", "ids", "patience", "rows"]

NAMES = 'start: ("1" | "2") "34" ("5" | "6") "78"'  # each digit is one token of the demo model


@pytest.fixture(autouse=True)
def sought(rows: Rows) -> None:
    assert rows.grammars.take_forced() == []


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The places of each call that was made for masks after drafts, or to search."""
    compute_after, calls = draft_masks._compute_after, list[list[int]]()

    def noted(branches: Sequence[DraftBranch]) -> None:
        calls.append([branch.place for branch in branches])
        compute_after(branches)

    monkeypatch.setattr(draft_masks, "_compute_after", noted)
    return calls


def found(rows: Rows, row: int = 0) -> list[tuple[int, int, list[int]]]:
    """What was told since the last call, once the thread of drafts is done."""
    wait_for_masks(rows.grammars.mask_threads)
    if rows.stage._constraint(row).tried is not None:
        tried(rows, row)
    return [(one.seq_id, one.start, list(one.token_ids)) for one in rows.grammars.take_forced()]


def note(rows: Rows, token_ids: Sequence[int], row: int = 0) -> None:
    for token_id in token_ids:
        rows.note(row, token_id)
        settle(rows, row)
        wait_for_masks(rows.grammars.mask_threads)


def of(ids: dict[str, int], digits: str) -> list[int]:
    return [ids[digit] for digit in digits]


def test_forced_tokens_are_told_with_their_place(rows: Rows, ids: dict[str, int]) -> None:
    rows.start(0, NAMES)
    settle(rows, 0)
    assert found(rows) == []
    note(rows, of(ids, "1"))
    assert found(rows) == [(0, 3, of(ids, "34"))], "after a prompt of two tokens"
    note(rows, of(ids, "34"))
    assert found(rows) == [], "known already"
    note(rows, of(ids, "6"))
    assert found(rows) == [(0, 6, of(ids, "78"))]
    note(rows, of(ids, "78"))
    assert found(rows) == [], "the end is none of them"
    assert rows.allowed(0) == [{EOS}]


def test_forced_tokens_after_drafts(rows: Rows, ids: dict[str, int]) -> None:
    """Those of the launched step, if the grammar allows all of them."""
    rows.start(0, NAMES)
    settle(rows, 0)
    expect(rows, 0, *of(ids, "2345"), is_known=False)
    note(rows, of(ids, "2"))
    expect(rows, 0, *of(ids, "345"))
    assert found(rows)[-1] == (0, 3, of(ids, "34578"))
    note(rows, of(ids, "34"))
    found(rows)
    for drafts in ("7", "57"):
        expect(rows, 0, *of(ids, drafts))
        assert found(rows)[-1:] == ([(0, 5, of(ids, "578"))] if drafts == "57" else [])
    assert allowed_after(rows, 0, *of(ids, "57"))[1:] == [{ids["7"]}, {ids["8"]}]


def test_a_row_that_comes_back_tells_the_same(rows: Rows, ids: dict[str, int]) -> None:
    """After a preemption, or on another node that continues the answer."""
    rows.start(0, NAMES, of(ids, "134"))
    settle(rows, 0)
    assert found(rows) == []
    note(rows, of(ids, "5"))
    assert found(rows) == [(0, 6, of(ids, "78"))]
    rows.start(0, NAMES, of(ids, "13"))
    settle(rows, 0)
    assert found(rows) == [(0, 4, of(ids, "4"))]


def test_at_the_beginning_of_an_output_nothing_is_sought(
    rows: Rows, ids: dict[str, int], searches: list[list[int]]
) -> None:
    """A prefill node would compile each grammar once more."""
    rows.start(0, 'start: "12345"')
    settle(rows, 0)
    wait_for_masks(rows.grammars.mask_threads)
    assert searches == []
    note(rows, of(ids, "1"))
    assert found(rows) == [(0, 3, of(ids, "2345"))]


def test_nothing_is_sought_before_it_is_asked_for(rows: Rows, ids: dict[str, int], searches: list[list[int]]) -> None:
    """As without drafts."""
    rows.grammars._is_sought = False
    rows.start(0, NAMES)
    settle(rows, 0)
    note(rows, of(ids, "1"))
    assert searches == []
    assert rows.grammars.take_forced() == []


def test_rows_with_slow_masks_tell_nothing(
    rows: Rows, ids: dict[str, int], searches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where their own masks are slow, nor those of drafts; the row rests then. Others may be sought again."""
    rows.start(0, 'start: "12345678"')
    settle(rows, 0)
    monkeypatch.setattr(draft_masks, "FORCED_S", -1.0)
    note(rows, of(ids, "12"))
    assert found(rows) == []
    assert searches == [[1]], "it rests"
    monkeypatch.setattr(draft_masks, "FORCED_S", 60.0)
    root = rows.stage._constraint(0).root
    root.seeks_from = 0
    monkeypatch.setattr(draft_masks, "SLOW_S", -1.0)
    note(rows, of(ids, "3"))
    assert found(rows) == [(0, 5, of(ids, "45678"))]
    monkeypatch.setattr(draft_masks, "SLOW_S", 60.0)
    searches.clear()
    root.seeks_from = 0
    note(rows, of(ids, "4"))
    assert searches == [], "it rests"
    root.rests_until = 0
    rows.stage._constraint(0).pace = Pace.SLOW
    wait_for_masks(rows.grammars.mask_threads)
    rows.stage.note(np.array([0]), torch.tensor(of(ids, "5")))
    rows.grammars.mask_threads.seek(lambda: setattr(rows.stage._constraint(0), "pace", Pace.SLOW))
    settle(rows, 0)
    wait_for_masks(rows.grammars.mask_threads)
    assert searches == []


def test_one_call_finds_what_many_rows_are_forced_to(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is that of all of them: each costs a part."""
    for row in range(4):
        rows.start(row, NAMES)
        settle(rows, row)
        note(rows, of(ids, "1"), row)
        rows.stage._constraint(row).pace = Pace.QUICK
        rows.stage._constraint(row).root.is_lone = False
    found(rows)
    for digit in "34":
        rows.stage.note(np.arange(4), torch.tensor(of(ids, digit) * 4))
        settle(rows, 0, 1, 2, 3)
    wait_for_masks(rows.grammars.mask_threads)
    calls, masks_after = list[int](), rows.grammars.masks_after

    def noted(states: Any) -> Any:
        calls.append(len(states))
        return masks_after(states)

    monkeypatch.setattr(rows.grammars, "masks_after", noted)
    monkeypatch.setattr(draft_masks, "FORCED_S", 1.5 / 4)
    monkeypatch.setattr(draft_masks, "SLOW_GROUP_S", 60.0)
    monkeypatch.setattr(time, "perf_counter", lambda: float(len(calls)))
    rows.stage.note(np.arange(4), torch.tensor(of(ids, "5") * 4))
    settle(rows, 0, 1, 2, 3)
    assert sorted(found(rows)) == [(row, 6, of(ids, "78")) for row in range(4)]


def test_no_draw_waits_for_forced_tokens(
    rows: Rows, ids: dict[str, int], held: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.start(0, NAMES)
    settle(rows, 0)
    rows.note(0, ids["1"])
    settle(rows, 0)
    monkeypatch.setattr(rows.grammars.mask_threads, "wait", lambda *_: pytest.fail("a step waits"))
    expect(rows, 0)
    assert rows.stage.absent(np.array([0])) == set()
    assert rows.allowed(0) == [{ids["3"]}]
    assert rows.grammars.take_forced() == []
    monkeypatch.undo()
    held.set()
    check(held)
    assert found(rows) == [(0, 3, of(ids, "34"))], "late, and still right"


def test_rows_with_drafts_keep_their_masks_beside_a_search(
    rows: Rows, ids: dict[str, int], gates: dict[str, Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes after those that wait, and a step waits for masks after drafts beside one that has begun."""
    other = 'start: ("1" | "2") "7" "34"'
    for row, grammar in enumerate((FORCED, NAMES, other)):
        rows.start(row, grammar)
        settle(rows, row)
    expect(rows, 0, *of(ids, "71"), is_known=False)
    rows.stage.note(np.arange(2), torch.tensor(of(ids, "11")))
    settle(rows, 0, 1)
    future = rows.stage._constraint(0).tried
    assert future is not None
    assert rows.grammars.mask_threads.followed is future
    gates[FORCED].set()
    tried(rows, 0)
    rows.stage.note(np.array([2]), torch.tensor(of(ids, "1")))  # its search is stopped: drafts come before
    settle(rows, 2)
    rows.stage._constraint(0).masks = {(): rows.stage._constraint(0).masks[()]}
    expect(rows, 0)
    expect(rows, 0, *of(ids, "71"))
    assert rows.grammars.mask_threads.followed is rows.stage._constraint(0).tried

    def wait(are_done: Callable[[], bool], _: float) -> None:
        assert not are_done()
        gates[NAMES].set()
        gates[other].set()
        tried(rows, 0)
        assert are_done()

    with monkeypatch.context() as patch:
        patch.setattr(rows.grammars.mask_threads, "wait", wait)
        assert rows.stage.absent(np.arange(3)) == set()
    digits = {ids["1"], ids["2"]}
    assert allowed_after(rows, 0, *of(ids, "71")) == [{ids["7"]}, digits | {EOS}, {ids["7"]}]


def test_a_search_begins_when_the_masks_of_its_rows_are_ready(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One for all of them. With one for each, before, the masks of 64 rows were 2 ms late."""
    for row in range(3):
        rows.start(row, NAMES)
        settle(rows, row)
        rows.stage._constraint(row).pace = Pace.QUICK
    are_ready, seek = list[list[bool]](), draft_masks._seek

    def noted(places: Any) -> None:
        are_ready.append([one.is_ready for one, _, _ in places])
        seek(places)

    monkeypatch.setattr(draft_masks, "_seek", noted)
    rows.stage.note(np.arange(3), torch.tensor(of(ids, "1") * 3))
    settle(rows, 0, 1, 2)
    assert sorted(found(rows)) == [(row, 3, of(ids, "34")) for row in range(3)]
    assert are_ready == [[True] * 3]


def test_a_search_that_finds_nothing_is_not_repeated_at_each_token(
    rows: Rows, ids: dict[str, int], searches: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vocabularies in which the model chooses among the tokens of a text."""
    monkeypatch.setattr(GrammarState, "forced", property(lambda _: []))
    rows.start(0, f'start: "1" "{"23" * CALM}"')
    settle(rows, 0)
    note(rows, of(ids, "1" + ("23" * CALM)[: CALM + 1]))
    assert searches == [[1], [1 + CALM]]


def test_searches_begin_no_more_lexers_than_are_allowed(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of rows that run count. A grammar that has one is sought again; ended rows make room."""
    monkeypatch.setattr(grammars_module, "MAX_DRAFTED", 1)
    monkeypatch.setattr(grammars_module, "MOST_DRAFT_LEXERS", 2)
    for row in range(4):
        rows.start(row, f'start: "{row}" "1234"')
        settle(rows, row)
        note(rows, of(ids, f"{row}"), row)
    assert [told[0] for told in found(rows)] == [0, 1]
    for row in range(3):
        rows.stage._rows[row] = None
    rows.grammars._compiled.clear()
    gc.collect()
    note(rows, of(ids, "1"), 3)
    assert found(rows, 3) == [(3, 4, of(ids, "234"))]


def test_no_run_is_lost_between_two_threads(rows: Rows) -> None:
    """What is told while the others are taken is taken next."""
    told = ForcedTokens(0, 3, (1,))
    rows.grammars.forced.append(told)
    append = rows.grammars.forced.append  # as a thread holds it when another one takes
    assert rows.grammars.take_forced() == [told]
    append(told)
    assert rows.grammars.take_forced() == [told]


def test_a_failure_of_the_library_ends_no_row(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(BaseException):
        """As a panic."""

    def broken(_: GrammarState) -> list[int]:
        raise Broken

    rows.start(0, NAMES)
    settle(rows, 0)
    with monkeypatch.context() as patch:
        patch.setattr(GrammarState, "forced", property(broken))
        note(rows, of(ids, "1"))
        assert found(rows) == []
    note(rows, of(ids, "34"))
    assert rows.allowed(0) == [{ids["5"], ids["6"]}]
    expect(rows, 0, *of(ids, "57"))
    tried(rows, 0)
    assert allowed_after(rows, 0, *of(ids, "57"))[1:] == [{ids["7"]}, {ids["8"]}], "drafts do not begin again"
    note(rows, of(ids, "5"))
    assert found(rows) == [], "it is not tried again"
    [said] = [record.message for record in caplog.records if "force" in record.message]
    assert "Broken" in said


def test_several_rows_tell_their_own(rows: Rows, ids: dict[str, int]) -> None:
    for row in range(3):
        rows.start(row, NAMES)
        settle(rows, row)
        note(rows, of(ids, "1"), row)
        assert found(rows, row) == [(row, 3, of(ids, "34"))]
    for row in range(3):
        rows.stage._constraint(row).pace = Pace.QUICK
        rows.stage._constraint(row).root.is_lone = False
    for row in range(3):
        note(rows, of(ids, "34"), row)
    rows.stage.note(np.arange(3), torch.tensor([ids["6"]] * 3))
    settle(rows, 0, 1, 2)
    assert sorted(found(rows)) == [(row, 6, of(ids, "78")) for row in range(3)]


def test_forced_tokens_change_no_mask(rows: Rows) -> None:
    """At no place of an answer. Each is the one that the mask of its place allows."""
    schema = {"type": "object", "properties": {"first_name": {"enum": ["Ann", "Anna"]}, "age": {"type": "integer"}}}
    grammar = json.dumps({"grammars": [{"json_schema": schema | {"required": ["first_name", "age"]}}]})
    compiled = rows.grammars.prepare(grammar)
    state, other = rows.grammars.state(compiled), rows.grammars.state(compiled)
    mask, plain = (np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32) for _ in range(2))
    rng, forced, num_forced = np.random.default_rng(3), list[int](), 0
    for _ in range(60):
        rows.grammars.fill({0: state}, mask)
        rows.grammars.fill({0: other}, plain)
        assert (mask == plain).all()
        allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little")).tolist()
        if forced:
            assert allowed == [forced[0]]
            num_forced += 1
        if allows_one(mask[0]):
            assert len(allowed) == 1
            told = state.forced
            assert told[: len(forced)] == forced
            forced = told
        else:
            assert len(allowed) > 1
            assert not forced
        if EOS in allowed:
            break
        token_id = int(rng.choice(allowed))
        forced = forced[1:]
        for one in (state, other):
            one.advance([token_id])
            assert not one.error
    assert num_forced > 3
