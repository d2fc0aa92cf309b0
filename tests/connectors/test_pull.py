"""D's state machine of one load, input by input."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from msgspec.structs import replace

from pd_connectors.base import FirstTokens, LoadDone, LoadDrained, LoadFailed, LoadReady, LoadSpec, LoadSteps
from pd_connectors.block_reads import PostRead
from pd_connectors.protocol.errors import LeaseEnd, LoadFailure
from pd_connectors.protocol.layout import BlockLayout, BlockRun
from pd_connectors.protocol.messages import Confirm, ConfirmReply, LeaseRef, LeaseState, Release, Renew, SampledToken
from pd_connectors.protocol.ticket import Ticket
from pd_connectors.pull import Action, Emit, Pull, Send
from pd_connectors.pull_limits import LOST_GRACE_S, PullLimits
from pd_connectors.transport import PeerKey
from tests.connectors.layouts import full_layout, runs

LAYOUT = full_layout(block_size=16, num_kv_heads=1, num_layers=1, head_dim=1, dtype="float32")
LEASE = LeaseRef("P", 1, "lease")
PEER = PeerKey(("h", 1), "P", 1, 1)
TICKET = Ticket("r", LEASE, 0, 1e12, "f", LAYOUT, b"d", 40, 1, "h", 1)
SPEC = LoadSpec("load", runs(0, (10, 11, 12)), 40)
LIMITS = PullLimits(renew_every_s=1.0, silence_s=3.0, read_s=4.0, confirm_s=2.0, confirm_every_s=0.5)
TOKEN = SampledToken(9)


def new_pull(deadline_s: float = 30.0) -> Pull:
    return Pull("load", TICKET, TICKET.layout, deadline_s, LIMITS, now=0.0)


def state(version: int, num_tokens: int = 0, *, generation: int = 0, tokens: bool = False) -> LeaseState:
    blocks = tuple(range(-(-num_tokens // 16)))
    return LeaseState(LEASE, generation, version, num_tokens, runs(0, blocks), (TOKEN,) if tokens else (), ttl_s=10.0)


def reading(num_tokens: int = 40, *, tokens: bool = False) -> Pull:
    """A pull with reads posted for what is announced."""
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(1, num_tokens, tokens=tokens), 0.0)
    pull.reserve(SPEC, 0.0)
    return pull


def confirming(*, tokens: bool = True) -> tuple[Pull, Confirm]:
    pull = reading(tokens=tokens)
    pull.read_ended(0, "", 1.0)
    question = sent(pull.take_actions())[-1]
    assert isinstance(question, Confirm)
    return pull, question


def sent(actions: list[Action]) -> list[Renew | Confirm | Release]:
    return [action.message for action in actions if isinstance(action, Send)]


def events(actions: list[Action]) -> list[object]:
    return [action.event for action in actions if isinstance(action, Emit)]


def reads(actions: list[Action]) -> list[PostRead]:
    return [action for action in actions if isinstance(action, PostRead)]


def test_happy_path_in_order() -> None:
    pull = new_pull()
    assert sent(pull.take_actions()) == [Renew(LEASE)]
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(2, 16), 0.1)
    assert events(pull.take_actions()) == [LoadReady("load", 40)]
    pull.reserve(SPEC, 0.2)
    assert reads(pull.take_actions()) == [PostRead(0, ((0,),), ((10,),))]
    pull.lease_state(state(3, 40), 0.3)
    assert reads(pull.take_actions()) == [PostRead(1, ((1, 2),), ((11, 12),))]
    pull.read_ended(1, "", 0.4)
    pull.read_ended(0, "", 0.5)
    question = sent(pull.take_actions())[0]
    assert isinstance(question, Confirm)
    assert (question.generation, question.num_tokens) == (0, 40)
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, True), 0.6)
    assert not pull.is_over, "the first token is not here"
    pull.lease_state(state(4, 40, tokens=True), 0.7)
    actions = pull.take_actions()
    token, done = events(actions)
    assert token == FirstTokens("load", (TOKEN,))
    assert isinstance(done, LoadDone)
    assert done.group_bytes == (3 * LAYOUT.block_bytes,)
    assert done.transfer_s == pytest.approx(0.5)
    assert sent(actions) == [Release(LEASE, done=True)]
    assert pull.is_over


def test_nothing_of_an_unknown_peer_is_believed() -> None:
    pull = new_pull()
    pull.lease_state(state(1, 40, tokens=True), 0.0)
    assert events(pull.take_actions()) == []
    pull.accepted(0.1)
    assert events(pull.take_actions()) == [FirstTokens("load", (TOKEN,))]
    pull.connected(PEER, 0.2)
    assert events(pull.take_actions()) == [LoadReady("load", 40)]


def test_old_and_repeated_snapshots_change_nothing() -> None:
    pull = reading(16)
    pull.take_actions()
    pull.lease_state(state(1, 40), 0.1)
    pull.lease_state(state(0, 40), 0.1)
    assert pull.take_actions() == []


def test_only_the_answer_to_this_question_confirms() -> None:
    pull, question = confirming()
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce ^ 1, True), 1.1)
    assert not pull.is_over
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, True), 1.2)
    assert events(pull.take_actions())[-1] == LoadDone("load", (3 * LAYOUT.block_bytes,), 1.2)


def test_a_refused_confirmation_asks_for_the_state_and_fails() -> None:
    pull, question = confirming()
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, False), 1.1)
    pull.tick(pull.next_timer())
    assert Renew(LEASE) in sent(pull.take_actions())
    pull.lease_state(LeaseState(LEASE, 0, 0, 0, (), ended=LeaseEnd.EXPIRED), 1.2)
    assert events(pull.take_actions())[:1] == [
        LoadFailed("load", LoadFailure.LEASE_ENDED, "the prefill node ended the lease: expired")
    ]
    assert pull.is_over


def test_confirmation_is_repeated_until_its_deadline() -> None:
    pull, question = confirming()
    repeats = 0
    while pull.is_live:
        now = pull.next_timer()
        pull.tick(now)
        repeats += sent(pull.take_actions()).count(question)
        pull.lease_state(state(1, 40), now)  # P answers renewals, so it is not silent
    assert repeats == 3
    assert pull.failure is LoadFailure.NOT_CONFIRMED


def test_failure_drains_only_when_no_read_can_land() -> None:
    pull = reading()
    pull.take_actions()
    pull.fail(LoadFailure.CANCELLED, "cancelled", 1.0)
    actions = pull.take_actions()
    assert events(actions) == [LoadFailed("load", LoadFailure.CANCELLED, "cancelled")]
    assert sent(actions) == [Release(LEASE, done=False)]
    assert pull.reads.num_blocks_in_flight == 3
    pull.lease_state(state(5, 40, tokens=True), 1.1)
    pull.fail(LoadFailure.CANCELLED, "again", 1.1)
    assert pull.take_actions() == []
    pull.read_ended(0, "error", 1.2)
    assert events(pull.take_actions()) == [LoadDrained("load")]
    assert pull.is_over


def test_blocks_taken_back_fail_a_load_that_holds_blocks() -> None:
    pull = reading(16)
    pull.lease_state(state(2, 0, generation=1), 1.0)
    assert pull.failure is LoadFailure.LEASE_ENDED
    assert not pull.is_over, "a read is in flight"


def announced_then_taken_back() -> Pull:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(1, 16), 0.0)
    pull.lease_state(state(2, 0, generation=1), 0.1)
    pull.take_actions()
    return pull


def test_blocks_taken_back_before_ours_were_reserved_fail_the_load_at_once() -> None:
    """LoadReady promised that P will finish; it does not hold any more, so ours must not wait for it."""
    pull = announced_then_taken_back()
    pull.reserve(SPEC, 0.2)
    failed, drained = events(pull.take_actions())
    assert isinstance(failed, LoadFailed)
    assert failed.reason is LoadFailure.LEASE_ENDED
    assert drained == LoadDrained("load")
    assert pull.is_over


def test_blocks_taken_back_and_announced_anew_before_ours_were_reserved_are_read() -> None:
    pull = announced_then_taken_back()
    pull.lease_state(state(3, 32, generation=1), 0.15)
    pull.reserve(SPEC, 0.2)
    assert reads(pull.take_actions()) == [PostRead(0, ((0, 1),), ((10, 11),))]
    pull.lease_state(state(4, 40, generation=1), 0.3)
    assert reads(pull.take_actions()) == [PostRead(1, ((2,),), ((12,),))]


def test_blocks_are_reserved_while_the_prompt_is_computed() -> None:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(2), 0.1)
    assert events(pull.take_actions()) == []
    begun = LeaseState(LEASE, 0, 3, 0, (), is_begun=True)
    pull.lease_state(begun, 0.2)
    assert events(pull.take_actions()) == [LoadReady("load", 40)]
    pull.reserve(SPEC, 0.3)
    assert pull.take_actions() == []
    pull.lease_state(state(4, 40), 5.0)
    assert reads(pull.take_actions()) == [PostRead(0, ((0, 1, 2),), ((10, 11, 12),))]
    assert pull.is_live, "no read was in flight while P computed"


def test_a_prompt_that_stopped_before_ours_were_reserved_fails_the_load() -> None:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(LeaseState(LEASE, 0, 3, 0, (), is_begun=True), 0.2)
    pull.lease_state(LeaseState(LEASE, 1, 4, 0, ()), 0.3)
    pull.reserve(SPEC, 0.4)
    assert pull.failure is LoadFailure.LEASE_ENDED


def test_the_steps_of_a_load_follow_each_other() -> None:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(2, 16), 0.1, 9.0)
    pull.reserve(SPEC, 0.2)
    pull.lease_state(state(3, 40, tokens=True), 1.0, 0.25)
    pull.lease_state(state(4, 40, tokens=True), 1.1, 0.5)  # a renewal's answer: the same announcement, older by now
    pull.read_ended(0, "", 1.5, 0.125)
    pull.read_ended(1, "", 2.0, 0.5)
    question = sent(pull.take_actions())[-1]
    assert isinstance(question, Confirm)
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, True), 2.25)
    done = events(pull.take_actions())[-1]
    assert isinstance(done, LoadDone)
    assert done.steps == LoadSteps(announce_s=0.25, reserve_s=0.0, post_s=0.5, link_s=0.5, confirm_s=0.25)
    assert done.done_at == 2.25


def test_waiting_for_blocks_is_a_step_of_its_own() -> None:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(2, 40, tokens=True), 1.0, 0.0)
    pull.reserve(SPEC, 1.75)
    pull.read_ended(0, "", 2.0)
    question = sent(pull.take_actions())[-1]
    assert isinstance(question, Confirm)
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, True), 2.0)
    done = events(pull.take_actions())[-1]
    assert isinstance(done, LoadDone)
    assert (done.steps.reserve_s, done.steps.link_s) == (0.75, 0.25)


def test_a_load_that_needs_no_blocks_waits_for_its_token_only() -> None:
    pull = announced_then_taken_back()
    pull.reserve(LoadSpec("load", runs(3, ()), 40), 0.2)
    pull.lease_state(state(3, 40, generation=1, tokens=True), 0.3)
    assert [type(event) for event in events(pull.take_actions())] == [FirstTokens, LoadDone]


@pytest.mark.parametrize(("ttl_s", "every_s"), [(10.0, 1.0), (2.0, 0.5), (0.8, 0.2), (0.0, 1.0)])
def test_renewals_follow_the_leases_life(ttl_s: float, every_s: float) -> None:
    """Three in a row may be lost; the limit counts where the lease lives long, and where it needs none yet."""
    pull = new_pull()
    pull.lease_state(msgspec.structs.replace(state(1), ttl_s=ttl_s), 0.1)
    first = 0.1 + every_s if ttl_s == 2.0 or ttl_s == 0.8 else 1.0
    assert pull.next_timer() == pytest.approx(first), "a shorter life is renewed sooner, not from the next time on"
    pull.take_actions()
    pull.tick(first)
    assert sent(pull.take_actions()) == [Renew(LEASE)]
    pull.lease_state(state(1), first)  # an answer
    assert pull.next_timer() == pytest.approx(first + every_s)


def test_a_renewal_that_is_due_is_not_put_off_by_a_snapshot() -> None:
    pull = new_pull()
    pull.lease_state(state(1), 0.0)
    for version in range(2, 8):
        pull.lease_state(state(version), 0.1 * version)
    assert pull.next_timer() == 1.0


def test_what_p_announces_after_it_confirmed_is_no_matter_of_blocks() -> None:
    pull, question = confirming(tokens=False)
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, True), 1.5)
    pull.take_actions()
    pull.lease_state(LeaseState(LEASE, 0, 9, 40, (), (TOKEN,)), 1.6)
    assert [type(event) for event in events(pull.take_actions())] == [FirstTokens, LoadDone]


def test_silence_is_measured_from_an_unanswered_question() -> None:
    pull = reading()
    pull.take_actions()
    pull.tick(29.0)  # this process was away: no peer was asked meanwhile
    assert pull.failure is not LoadFailure.PEER_FROZEN  # (its read has a deadline of its own)
    quiet = new_pull()
    quiet.tick(LIMITS.silence_s)
    assert quiet.failure is LoadFailure.PEER_FROZEN
    cut_off = new_pull()
    cut_off.lost(0.5)
    cut_off.tick(0.5 + LOST_GRACE_S)
    assert cut_off.failure is LoadFailure.UNREACHABLE


def test_a_prefill_node_with_frozen_steps_is_left() -> None:
    """Its control thread answers on. What has been computed can still be read; what has not is awaited no longer."""
    waiting, complete = reading(16), reading(40, tokens=True)
    for pull, version, num_tokens in ((waiting, 1, 16), (complete, 1, 40)):
        stuck = replace(state(version, num_tokens, tokens=num_tokens == 40), is_frozen=True)
        pull.lease_state(stuck, 5.0)
    assert waiting.failure is LoadFailure.PEER_FROZEN
    assert not waiting.is_unanswered
    assert complete.is_live


def test_every_wait_has_a_deadline() -> None:
    slow = reading()
    slow.lease_state(state(2, 40), 3.9)
    slow.tick(4.0)
    assert slow.failure is LoadFailure.READ_FAILED
    late = new_pull(deadline_s=2.0)
    late.tick(2.0)
    assert late.failure is LoadFailure.DEADLINE


@pytest.mark.parametrize(
    "nonsense",
    [
        LeaseState(LEASE, 0, 9, 40, runs(0, (1,))),
        LeaseState(LEASE, 0, 9, 1 << 40, ()),
    ],
)
def test_a_peer_that_announces_nonsense_is_refused(nonsense: LeaseState) -> None:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(1, 16), 0.0)
    pull.reserve(LoadSpec("load", runs(1, (11, 12)), 40), 0.0)
    pull.lease_state(nonsense, 0.1)
    assert pull.failure is LoadFailure.REJECTED


def test_a_ticket_for_another_prompt_length_is_refused() -> None:
    pull = new_pull()
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(1, 16), 0.0)
    pull.reserve(LoadSpec("load", runs(0, (11,)), 10), 0.0)
    assert pull.failure is LoadFailure.REJECTED
    assert reads(pull.take_actions()) == []


def long_pull(limits: PullLimits) -> Pull:
    """A prompt of 12 blocks, all announced; the reads of one block each."""
    ticket = Ticket("r", LEASE, 0, 1e12, "f", LAYOUT, b"d", 192, 1, "h", 1)
    pull = Pull("load", ticket, ticket.layout, 1e6, limits, now=0.0)
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(LeaseState(LEASE, 0, 1, 192, runs(0, tuple(range(12))), (), ttl_s=1e6), 0.0)
    pull.reserve(LoadSpec("load", runs(0, tuple(range(20, 32))), 192), 0.0)
    return pull


def test_reads_of_one_load_are_posted_a_few_at_a_time() -> None:
    pull = long_pull(PullLimits(max_blocks_per_read=1, max_reads=4))
    assert [read.number for read in reads(pull.take_actions())] == [0, 1, 2, 3]
    assert pull.reads.num_blocks_in_flight == 4
    pull.read_ended(2, "", 0.1)
    pull.read_ended(0, "", 0.2)
    assert [read.local for read in reads(pull.take_actions())] == [((24,),), ((25,),)]
    assert pull.reads.num_blocks_in_flight == 4


@pytest.mark.parametrize("max_reads", [1, 4, 100])
def test_a_slow_link_costs_only_time(max_reads: int) -> None:
    """Each read takes nine tenths of `read_s`, all of them much longer: there is progress, so nothing fails."""
    pull = long_pull(
        PullLimits(renew_every_s=1e6, read_s=4.0, silence_s=1e6, max_blocks_per_read=1, max_reads=max_reads)
    )
    now = 0.0
    for number in range(12):
        now += 3.6
        pull.tick(now)
        pull.read_ended(number, "", now)
    assert isinstance(sent(pull.take_actions())[-1], Confirm)
    assert pull.failure is None


def test_a_link_on_which_nothing_moves_fails_its_load() -> None:
    pull = long_pull(PullLimits(renew_every_s=1e6, read_s=4.0, silence_s=1e6, max_blocks_per_read=1))
    pull.read_ended(0, "", 3.0)
    pull.tick(6.9)
    assert pull.is_live
    assert pull.next_timer() == 7.0
    pull.tick(7.0)
    assert pull.failure is LoadFailure.READ_FAILED


def test_long_reads_are_cut() -> None:
    limits = PullLimits(max_blocks_per_read=2)
    pull = Pull("load", TICKET, TICKET.layout, 30.0, limits, now=0.0)
    pull.accepted(0.0)
    pull.connected(PEER, 0.0)
    pull.lease_state(state(1, 40), 0.0)
    pull.reserve(SPEC, 0.0)
    assert [read.local for read in reads(pull.take_actions())] == [((10, 11),), ((12,),)]


DRAFTS = replace(LAYOUT.groups[0], layers=(1,), optional=True)
WITH_DRAFTS = BlockLayout((*LAYOUT.groups, DRAFTS))
BOTH = (*runs(0, (1, 2, 3)), BlockRun(0, (7, 8, 9)))


def pull_with_drafts(peer: PeerKey, spec: LoadSpec) -> Pull:
    """Of a ticket that names drafts, with all blocks of both groups announced."""
    pull = Pull("load", replace(TICKET, layout=WITH_DRAFTS), WITH_DRAFTS, 30.0, LIMITS, now=0.0)
    pull.accepted(0.0)
    pull.connected(peer, 0.0)
    pull.lease_state(LeaseState(LEASE, 0, 1, 40, BOTH, (TOKEN,)), 0.0)
    pull.reserve(spec, 0.0)
    return pull


def test_a_group_that_the_ticket_names_and_the_endpoint_lacks_is_not_read() -> None:
    """The transport would read none of its bytes, and the load would count them."""
    pull = pull_with_drafts(
        dataclasses.replace(PEER, num_groups=1), LoadSpec("load", (*SPEC.runs, BlockRun(0, (20, 21, 22))), 40)
    )
    assert reads(pull.take_actions()) == [PostRead(0, ((1, 2, 3), ()), ((10, 11, 12), ()))]
    pull.read_ended(0, "", 0.1)
    (question,) = sent(pull.take_actions())
    assert isinstance(question, Confirm)
    pull.confirm_reply(ConfirmReply(LEASE, 0, 40, question.nonce, True), 0.2)
    (done,) = events(pull.take_actions())
    assert isinstance(done, LoadDone)
    assert done.group_bytes == (3 * LAYOUT.groups[0].block_bytes, 0)


def test_a_load_is_not_done_while_a_group_is_read_that_the_peer_drops() -> None:
    """Nothing else is wanted. What still lands must find the blocks in quarantine."""
    pull = pull_with_drafts(PEER, LoadSpec("load", (BlockRun(3, ()), BlockRun(0, (20, 21, 22))), 40))
    assert reads(pull.take_actions()) == [PostRead(0, ((), (7, 8, 9)), ((), (20, 21, 22)))]
    for version in (2, 3):
        pull.lease_state(LeaseState(LEASE, 0, version, 40, BOTH[:1], (TOKEN,)), 0.1)
    (failed,) = events(pull.take_actions())
    assert isinstance(failed, LoadFailed)
    assert failed.reason is LoadFailure.REJECTED
    assert pull.reads.num_blocks_in_flight == 3
    pull.read_ended(0, "", 0.2)
    assert events(pull.take_actions()) == [LoadDrained("load")]
