"""D's side of one load: a state machine without IO, clock or threads.

    phase       means                                          leaves it when
    ATTACHING   the lease is renewed, P has not begun          P computes in blocks that it has; the endpoint is up
    ANNOUNCED   LoadReady is out                               `reserve` names our blocks
    READING     reads are posted as chunks are announced       every block is in
    CONFIRMING  Confirm is sent and repeated                   P says ok
    CONFIRMED   the bytes are good                             the first tokens are known
    DONE        LoadDone is out, the lease released            -
    DRAINING    LoadFailed is out, the lease left              the last read is terminal
    DRAINED     LoadDrained is out                             -

Inputs may be lost, repeated or late; `now` is any monotonic clock. When P takes its blocks back, it raises the
generation, and blocks that were read before are void. If the load holds blocks of ours, it fails then, because P may
need long to compute the prompt again. A load without blocks goes on, if P computes again by the time of `reserve`.

Deadlines:

    deadline_s   for the whole load
    silence_s    from a Renew to any answer. After it P counts as frozen, or as unreachable if the connection broke
    read_s       from one ended read of this peer to the next, while reads of this load are in flight. Reads of other
                 loads of the peer count, so that time in the queue after them is not held against this load
    confirm_s    from the last read to the confirmation
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from pd_connectors.base import Event, FirstTokens, LoadDone, LoadDrained, LoadFailed, LoadReady, LoadSpec, LoadSteps
from pd_connectors.block_reads import BlockReads, PostRead
from pd_connectors.protocol.errors import LoadFailure
from pd_connectors.protocol.messages import Confirm, ConfirmReply, LeaseState, Release, Renew
from pd_connectors.pull_limits import DOUBT_S, LOST_GRACE_S, RENEWALS_PER_TTL

if TYPE_CHECKING:
    from pd_connectors.protocol.layout import BlockLayout
    from pd_connectors.protocol.ticket import Ticket
    from pd_connectors.pull_limits import PullLimits
    from pd_connectors.transport import PeerKey


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to the lease's owner."""

    message: Renew | Confirm | Release


@dataclass(frozen=True, slots=True)
class Emit:
    """Tell the engine."""

    event: Event


Action = Send | PostRead | Emit


class LoadPhase(Enum):
    """See the module's table."""

    ATTACHING = auto()
    ANNOUNCED = auto()
    READING = auto()
    CONFIRMING = auto()
    CONFIRMED = auto()
    DONE = auto()
    DRAINING = auto()
    DRAINED = auto()


_LIVE = frozenset(
    {LoadPhase.ATTACHING, LoadPhase.ANNOUNCED, LoadPhase.READING, LoadPhase.CONFIRMING, LoadPhase.CONFIRMED}
)


@dataclass(slots=True)
class _Marks:
    """When each of these last happened, for LoadSteps. Times are of the control thread's clock."""

    announce_s: float = 0.0
    announced_at: float | None = None  # an announcement that the whole prompt is readable arrived
    asked_at: float = 0.0  # a read was handed to the transport
    post_s: float = 0.0
    read_at: float = 0.0  # a read ended
    confirmed_at: float = 0.0

    def steps(self) -> LoadSteps:
        """The steps of the load. `wake_s` is 0: that step has not ended."""
        if self.announced_at is None or not self.read_at:
            return LoadSteps()  # nothing was read
        asked_at = max(self.asked_at, self.announced_at)
        link_s = max(0.0, self.read_at - asked_at - self.post_s)
        confirm_s = self.confirmed_at - self.read_at
        return LoadSteps(self.announce_s, asked_at - self.announced_at, self.post_s, link_s, confirm_s)


class Pull:
    """One load. Call an input, then carry out what `take_actions` returns. `layout` is ours, see BlockReads."""

    def __init__(
        self, load_id: str, ticket: Ticket, layout: BlockLayout, deadline_s: float, limits: PullLimits, now: float, *,
        is_doubted: bool = False,
    ) -> None:  # fmt: skip
        """is_doubted: P has left a question unanswered and sent nothing since, so its first answer is due soon."""
        self.load_id = load_id
        self.ticket = ticket
        self.phase = LoadPhase.ATTACHING
        self.failure: LoadFailure | None = None
        self.failed_at = 0.0
        self.is_unanswered = False  # it failed because P did not answer: its reads may never end
        self.endpoint: PeerKey | None = None  # where its reads go, once that is up
        self._limits = limits
        self._deadline = now + deadline_s
        self._spec: LoadSpec | None = None
        self._state: LeaseState | None = None  # the newest
        self.reads = BlockReads(layout, limits)
        self._read_deadline = float("inf")
        self._first_read_at: float | None = None
        self._marks = _Marks()
        self._is_accepted = False  # the owner was greeted, and its KV means the same as ours
        self._first_tokens_out = False
        self._renew_every_s = limits.renew_every_s
        self._renew_at = now
        # None: every Renew is answered
        self._answer_due: float | None = now + min(DOUBT_S, limits.silence_s) if is_doubted else None
        self._is_lost = False  # the connection broke, and nothing was received since
        self._nonce = 0
        self._confirm_at = 0.0
        self._confirm_deadline = 0.0
        self._actions: list[Action] = []
        self.tick(now)

    # what it says

    @property
    def is_live(self) -> bool:
        """True while the load is neither done nor failed."""
        return self.phase in _LIVE

    @property
    def is_attaching(self) -> bool:
        """True while nothing has been promised to the engine."""
        return self.phase is LoadPhase.ATTACHING

    @property
    def is_over(self) -> bool:
        """True in a terminal phase: no action follows any more."""
        return self.phase in (LoadPhase.DONE, LoadPhase.DRAINED)

    def take_actions(self) -> list[Action]:
        """Returns the actions to carry out now, in order."""
        actions, self._actions = self._actions, []
        return actions

    def next_timer(self) -> float:
        """When to call `tick`. inf: never."""
        if not self.is_live:
            return float("inf")
        timers = [self._deadline, self._renew_at]
        if self.reads.is_busy:
            timers.append(self._read_deadline)
        if self._answer_due is not None:
            timers.append(self._answer_due)
        if self.phase is LoadPhase.CONFIRMING:
            timers += [self._confirm_at, self._confirm_deadline]
        return min(timers)

    # inputs

    def accepted(self, now: float) -> None:
        """Note that the lease's owner answered our greeting and matches. Before that its first tokens are not used."""
        self._is_accepted = True
        self._advance(now)

    def trusted(self, now: float) -> None:
        """P has answered another load: the answer to this one may take as long as ever."""
        if self._answer_due is not None and not self._is_lost:
            self._answer_due = max(self._answer_due, now + self._limits.silence_s)

    def detached(self) -> None:
        """Take the endpoint away from a load that waits for its first announcement."""
        assert self.is_attaching, f"{self.load_id} was told to be ready"
        self.endpoint = None

    def connected(self, endpoint: PeerKey, now: float) -> None:
        """Set the endpoint of the lease's owner, which is up. A load that is ready does not outlive it."""
        self.endpoint = endpoint
        self._advance(now)

    def lease_state(self, state: LeaseState, now: float, age_s: float = 0.0) -> None:
        """Take a snapshot that arrived. age_s: seconds since the last announcement in it."""
        self._received()
        if not self.is_live:
            return
        if state.ended is not None:
            self.fail(LoadFailure.LEASE_ENDED, f"the prefill node ended the lease: {state.ended}", now)
            return
        if state.is_frozen and not self._has_all(state):
            self.fail(LoadFailure.PEER_FROZEN, "the prefill node's engine makes no progress", now)
            return
        if self._state is not None and state.version <= self._state.version:
            return
        holds_blocks = self.phase in (LoadPhase.READING, LoadPhase.CONFIRMING)
        if holds_blocks and self._state is not None and state.generation != self._state.generation:
            self.fail(LoadFailure.LEASE_ENDED, "the prefill node took its blocks back", now)
            return
        self._state = state
        if state.num_tokens_readable < self.ticket.num_tokens:
            self._marks.announced_at = None
        elif self._marks.announced_at is None:
            self._marks.announced_at, self._marks.announce_s = now, age_s
        if state.ttl_s > 0:
            self._renew_every_s = min(self._limits.renew_every_s, state.ttl_s / RENEWALS_PER_TTL)
            self._renew_at = min(self._renew_at, now + self._renew_every_s)
        self._advance(now)

    def reserve(self, spec: LoadSpec, now: float) -> None:
        """Set our blocks. Ignored when the load has failed meanwhile.

        The load fails at once if P has taken its blocks back since LoadReady: ours would wait until P has room again.
        """
        if self.phase is not LoadPhase.ANNOUNCED:
            assert not self.is_live, f"{self.load_id} was not ready, or has its blocks already"
            return
        self._spec = spec
        if spec.num_tokens != self.ticket.num_tokens:
            detail = f"the ticket promises {self.ticket.num_tokens} tokens, the prompt has {spec.num_tokens}"
            self.fail(LoadFailure.REJECTED, detail, now)
            return
        assert self._state is not None
        assert self.endpoint is not None
        self.reads.start(spec, self.endpoint.num_groups)
        if self.reads.wants_blocks and not _will_finish(self._state):
            self.fail(LoadFailure.LEASE_ENDED, "the prefill node took its blocks back before ours were there", now)
            return
        self.phase = LoadPhase.READING
        self._advance(now)

    def read_ended(self, number: int, error: str, now: float, post_s: float = 0.0) -> None:
        """Note that a read is terminal. post_s: the seconds that posting it took."""
        if not self.reads.ended(number, is_good=not error and self.is_live):
            return
        self.progress(now)
        self._marks.read_at = now
        if number == self.reads.num_posted - 1:
            self._marks.post_s = post_s
        if self.phase is LoadPhase.DRAINING and not self.reads.is_busy:
            self._drained()
        if error:
            self.fail(LoadFailure.READ_FAILED, error, now)
        self._advance(now)

    def progress(self, now: float) -> None:
        """Note that a read of this peer, of any load, has ended: the link works, so `read_s` starts again."""
        self._read_deadline = now + self._limits.read_s

    def confirm_reply(self, reply: ConfirmReply, now: float) -> None:
        """Take P's answer to a Confirm."""
        self._received()
        if self.phase is not LoadPhase.CONFIRMING or reply.nonce != self._nonce:
            return
        if reply.ok:
            self.phase = LoadPhase.CONFIRMED
            self._marks.confirmed_at = now
            self._advance(now)
        else:
            self._renew_at = now  # the lease ended or moved on; its state says which
            self._confirm_at = self._confirm_deadline

    def lost(self, now: float) -> None:
        """The connection to P broke: send a Renew at once, and wait LOST_GRACE_S for its answer."""
        if self.is_live:
            self._is_lost = True
            self._answer_due = min(self._answer_due or now + LOST_GRACE_S, now + LOST_GRACE_S)
            self._renew_at = now
            self.tick(now)

    def fail(self, reason: LoadFailure, detail: str, now: float) -> None:
        """Fail the load. LoadDrained follows as soon as nothing can land any more."""
        if not self.is_live:
            return
        self.failure = reason
        self.failed_at = now
        self._emit(LoadFailed(self.load_id, reason, detail))
        self._actions.append(Send(Release(self.ticket.lease, done=False)))
        self.phase = LoadPhase.DRAINING
        if not self.reads.is_busy:
            self._drained()

    def tick(self, now: float) -> None:
        """Do what is due at `now`: fail at a passed deadline, renew, confirm again."""
        if not self.is_live:
            return
        if now >= self._deadline:
            self.fail(LoadFailure.DEADLINE, f"the load's deadline passed while {self.phase.name.lower()}", now)
        elif self._answer_due is not None and now >= self._answer_due:
            reason = LoadFailure.UNREACHABLE if self._is_lost else LoadFailure.PEER_FROZEN
            self.is_unanswered = True
            self.fail(reason, "the prefill node does not answer", now)
        elif self.reads.is_busy and now >= self._read_deadline:
            self.fail(LoadFailure.READ_FAILED, f"no read of the prefill node ended for {self._limits.read_s:g} s", now)
        elif self.phase is LoadPhase.CONFIRMING and now >= self._confirm_deadline:
            self.fail(LoadFailure.NOT_CONFIRMED, f"not confirmed within {self._limits.confirm_s:g} s", now)
        if not self.is_live:
            return
        if now >= self._renew_at:
            self._renew_at = now + self._renew_every_s
            self._ask(Renew(self.ticket.lease), now)
        if self.phase is LoadPhase.CONFIRMING and now >= self._confirm_at:
            self._send_confirm(now)

    # steps

    def _received(self) -> None:
        """Note that P has answered."""
        self._answer_due = None
        self._is_lost = False

    def _has_all(self, state: LeaseState) -> bool:
        """True if the load needs no further step of P: the prompt is readable and the first tokens are known."""
        return state.num_tokens_readable >= self.ticket.num_tokens and bool(state.first_tokens)

    def _advance(self, now: float) -> None:
        """Take every step of the phase table that the known state allows."""
        state, spec = self._state, self._spec
        if not self.is_live or state is None:
            return
        if self._is_accepted and state.first_tokens and not self._first_tokens_out:
            self._first_tokens_out = True
            self._emit(FirstTokens(self.load_id, state.first_tokens, state.prefill))
        if self.phase is LoadPhase.ATTACHING and self.endpoint is not None and _will_finish(state):
            self.phase = LoadPhase.ANNOUNCED
            self._emit(LoadReady(self.load_id, self.ticket.num_tokens))
        if self.phase is LoadPhase.READING and spec is not None:
            self._read_on(state, now)
        if self.phase is LoadPhase.CONFIRMED and self._first_tokens_out:
            self._finish(now)

    def _read_on(self, state: LeaseState, now: float) -> None:
        if not self.reads.wants_blocks:
            self.phase = LoadPhase.CONFIRMED  # no bytes are read, so there is nothing to confirm
            return
        self._post_reads(state, now)
        if self.phase is LoadPhase.READING and self.reads.is_done:
            self.phase = LoadPhase.CONFIRMING
            self._nonce = secrets.randbits(63)  # drawn after the last read, so an answer to it confirms every read
            self._confirm_deadline = now + self._limits.confirm_s
            self._send_confirm(now)

    def _post_reads(self, state: LeaseState, now: float) -> None:
        was_busy = self.reads.is_busy
        try:
            posts = self.reads.post(state)
        except ValueError as error:
            self.fail(LoadFailure.REJECTED, str(error), now)
            return
        if posts:
            if not was_busy:
                self.progress(now)  # the clock starts
            self._actions += posts
            self._marks.asked_at = now
            if self._first_read_at is None:
                self._first_read_at = now

    def _finish(self, now: float) -> None:
        started = self._first_read_at
        self.phase = LoadPhase.DONE
        transfer_s = now - started if started is not None else 0.0
        self._emit(LoadDone(self.load_id, self.reads.group_bytes, transfer_s, self._marks.steps(), now))
        self._actions.append(Send(Release(self.ticket.lease, done=True)))

    def _send_confirm(self, now: float) -> None:
        assert self._spec is not None
        assert self._state is not None
        self._confirm_at = now + self._limits.confirm_every_s
        generation, num_tokens = self._state.generation, self._spec.num_tokens
        self._ask(Confirm(self.ticket.lease, generation, num_tokens, self._nonce), now)

    def _ask(self, message: Renew | Confirm, now: float) -> None:
        if self._answer_due is None:
            self._answer_due = now + self._limits.silence_s
        self._actions.append(Send(message))

    def _drained(self) -> None:
        self.phase = LoadPhase.DRAINED
        self._emit(LoadDrained(self.load_id))

    def _emit(self, event: Event) -> None:
        self._actions.append(Emit(event))


def _will_finish(state: LeaseState) -> bool:
    """True if P has all blocks that the prompt needs. So P waits for no request that may wait for our blocks."""
    return state.is_begun or state.num_tokens_readable > 0
