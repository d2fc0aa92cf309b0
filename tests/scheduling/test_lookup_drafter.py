"""The drafter of a node: its indexes come and go with sequences, and nothing of one is done in the step of another."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pd_cluster.config import SchedulerConfig
from pd_cluster.drafting import indexes as indexing
from pd_cluster.drafting.chances import LEAST_NEW, LONGEST
from pd_cluster.drafting.indexes import TEXT_BYTES, IndexedText, Indexes
from pd_cluster.drafting.lookup import LAG, LEAST, NUM_NONE, PIECE, Lookup
from pd_cluster.drafting.lookup_drafter import OUTPUT_BYTES, OUTPUT_PIECE, LookupDrafter
from pd_cluster.drafting.token_index import TOKEN_BYTES, OutputIndex, TokenIndex
from pd_cluster.engine.replies import reply_of
from pd_cluster.protocol.messages import TokensOut, Work
from pd_cluster.protocol.sampling_params import BeamParams
from pd_cluster.scheduling.drafts import Drafting, Speculation
from pd_cluster.scheduling.lifecycle import Update
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.targets import AIM, Targets
from tests.deadlines import HANG_S
from tests.drafters import LaterPool, lookup_drafter
from tests.scheduling.simulation import EOS, message, prompt
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

REPEATED = [*range(20)] * 2


@pytest.mark.long
def test_a_prompt_of_60000_tokens_costs_no_step_more_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside 16 streams. Its index is made by the pool, in pieces; what a step does is counted in tokens."""
    pool, taken, made, freed = LaterPool(), list[int](), list[int](), list[int]()
    take, init, of_ints = OutputIndex.take, TokenIndex.__init__, np.fromiter

    def counted_take(self: OutputIndex, last: int, token_ids: Sequence[int]) -> None:
        taken.append(len(token_ids))
        take(self, last, token_ids)

    def counted_init(self: TokenIndex, token_ids: Sequence[int]) -> None:
        made.append(len(token_ids))
        init(self, token_ids)

    def counted_ints(ids: Any, dtype: Any, count: int) -> Any:
        freed.append(count)
        return of_ints(ids, dtype, count)

    monkeypatch.setattr(OutputIndex, "take", counted_take)
    monkeypatch.setattr(TokenIndex, "__init__", counted_init)
    monkeypatch.setattr(np, "fromiter", counted_ints)
    drafter = LookupDrafter(Indexes(pool))
    outputs = {seq_id: [*range(40), 5] for seq_id in range(16)}
    for seq_id in outputs:
        drafter.expect({seq_id: [*range(40)]}, (), 40)
        assert drafter.offer(seq_id, outputs[seq_id], 0, 16) is None
    pool.run()
    long = [at % 7919 for at in range(60_000)]
    drafter.expect({16: long}, (), len(long))
    outputs[16] = [*long, long[0]]
    made.clear()
    freed.clear()
    offered = dict.fromkeys(outputs, 0)
    for _ in range(3 * PIECE):
        taken.clear()
        for seq_id, token_ids in outputs.items():
            offered[seq_id] += drafter.offer(seq_id, token_ids, 0, 16) is not None
            token_ids.append((token_ids[-1] + 1) % (40 if seq_id < 16 else 7919))
        assert sum(taken) <= 16 * LAG
        assert made == []
    assert offered.pop(16) == 0
    assert min(offered.values()) > 2 * PIECE
    pool.run()
    assert made == [60_000]
    assert max(freed) <= 4096
    for _ in range(2 + 3):
        taken.clear()
        offer = drafter.offer(16, outputs[16], 0, 16)
        assert max(taken) <= PIECE
        if offer is not None:
            break
    assert offer is not None
    assert offer.first(1)[0] == (outputs[16][-1] + 1) % 7919
    for seq_id in outputs:
        drafter.forget(seq_id)
    drafter.check()


def test_sequences_of_one_request_share_an_index_until_the_last_has_ended() -> None:
    indexes = Indexes(LaterPool(at_once=True))
    drafter = LookupDrafter(indexes)
    drafter.expect(dict.fromkeys(range(3), REPEATED), (7, 8, 9), len(REPEATED))
    own = 2 * TEXT_BYTES + TOKEN_BYTES * (len(REPEATED) + 3)
    assert indexes.num_bytes == 0, "a prompt that waits leaves the memory to those that run"
    token_ids = [*REPEATED, 0]
    assert drafter.offer(0, token_ids, 0, 2) is not None
    assert indexes.num_bytes == own + OUTPUT_PIECE * OUTPUT_BYTES
    drafter.forget(0)
    assert indexes.num_bytes == own
    with pytest.raises(AssertionError):
        drafter.check()
    drafter.forget(2)
    drafter.forget(1)
    drafter.check()
    # With tokens of an answer each has an index of its own
    known = {3: [*REPEATED, 1], 4: [*REPEATED, 2]}
    drafter.expect(known, (), len(REPEATED))
    for seq_id, ids in known.items():
        drafter.offer(seq_id, ids, 0, 2)
    assert indexes.num_bytes == 2 * (TEXT_BYTES + TOKEN_BYTES * (len(REPEATED) + 1))
    drafter.forget(3)
    drafter.forget(4)
    drafter.check()


def test_over_the_bound_a_sequence_does_not_draft_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexing, "SPARE_BYTES", 0)
    monkeypatch.setattr(indexing, "MOST_BYTES", 2 * (TEXT_BYTES + TOKEN_BYTES * 40) + OUTPUT_PIECE * OUTPUT_BYTES)
    drafter = lookup_drafter()
    texts = {seq_id: [*REPEATED, 0] for seq_id in range(2)}
    for seq_id in texts:
        drafter.expect({seq_id: REPEATED}, (), len(REPEATED))
    assert drafter.offer(0, texts[0], 0, 2) is not None
    assert drafter.offer(1, texts[1], 0, 2) is None, "there was room for its text, not for its output"
    drafter.forget(0)
    assert drafter.offer(1, texts[1], 0, 2) is not None
    drafter.expect({2: [1] * 1_000}, (), 1_000)
    assert drafter.offer(2, [1] * 1_000, 1, 2) is None
    drafter.forget(1)
    assert drafter.offer(2, [1] * 1_000, 1, 2) is None
    found = drafter.offer(2, [1] * 1_000, 1, 2)
    assert found is None, "behind no token of an answer nothing has been searched yet"
    drafter.forget(2)
    drafter.check()


def test_texts_leave_room_for_the_outputs_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    text = IndexedText(REPEATED, len(REPEATED), 1)
    monkeypatch.setattr(indexing, "MOST_BYTES", indexing.SPARE_BYTES + text.num_bytes - 1)
    indexes = Indexes(LaterPool(at_once=True))
    indexes.index_of(text)
    assert text.index is None
    assert indexes.take(OUTPUT_PIECE * OUTPUT_BYTES)
    monkeypatch.setattr(indexing, "MOST_BYTES", indexing.MOST_BYTES + 1 + OUTPUT_PIECE * OUTPUT_BYTES)
    indexes.index_of(text)
    assert text.index is not None


def test_a_refused_thread_is_said_once_and_nothing_drafts(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Executor):
        def submit(self, *args: Any, **more: Any) -> Any:
            raise RuntimeError("can't start new thread")

    drafter = LookupDrafter(Indexes(Refusing()))
    with caplog.at_level(logging.WARNING):
        for seq_id in range(3):
            drafter.expect({seq_id: REPEATED}, (1, 2), len(REPEATED))
            assert drafter.offer(seq_id, [*REPEATED, 0], 0, 2) is None
            drafter.forget(seq_id)
    assert len([line for line in caplog.messages if "nothing is drafted" in line]) == 1
    drafter.check()


def test_an_index_that_fails_is_logged_and_one_on_a_thread_is_right(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())  # other tests' objects, and so their threads, may not be collected yet
    indexes = Indexes()
    text, failing = (IndexedText(REPEATED, len(REPEATED), 1) for _ in range(2))
    indexes.index_of(text)
    assert text.made is not None
    text.made.result(60)
    assert text.index is not None
    assert text.index.places(0, 1) == [22, 2]
    monkeypatch.setattr(indexing, "TokenIndex", lambda _: 1 / 0)
    indexes.index_of(failing)
    assert failing.made is not None
    failing.made.result(60)
    assert failing.index is None
    assert "no index" in caplog.text
    for one in (text, failing):
        indexes.release(one)
    assert indexes.num_bytes == 0
    del indexes
    for thread in set(threading.enumerate()) - before:
        thread.join(HANG_S)
        assert not thread.is_alive(), "it ends with what it works for"


def drafting_of(world: World) -> Drafting:
    drafting = world.scheduler._drafting
    assert drafting is not None
    return drafting


def test_prompts_for_others_and_beams_have_no_drafts() -> None:
    world = World(drafts=True)
    asked = [
        message("p", prompt(20), work=Work.PREFILL), message("b", prompt(20), beams=BeamParams(width=2)),
        message("g", prompt(20), n=2), message("t", prompt(20), work=Work.TAKE_OVER),
    ]  # fmt: skip
    requests = [world.submit(one) for one in asked]
    expected = {seq.seq_id for request in requests[2:] for seq in request.sequences}
    assert drafting_of(world)._credits.keys() == expected
    for request in requests[2:]:
        world.take(world.scheduler.abort(request))
    assert not drafting_of(world)._credits


def test_while_no_step_waits_outputs_are_indexed_and_chances_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, take = list[int](), OutputIndex.take

    def counted_take(self: OutputIndex, last: int, token_ids: Sequence[int]) -> None:
        taken.append(len(token_ids))
        take(self, last, token_ids)

    monkeypatch.setattr(OutputIndex, "take", counted_take)
    drafter = lookup_drafter()
    outputs = {seq_id: [*REPEATED, 0] for seq_id in range(2)}
    for seq_id in outputs:
        drafter.expect({seq_id: REPEATED}, (), len(REPEATED))
        assert drafter.offer(seq_id, outputs[seq_id], 0, 4) is not None
    reached = drafter._chances.after[LONGEST].reached
    for step in range(LEAST_NEW // 2):
        for seq_id, token_ids in outputs.items():
            token_ids.append((token_ids[-1] + 1) % 20)
            assert drafter.offer(seq_id, token_ids, 0, 4) is not None
        taken.clear()
        drafter.prepare(lambda: True)
        assert not taken, "a step waits"
        drafter.prepare(lambda: False)
        assert sum(taken) == (2 * LEAST if (step + 2) % LEAST == 0 else 0)
    drafter.prepare(lambda: False)
    assert drafter._chances.after[LONGEST].reached[0] > reached[0]
    for seq_id in outputs:
        drafter.forget(seq_id)
    drafter.check()


def test_a_step_without_a_match_indexes_nothing_that_could_be_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search finds what was before the newest token, and that was indexed while no step waited."""
    drafter, token_ids = lookup_drafter(), [*REPEATED, 0, 500]
    drafter.expect({0: REPEATED}, (), len(REPEATED))
    drafter.offer(0, token_ids, 0, 4)
    drafter.prepare(lambda: False)
    for token in range(501, 501 + 2 * LAG):
        token_ids.append(token)
        with monkeypatch.context() as patch:
            patch.delattr(OutputIndex, "take")
            assert drafter.offer(0, token_ids, 0, 4) is None
        drafter.prepare(lambda: False)
    token_ids += [510, 511]
    offer = drafter.offer(0, token_ids, 0, 4)
    assert offer is not None
    assert offer.first(4) == (512, 513, 514, 515)
    drafter.forget(0)


@pytest.mark.parametrize("has_time", [True, False])
def test_matches_wait_only_where_steps_leave_time(has_time: bool) -> None:
    drafter, token_ids = lookup_drafter(), [*REPEATED]
    drafter.expect({0: REPEATED}, (), len(REPEATED))
    found = []
    for token in (*range(500, 500 + NUM_NONE), 4, 5, 6):
        token_ids.append(token)
        offer = drafter.offer(0, token_ids, 0, 4)
        found.append(None if offer is None else offer.first(1)[0])
        drafter.prepare(lambda: not has_time)
    assert found == [None] * (NUM_NONE + 1) + [None if has_time else 6, 7]
    drafter.forget(0)


def test_while_memory_is_full_no_output_is_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor beyond what was counted, where tokens have come without offers."""
    drafter = lookup_drafter()
    token_ids = [*REPEATED, 0]
    drafter.expect({0: REPEATED}, (), len(REPEATED))
    assert drafter.offer(0, token_ids, 0, 4) is not None
    lookup = drafter._drafted[0].lookup
    assert lookup is not None
    token_ids += [at % 20 for at in range(1, 3 * OUTPUT_PIECE)]
    for _ in range(5):
        drafter.offer(0, token_ids, 0, 4)
        drafter.prepare(lambda: False)
        assert lookup._num_indexed <= drafter._drafted[0].room
    monkeypatch.setattr(indexing, "MOST_BYTES", 0)
    for at in range(4 * OUTPUT_PIECE):
        token_ids.append(at % 20)
        drafter.offer(0, token_ids, 0, 4)
        drafter.prepare(lambda: False)
    assert lookup._num_indexed <= drafter._drafted[0].room
    assert drafter.offer(0, token_ids, 0, 4) is None
    drafter.forget(0)
    drafter.check()


def test_sequences_without_new_tokens_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """While no step waits. Each of 1,024 took as long as an index of its token."""
    drafter, looked = lookup_drafter(), list[Lookup]()
    outputs = {seq_id: [*REPEATED, 0] for seq_id in range(3)}
    for seq_id, token_ids in outputs.items():
        drafter.expect({seq_id: REPEATED}, (), len(REPEATED))
        drafter.offer(seq_id, token_ids, 0, 4)
    outputs[1] += range(1, 1 + LEAST)
    for seq_id, token_ids in outputs.items():
        drafter.offer(seq_id, token_ids, 0, 4)
    index = Lookup.index

    def noted(self: Lookup, *least: int) -> None:
        looked.append(self)
        index(self, *least)

    monkeypatch.setattr(Lookup, "index", noted)
    for _ in range(3):
        drafter.prepare(lambda: False)
    assert looked == [drafter._drafted[1].lookup]


def test_what_was_drafted_and_accepted_is_counted_by_place() -> None:
    world = World(drafts=True)
    requests = [world.submit(message(f"{index}", prompt(9, index), max_tokens=40, seed=index)) for index in range(3)]
    while any(not request.finished for request in requests):
        world.start_step()
    counters, worker = world.scheduler.counters, world.worker
    assert counters["spec_decode_num_draft_tokens_total"] == worker.num_drafts > 0
    assert counters["spec_decode_num_accepted_tokens_total"] == worker.num_accepted > 0
    assert 0 < counters["spec_decode_num_drafts_total"] <= worker.num_drafts
    places = [
        counters[f"spec_decode_num_accepted_tokens_per_pos_total|position={at}"]
        for at in range(SchedulerConfig().max_drafts)
    ]
    assert sum(places) == worker.num_accepted
    replies = [reply_of(Update(request, (), finished=True)) for request in requests]
    of_requests = [(one.num_drafts, one.num_accepted_drafts) for one in replies if isinstance(one, TokensOut)]
    assert [*map(sum, zip(*of_requests, strict=True))] == [worker.num_drafts, worker.num_accepted]
    assert all(0 < accepted <= drafts for drafts, accepted in of_requests)
    assert places == sorted(places, reverse=True)
    assert not any(name.startswith("spec") for name in World().scheduler.counters)


def test_targets_bound_steps_with_drafts() -> None:
    """Of gaps always, of a stream's pace while one has no draft, else credit; what is usual for prompts is no bound."""
    world = World(tpot_s=1.0)
    request = world.submit(message("a", prompt(9), max_tokens=40))
    world.start_step()
    world.start_step()

    def limits(targets: Targets) -> tuple[float, float]:
        budget = StepBudget(targets, StepModel(), lambda: world.now_s, lambda: 0.0)
        return budget.most_with_drafts_s(world.scheduler._queues)

    none = limits(Targets())
    assert none == limits(Targets(itl_s=0.01, context=1024)) == (float("inf"),) * 2
    assert limits(Targets(itl_s=2.0)) == (AIM * 2.0, float("inf"))
    most_s, most_shared_s = limits(Targets(tpot_s=1.0, itl_s=3.0))
    assert most_s == AIM * 3.0
    assert 0 < most_shared_s < 1.0, "its tokens come once a second, later than they are due"
    world.take(world.scheduler.abort(request))


@pytest.mark.long
def test_the_real_drafter_in_a_scheduler() -> None:
    """Sequences that come, wait, are preempted and end: what they generate is right, and nothing of them is kept."""
    world = World(drafts=True, num_blocks=14, num_host_blocks=4)
    drafting = drafting_of(world)
    drafting._drafter = lookup_drafter()
    drafting._costs = Speculation(drafting._drafter)
    requests = [
        world.submit(message(f"{at}", prompt(16 + at, at % 2), max_tokens=60, n=1 + at % 3, seed=at)) for at in range(6)
    ]
    while any(not request.finished for request in requests):
        world.start_step()
    world.settle()
    world.scheduler.check()
    assert EOS == 0
    assert world.worker.num_drafts > 0
    assert sum(world.scheduler.counters[f"preemptions_{kind}_total"] for kind in ("recompute", "swap")) > 0
