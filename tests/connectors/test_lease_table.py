"""P's lease table: what a reader may read, until when, and what it answers when asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pd_connectors import lease as lease_module
from pd_connectors.base import LeaseEnded, PublishSpec
from pd_connectors.lease import ABANDON_GRACE_S, LeaseTable
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.protocol.messages import Confirm, LeaseRef, LeaseState, PrefillFacts, SampledToken
from tests.connectors.layouts import full_layout, runs
from tests.connectors.simulation import VirtualClock

TTL_S = 10.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def table(clock: VirtualClock) -> LeaseTable:
    return LeaseTable("P", 1, full_layout(), TTL_S, clock)


def confirm(table: LeaseTable, ref: LeaseRef, num_tokens: int, generation: int = 0) -> bool:
    return table.confirm(Confirm(ref, generation, num_tokens, nonce=1)).ok


def test_confirm_covers_what_was_announced_and_nothing_else(table: LeaseTable) -> None:
    ref = table.open(40, hold=False)
    assert not confirm(table, ref, 16)
    table.announce(PublishSpec(ref.lease_id, runs(0, (4, 5)), 32, 0))
    assert confirm(table, ref, 32)
    assert not confirm(table, ref, 40)
    assert not confirm(table, ref, 0)
    assert not confirm(table, ref, 32, generation=1)


def test_retract_voids_and_raises_the_generation(table: LeaseTable) -> None:
    ref = table.open(32, hold=False)
    table.announce(PublishSpec(ref.lease_id, runs(0, (4,)), 16, 0))
    assert table.retract(ref.lease_id) == 1
    assert not confirm(table, ref, 16)
    state = table.renew(ref)
    assert (state.generation, state.num_tokens_readable, state.runs) == (1, 0, ())
    table.announce(PublishSpec(ref.lease_id, runs(0, (4, 5)), 32, 0))  # of a step planned before the retraction
    assert table.renew(ref).num_tokens_readable == 0
    table.announce(PublishSpec(ref.lease_id, runs(0, (8, 9)), 32, 1))
    assert confirm(table, ref, 32, generation=1)
    assert not confirm(table, ref, 32, generation=0)


def test_what_a_reader_is_told_of_a_prefill_that_goes_on(clock: VirtualClock) -> None:
    table = LeaseTable("P", 1, full_layout(), TTL_S, clock, wall_clock=lambda: 1e9 + clock.now)
    ref = table.open(32, hold=False)
    assert not table.renew(ref).is_begun
    table.announce(PublishSpec(ref.lease_id, (), 0, 0))
    begun = table.renew(ref)
    assert (begun.is_begun, begun.num_tokens_readable, begun.runs) == (True, 0, ())
    assert [state.is_begun for state in table.take_changed()] == [True]
    assert not confirm(table, ref, 16)
    assert table.retract(ref.lease_id) == 1
    assert not table.renew(ref).is_begun, "its blocks are gone: it may have to wait for others"
    table.announce(PublishSpec(ref.lease_id, (), 0, 0))  # of the step before
    assert not table.renew(ref).is_begun
    clock.now += 2.0
    table.announce(PublishSpec(ref.lease_id, runs(0, (8, 9)), 32, 1))
    clock.now += 1.0
    table.finish(ref.lease_id, (SampledToken(3),), PrefillFacts(0.5))
    told = table.renew(ref)
    assert (told.is_begun, told.announced_at, told.prefill.seconds) == (True, 1e9 + clock.now - 1.0, 0.5)


def test_first_tokens_come_with_the_last_blocks_in_one_change(table: LeaseTable) -> None:
    ref = table.open(20, hold=True)
    table.announce(PublishSpec(ref.lease_id, runs(0, (4, 5)), 20, 0, (SampledToken(3),), PrefillFacts(0.5)))
    (state,) = table.take_changed()
    assert (state.num_tokens_readable, state.first_tokens, state.prefill.seconds) == (20, (SampledToken(3),), 0.5)
    assert state.version == 2
    assert state.ttl_s == TTL_S, "the clock of a held lease starts, as with `finish`"


def test_first_tokens_hold_when_the_blocks_were_taken_back(table: LeaseTable) -> None:
    ref = table.open(20, hold=False)
    assert table.retract(ref.lease_id) == 1
    table.take_changed()
    table.announce(PublishSpec(ref.lease_id, runs(0, (4, 5)), 20, 0, (SampledToken(3),)))  # planned before
    (state,) = table.take_changed()
    assert (state.generation, state.num_tokens_readable, state.first_tokens) == (1, 0, (SampledToken(3),))
    table.announce(PublishSpec(ref.lease_id, runs(0, (4, 5)), 20, 0))
    table.end(ref.lease_id, LeaseEnd.REVOKED)
    table.take_changed()
    table.announce(PublishSpec(ref.lease_id, runs(0, (4, 5)), 20, 1, (SampledToken(3),)))
    assert table.take_changed() == []


@pytest.mark.parametrize("how", ["release", "expire", "end"])
def test_an_ended_lease_confirms_nothing(table: LeaseTable, clock: VirtualClock, how: str) -> None:
    ref = table.open(16, hold=False)
    table.announce(PublishSpec(ref.lease_id, runs(0, (4,)), 16, 0))
    match how:
        case "release":
            table.release(ref)
        case "expire":
            clock.now += TTL_S
            table.expire()
        case "end":
            table.end(ref.lease_id, LeaseEnd.REVOKED)
    assert not confirm(table, ref, 16)
    reasons = {"release": LeaseEnd.RELEASED, "expire": LeaseEnd.EXPIRED, "end": LeaseEnd.REVOKED}
    assert table.renew(ref).ended == reasons[how]
    assert table.take_ended() == ([] if how == "end" else [LeaseEnded(ref.lease_id, reasons[how])])
    assert table.retract(ref.lease_id) is None
    assert len(table) == 0


def test_ending_a_lease_swallows_its_pending_event(table: LeaseTable) -> None:
    ref = table.open(16, hold=False)
    table.release(ref)
    table.end(ref.lease_id, LeaseEnd.REVOKED)
    assert table.take_ended() == []


def test_renewals_keep_a_lease_alive(table: LeaseTable, clock: VirtualClock) -> None:
    ref = table.open(16, hold=False)
    for _ in range(5):
        clock.now += TTL_S * 0.9
        assert table.renew(ref).ended is None
    assert table.expire() == clock.now + TTL_S
    clock.now += TTL_S
    assert table.expire() == float("inf")
    assert table.take_ended() == [LeaseEnded(ref.lease_id, LeaseEnd.EXPIRED)]


def test_the_clock_of_a_held_lease_starts_when_it_is_finished(table: LeaseTable, clock: VirtualClock) -> None:
    ref = table.open(16, hold=True)
    clock.now += 100 * TTL_S
    assert table.expire() == float("inf")
    table.announce(PublishSpec(ref.lease_id, runs(0, (4,)), 16, 0))
    table.finish(ref.lease_id, (SampledToken(3),))
    assert table.expire() == clock.now + TTL_S
    assert table.renew(ref).first_tokens == (SampledToken(3),)
    clock.now += TTL_S / 2
    table.finish(ref.lease_id, (SampledToken(3),))
    assert table.expire() == clock.now + TTL_S / 2, "finishing again is no renewal"


def test_readers_are_told_how_often_to_renew(table: LeaseTable) -> None:
    held, running = table.open(16, hold=True), table.open(16, hold=False)
    assert table.renew(held).ttl_s == 0.0
    assert table.renew(running).ttl_s == TTL_S
    table.finish(held.lease_id, (SampledToken(3),))
    assert table.renew(held).ttl_s == TTL_S


def test_every_change_is_told_once_and_the_end_comes_last(table: LeaseTable) -> None:
    ref = table.open(16, hold=False)
    assert table.take_changed() == []
    table.announce(PublishSpec(ref.lease_id, runs(0, (4,)), 16, 0))
    told = table.take_changed()
    table.finish(ref.lease_id, (SampledToken(3),))
    told += table.take_changed()
    table.retract(ref.lease_id)
    told += table.take_changed()
    table.release(ref)
    told += table.take_changed()
    assert table.take_changed() == []
    assert [state.num_tokens_readable for state in told] == [16, 16, 0, 0]
    assert [sum(len(run.block_ids) for run in state.runs) for state in told] == [1, 1, 0, 0]
    assert [state.first_tokens for state in told] == [(), (SampledToken(3),), (SampledToken(3),), ()]
    assert [state.generation for state in told] == [0, 0, 1, 1]
    assert [state.ended for state in told] == [None, None, None, LeaseEnd.RELEASED]
    versions = [state.version for state in told]
    assert versions == sorted(set(versions)), "snapshots are ordered by their versions"


def test_shutdown_ends_every_lease_and_tells_its_readers(table: LeaseTable) -> None:
    refs = [table.open(16, hold=hold) for hold in (False, True)]
    table.end_all(LeaseEnd.REVOKED)
    assert len(table) == 0
    assert {state.lease: state.ended for state in table.take_changed()} == dict.fromkeys(refs, LeaseEnd.REVOKED)
    assert table.take_ended() == [], "the engine wanted it"


def test_ending_one_lease_leaves_the_events_of_others(table: LeaseTable) -> None:
    gone, other = table.open(16, hold=False), table.open(16, hold=False)
    table.release(other)
    assert table.has_ended
    table.end(gone.lease_id, LeaseEnd.REVOKED)
    assert table.take_ended() == [LeaseEnded(other.lease_id, LeaseEnd.RELEASED)]
    assert not table.has_ended


def test_the_next_lease_to_run_out_is_the_next_timer(table: LeaseTable, clock: VirtualClock) -> None:
    first, _ = table.open(16, hold=False), table.open(16, hold=True)
    clock.now += 1.0
    table.open(16, hold=False)
    assert table.expire() == clock.now - 1.0 + TTL_S
    table.renew(first)
    assert table.expire() == clock.now + TTL_S


def test_a_lease_lives_until_the_very_end_of_its_time(table: LeaseTable, clock: VirtualClock) -> None:
    ref = table.open(16, hold=False)
    table.announce(PublishSpec(ref.lease_id, runs(0, (4,)), 16, 0))
    clock.now += TTL_S - 0.001
    assert table.expire() == clock.now + 0.001
    assert len(table) == 1
    clock.now += 0.001
    assert confirm(table, ref, 16), "it ends when the table is told to look, and its blocks stay until then"
    table.expire()
    assert table.renew(ref).ended is LeaseEnd.EXPIRED
    assert not confirm(table, ref, 16)


def test_a_renewal_that_came_in_time_counts_however_late_it_is_heard(table: LeaseTable, clock: VirtualClock) -> None:
    ref = table.open(16, hold=False)
    clock.now += 2 * TTL_S
    assert table.renew(ref).ended is None
    assert table.expire() == clock.now + TTL_S
    assert table.take_ended() == []


def test_an_abandoned_lease_that_runs_out_sooner_is_not_prolonged(table: LeaseTable, clock: VirtualClock) -> None:
    ref = table.open(16, hold=False)
    clock.now += TTL_S - ABANDON_GRACE_S / 2
    table.abandon(ref)
    assert table.expire() == clock.now + ABANDON_GRACE_S / 2
    held = table.open(16, hold=True)
    table.renew(ref)
    table.abandon(held)
    assert table.expire() == clock.now + ABANDON_GRACE_S
    table.abandon(LeaseRef("P", 1, "unheard-of"))


def test_so_many_ended_leases_are_remembered_and_no_more(table: LeaseTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "MAX_TOMBSTONES", 2)
    refs = [table.open(16, hold=False) for _ in range(3)]
    for ref in refs:
        table.release(ref)
    assert [table.renew(ref).ended for ref in refs] == [LeaseEnd.EXPIRED, LeaseEnd.RELEASED, LeaseEnd.RELEASED]
    assert [state.lease for state in table.take_changed()] == refs[1:], "of a forgotten one there is nothing to tell"


@pytest.mark.parametrize(
    "wrong",
    [
        PublishSpec("", runs(0, (4,)), 8, 0),  # neither whole blocks nor the whole prompt
        PublishSpec("", runs(0, (4, 5, 6, 7)), 56, 0),  # more than the prompt
        PublishSpec("", runs(0, (4,)), 32, 0),  # fewer blocks than tokens
        PublishSpec("", runs(0, (9, 5)), 32, 0),  # another block than was announced
        PublishSpec("", (), 0, 0),  # less than was announced
    ],
)
def test_an_announcement_that_cannot_be_true_is_a_bug_of_the_engine(table: LeaseTable, wrong: PublishSpec) -> None:
    ref = table.open(40, hold=False)
    table.announce(PublishSpec(ref.lease_id, runs(0, (4,)), 16, 0))
    with pytest.raises(AssertionError):
        table.announce(replace(wrong, lease_id=ref.lease_id))


def test_an_abandoned_lease_ends_soon_unless_a_reader_attaches(table: LeaseTable, clock: VirtualClock) -> None:
    left, rescued = table.open(16, hold=False), table.open(16, hold=False)
    table.abandon(left)
    table.abandon(rescued)
    clock.now += ABANDON_GRACE_S / 2
    table.renew(rescued)
    clock.now += ABANDON_GRACE_S / 2
    table.expire()
    assert table.take_ended() == [LeaseEnded(left.lease_id, LeaseEnd.EXPIRED)]


def test_strangers_get_expired_and_change_nothing(table: LeaseTable) -> None:
    ref = table.open(16, hold=False)
    other_epoch = LeaseRef(ref.engine_id, ref.epoch + 1, ref.lease_id)
    for stranger in (other_epoch, LeaseRef("P", 1, "unheard-of")):
        assert table.renew(stranger) == LeaseState(stranger, 0, 0, 0, (), ended=LeaseEnd.EXPIRED)
        table.release(stranger)
        assert not confirm(table, stranger, 16)
    assert len(table) == 1
    table.release(ref)
    for stranger in (other_epoch, LeaseRef("P", 1, "unheard-of")):  # nor are they told how that one ended
        assert table.renew(stranger) == LeaseState(stranger, 0, 0, 0, (), ended=LeaseEnd.EXPIRED)


class LeaseMachine(RuleBasedStateMachine):
    """Random lives of one lease against a model: a reader with a confirmed read must have read the right bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.table = LeaseTable("P", 1, full_layout(), TTL_S, self.clock)
        self.ref = self.table.open(80, hold=False)
        self.generation = 0
        self.readable = 0
        self.ended = False
        self.expires_at = self.clock.now + TTL_S
        self.version = 0

    @rule(num_blocks=st.integers(1, 5))
    def announce(self, num_blocks: int) -> None:
        if num_blocks * 16 >= self.readable:
            self.table.announce(
                PublishSpec(self.ref.lease_id, runs(0, tuple(range(num_blocks))), num_blocks * 16, self.generation)
            )
            self.readable = num_blocks * 16

    @rule()
    def retract(self) -> None:
        generation = self.table.retract(self.ref.lease_id)
        if generation is not None:
            assert generation == self.generation + 1
            self.generation, self.readable = generation, 0

    @rule(seconds=st.floats(0, TTL_S))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        self.table.expire()
        self.ended = self.ended or self.clock.now >= self.expires_at

    @rule()
    def renew(self) -> None:
        state = self.table.renew(self.ref)
        assert (state.ended is not None) == self.ended
        if not self.ended:
            self.expires_at = self.clock.now + TTL_S
            assert state.version >= self.version
            self.version = state.version

    @precondition(lambda self: not self.ended)
    @rule(release=st.booleans())
    def end(self, release: bool) -> None:
        if release:
            self.table.release(self.ref)
        else:
            self.table.end(self.ref.lease_id, LeaseEnd.REVOKED)
        self.ended = True

    @rule(num_tokens=st.integers(1, 80), generation=st.integers(0, 3))
    def confirm(self, num_tokens: int, generation: int) -> None:
        right = not self.ended and generation == self.generation and num_tokens <= self.readable
        assert confirm(self.table, self.ref, num_tokens, generation) == right

    @invariant()
    def at_most_one(self) -> None:
        assert len(self.table) <= 1


TestLeaseMachine = pytest.mark.long(LeaseMachine.TestCase)
TestLeaseMachine.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
