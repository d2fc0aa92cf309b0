"""Requests with KV from or for another node: connector events on one side, the scheduler on the other.

A TAKE_OVER request, as a table:

    state      means                                        event            becomes
    searching  its prefix comes from the pool (PoolSearch)  PrefixLoaded     asking, or (an ordinary request)
    asking     NeedsPrefill is sent, nothing is loading     UseTicket        loading
                                                            PrefillLocally   (an ordinary request)
    loading    a load is under way                          LoadReady        loading, wants blocks (`reserve`)
                                                            FirstTokens      loading; sent to the client, or redrawn
                                                            LoadDone         (an ordinary request)
                                                            LoadFailed       asking, its blocks quarantined
    any                                                     abort            gone, its load cancelled

A load outlives its request: after a cancel or a failure it is an *orphan*, which holds quarantined blocks until
LoadDrained. A load that was already done when it was cancelled reports LoadDone instead, which means the same.

A node that computes a prompt looks into its own cache, then into the pool: P before it prefills, D before it asks a P,
and D before it prefills because no P could. A ticket is followed without that: its P has looked.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from pd_cluster.engine.intake import Intake
from pd_cluster.engine.pool_search import PoolSearches
from pd_cluster.engine.redraw import Redraw, sampling_digest
from pd_cluster.errors import PrefillUnavailable
from pd_cluster.protocol.messages import FromEngine, NeedsPrefill, TicketOpened, Work
from pd_cluster.scheduling.lent_memory import patience_s
from pd_connectors.base import (
    Event,
    FirstTokens,
    LeaseEnded,
    LoadDone,
    LoadDrained,
    LoadFailed,
    LoadReady,
    Pool,
    PrefixFound,
    PrefixLoaded,
    SchedulerHalf,
)
from pd_connectors.protocol.errors import HandoffError, LeaseEnd, LoadFailure
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pd_cluster.engine.disk_tier import DiskTier
    from pd_cluster.scheduling.scheduler import Scheduler, Update
    from pd_cluster.scheduling.sequence import Request
    from pd_connectors.base import PublishSpec
    from pd_connectors.protocol.messages import SampledToken
    from pd_connectors.protocol.ticket import Ticket

logger = logging.getLogger("pd_cluster.engine")


class KvTransfers:
    """Ties every lease and every load to its request. Runs on the step loop's thread.

    reply: sends to the API process.  report: takes an Update that did not come out of a step.
    """

    def __init__(
        self,
        connector: SchedulerHalf,
        scheduler: Scheduler,
        reply: Callable[[FromEngine], None],
        report: Callable[[Update], None],
        pool: Pool | None = None,
        logits_stages: Sequence[str] = (),
        disk: DiskTier | None = None,
        *,
        may_give_up: bool = True,
        keeps_states: bool = False,
    ) -> None:
        """`may_give_up`: whether a load may end for want of blocks before its deadline. No request may fail by that.
        `keeps_states`: the model has a STATE group. A state cannot give a token back, so a prompt of which the first
        tokens are redrawn is computed here as a whole.
        """
        self._keeps_states, self._has_told = keeps_states, False
        self._connector = connector
        self._scheduler = scheduler
        self._logits_stages = logits_stages
        self._searches = PoolSearches(pool, scheduler, disk)
        self._reply = reply
        self._report = report
        self._may_give_up = may_give_up
        self._own_id = ""  # of this node's leases
        self._intakes: dict[str, Intake] = {}  # by request id
        self._loads: dict[str, Intake | None] = {}  # by load id; None: an orphan
        self.counters: dict[str, float] = {"prefills_local_total": 0.0, "prefills_remote_total": 0.0}
        self.counters |= {reason.counter: 0.0 for reason in Redraw}

    @property
    def num_orphans(self) -> int:
        """The number of loads without a request, which may still write into their blocks."""
        return sum(intake is None for intake in self._loads.values()) + self._searches.num_orphans

    def admit(self, request: Request) -> None:
        """Queue a valid request, or park it until its KV is here.

        Raises Overloaded, or PrefillUnavailable for a PREFILL that gets no lease; nothing is left of it then.
        """
        match request.work:
            case Work.GENERATE | Work.READ:
                self._searches.admit(request)
            case Work.PREFILL:
                self._open_lease(request)
            case Work.TAKE_OVER:
                self._take_over(request)

    # P

    def _open_lease(self, request: Request) -> None:
        """Queue a PREFILL and reply with its ticket."""
        message, sampling = request.message, request.sampling
        try:
            ticket = self._connector.open_lease(
                request.request_id,
                request.prompt_token_ids,
                request.salt,
                sampling.num_first_tokens,
                hold=message.hold_lease,
                sampling_digest=sampling_digest(sampling, self._logits_stages),
            )
        except HandoffError as error:
            raise PrefillUnavailable(str(error)) from error
        request.lease_id, self._own_id = ticket.lease.lease_id, ticket.lease.engine_id
        try:
            self._searches.admit(request)
        except BaseException:
            self._connector.end_lease(ticket.lease.lease_id, LeaseEnd.REVOKED)
            raise
        self._reply(TicketOpened(request.request_id, ticket))

    def announce(self, publishes: Iterable[PublishSpec], prefilled: Iterable[Update]) -> list[PublishSpec]:
        """Returns what a retired step announces: its publishes, with the first tokens of the PREFILLs that it sampled.

        A lease's first tokens go into its publish, so that one message announces them with the last KV.
        """
        sampled: dict[str, tuple[tuple[SampledToken, ...], PrefillFacts]] = {}
        for update in prefilled:
            request = update.request
            assert request.lease_id is not None
            first_tokens = tuple(token for report in update.sequences for token in report.tokens)
            if len(first_tokens) == request.sampling.num_first_tokens:
                sampled[request.lease_id] = first_tokens, request.marks.prefill_facts(request.num_cached_tokens)
            else:  # a sequence was aborted: no D can take over all of them
                self._connector.end_lease(request.lease_id, LeaseEnd.REVOKED)
                self._end_lease(request.lease_id)
        specs = []
        for publish in publishes:
            if publish.lease_id in sampled:
                first_tokens, facts = sampled.pop(publish.lease_id)
                publish = replace(publish, first_tokens=first_tokens, prefill=facts)
            specs.append(publish)
        for lease_id, (first_tokens, facts) in sampled.items():
            self._connector.finish_lease(lease_id, first_tokens, facts)
        return specs

    def revoke(self, request: Request) -> None:
        """Call before a PREFILL is aborted, which frees its blocks. Idempotent."""
        if request.lease_id is not None:
            self._connector.end_lease(request.lease_id, LeaseEnd.REVOKED)

    def release(self, lease_id: str) -> None:
        """End a lease: the router has said that no D will read it."""
        self._connector.end_lease(lease_id, LeaseEnd.RELEASED)
        self._end_lease(lease_id)

    def _end_lease(self, lease_id: str) -> None:
        self._report_some(self._scheduler.end_lease(lease_id))

    # D

    def _take_over(self, request: Request) -> None:
        """Load what the ticket promises; without a ticket search the pool, then choose where to prefill."""
        self._scheduler.park(request)
        intake = Intake(request)
        self._intakes[request.request_id] = intake
        message = request.message
        if message.ticket is not None:
            self._load(intake, message.ticket, message.load_deadline_s)
            return
        intake.has_searched = True
        if not self._searches.start(request, lambda _: self._choose(intake)):
            self._choose(intake)

    def _choose(self, intake: Intake) -> None:
        """Ask the API process for a P if much of the prompt lacks KV; else compute the prompt here."""
        request = intake.request
        num_cached = self._scheduler.pin(request)
        if request.num_loaded_tokens - num_cached < max(1, request.message.min_remote_tokens):
            self.prefill_locally(request.request_id)
        else:
            self._reply(NeedsPrefill(request.request_id, num_cached))

    def use_ticket(self, request_id: str, ticket: Ticket, deadline_s: float) -> None:
        """Load what this ticket promises, which the API process has got from a P. Ignored for an ended request."""
        intake = self._intakes.get(request_id)
        if intake is not None and intake.load_id is None:
            self._load(intake, ticket, deadline_s)

    def prefill_locally(self, request_id: str) -> None:
        """Compute the prompt here. Ignored for an ended request, and while a load is under way."""
        intake = self._intakes.get(request_id)
        if intake is not None and intake.load_id is None:
            del self._intakes[request_id]
            self.counters["prefills_local_total"] += 1
            go_on = self._scheduler.fall_back_to_local
            if intake.has_searched or not self._searches.start(intake.request, go_on):
                go_on(intake.request)

    def _load(self, intake: Intake, ticket: Ticket, deadline_s: float) -> None:
        request = intake.request
        if ticket.num_tokens != request.num_loaded_tokens:
            wrong = f"the ticket is for {ticket.num_tokens} tokens, not for {request.num_loaded_tokens}"
            self._ask_again(intake, LoadFailure.REJECTED, wrong)
            return
        own_digest = sampling_digest(request.sampling, self._logits_stages)
        intake.redraw = None if request.is_parted else Redraw.due(ticket, own_digest)
        request.redraws = intake.redraw is not None
        if self._keeps_states and request.redraws:
            intake.redraw, request.redraws = None, False
            self._decline(intake, ticket, deadline_s)
            self.prefill_locally(request.request_id)
            return
        intake.load_id = request.load_id = self._new_load_id(intake)
        intake.lender, intake.is_ready = ticket.lease.engine_id, False
        self._loads[intake.load_id] = intake
        self._connector.begin_load(intake.load_id, ticket, deadline_s)

    def _new_load_id(self, intake: Intake) -> str:
        intake.num_attempts += 1
        return f"{intake.request.request_id}#{intake.num_attempts}"

    def _decline(self, intake: Intake, ticket: Ticket, deadline_s: float) -> None:
        """Release a ticket's lease, which would hold P's memory until it expires: a cancelled load does."""
        self._tell_once()
        load_id = self._new_load_id(intake)
        self._loads[load_id] = None
        self._connector.begin_load(load_id, ticket, deadline_s)
        self._connector.cancel_load(load_id, LoadFailure.REJECTED)

    def _tell_once(self) -> None:
        if not self._has_told:
            self._has_told = True
            logger.info("prompts are computed again where first tokens are redrawn: their states are too late")

    def _ask_again(self, intake: Intake, reason: LoadFailure, detail: str) -> None:
        text = f"{reason}: {detail}" if detail else str(reason)
        request = intake.request
        self._reply(NeedsPrefill(request.request_id, request.num_cached_tokens, text))

    def reserve(self) -> None:
        """Reserve blocks for the loads that wait for them, best claim first. Called before each step."""
        wanting = [intake for intake in self._intakes.values() if intake.is_ready]
        for intake in sorted(wanting, key=lambda intake: intake.request.claim):
            if self._scheduler.reserve(intake.request) is not None:
                intake.is_ready = False
        if self._searches.wants_blocks:
            self._searches.reserve()
        if self._may_give_up:
            self._give_up_one([intake for intake in wanting if intake.is_ready])

    def _give_up_one(self, ready: list[Intake]) -> None:
        """Give up one of the loads that have waited too long for what leases hold, as its lender may do."""
        lent = self._scheduler.lent
        if not ready:
            lent.begin_anew()
            return
        waited_s = lent.waited_s()
        due = [intake for intake in ready if waited_s >= patience_s(self._own_id, intake.lender)]
        if not due:
            return
        if not lent.is_lacking:
            lent.begin_anew()
            return
        chosen = max(due, key=lambda intake: (intake.lender not in lent.tried, intake.request.claim))
        lent.pause(chosen.lender)
        self._give_up(chosen, LoadFailure.NO_ROOM, "leases of this node hold the blocks that it needs")

    def _give_up(self, intake: Intake, reason: LoadFailure, detail: str) -> None:
        load_id = intake.load_id
        assert load_id is not None
        self._connector.cancel_load(load_id, reason)
        self._handle(LoadFailed(load_id, reason, detail))

    def forget(self, request: Request) -> None:
        """Forget an ended request. Its load, if there is one, is cancelled and becomes an orphan. Idempotent."""
        self._searches.forget(request)
        intake = self._intakes.pop(request.request_id, None)
        if intake is not None and intake.load_id is not None:
            self._loads[intake.load_id] = None
            self._connector.cancel_load(intake.load_id)

    # events

    def take_events(self) -> None:
        """Handle the connector's events."""
        for event in self._connector.poll():
            self._handle(event)

    def _handle(self, event: Event) -> None:
        if isinstance(event, LeaseEnded):
            self._end_lease(event.lease_id)
            return
        if isinstance(event, PrefixFound | PrefixLoaded):
            self._searches.take(event)
            return
        intake = self._loads.get(event.load_id)
        match event:
            case LoadDrained():
                self._loads.pop(event.load_id, None)
                self._scheduler.drain(event.load_id)
            case LoadDone():
                self._loads.pop(event.load_id, None)
                if intake is None:
                    self._scheduler.drain(event.load_id)  # the load was done before it could be cancelled
                else:
                    del self._intakes[intake.request.request_id]
                    intake.request.marks.load_steps = event.steps
                    self.counters["prefills_remote_total"] += 1
                    if intake.redraw is not None:
                        self.counters[intake.redraw.counter] += 1
                    self._scheduler.admit_loaded(intake.request)
            case LoadReady() if intake is not None:
                intake.is_ready = True
            case FirstTokens() if intake is not None:
                intake.request.marks.peer = event.prefill
                self._take_first_tokens(intake, event)
            case LoadFailed() if intake is not None:
                self._loads[event.load_id] = None
                intake.load_id, intake.is_ready = None, False
                intake.request.marks.peer = NO_PREFILL
                self._scheduler.drop_load(intake.request)
                self._ask_again(intake, event.reason, event.detail)

    def _take_first_tokens(self, intake: Intake, event: FirstTokens) -> None:
        if intake.redraw is not None or intake.request.is_parted:
            return  # drawn under other parameters, or sent by a second P
        sampling = intake.request.sampling
        # as many candidates as `scheduling.beam` needs: with fewer some beams would have no token
        num_top = 0 if sampling.beams is None else sampling.beams.width + len(intake.request.sequences[0].stop_ids)
        has_beams = all(len(token.top) >= num_top for token in event.tokens)
        if len(event.tokens) != sampling.num_first_tokens or not has_beams:  # a P that breaks its ticket's promise
            self._give_up(intake, LoadFailure.REJECTED, "wrong number of first tokens")
            return
        self._report_some(self._scheduler.set_first_tokens(intake.request, event.tokens))

    def _report_some(self, update: Update | None) -> None:
        if update is not None:
            self._report(update)
