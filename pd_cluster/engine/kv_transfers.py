"""Requests whose KV comes from another node, or goes to one: connector events on one side, the scheduler on the other.

A TAKE_OVER request, as a table:

    state     means                                     event            becomes
    recalling its prefix comes from the pool (recall)   PrefixLoaded     asking, or (an ordinary request)
    asking    NeedsPrefill is out, nothing is loading   UseTicket        loading
                                                        PrefillLocally   (an ordinary request)
    loading   a load is under way                       LoadReady        loading, wants blocks (`reserve`)
                                                        FirstTokens      loading, the client has them, or (a redraw) not
                                                        LoadDone         (an ordinary request)
                                                        LoadFailed       asking, its blocks quarantined
    any                                                 abort            gone, its load cancelled

A load outlives its request: after a cancel or a failure it is an *orphan*, which holds quarantined blocks until
LoadDrained. A load that was already done when it was cancelled reports LoadDone instead, which means the same.

Whoever computes a prompt looks into its own cache, then into the pool: P before it prefills, D before it asks a P, and
before it prefills for want of one. A ticket is followed without that: its P has looked.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from pd_cluster.engine.pool_search import PoolSearches
from pd_cluster.errors import InvalidRequest, PdError, PrefillUnavailable
from pd_cluster.protocol.messages import FromEngine, NeedsPrefill, RequestFailed, TicketOpened, Work
from pd_cluster.scheduling.sequence import Request, Sequence
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

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.protocol.messages import AddRequest
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.scheduler import Scheduler, Update
    from pd_connectors.protocol.ticket import Ticket


REDRAWS = "first_token_redraws_total"  # by reason


class Redraw(StrEnum):
    """Why the KV of a ticket is taken and its first tokens are not: they are drawn here. Counted under this name."""

    MISMATCH = "sampling_mismatch"  # P samples under other parameters
    UNKNOWN = "no_digest"  # P does not say under which: it runs an older version

    @property
    def counter(self) -> str:
        return f"{REDRAWS}|reason={self}"

    @classmethod
    def due(cls, ticket: Ticket, sampling: SamplingParams) -> Redraw | None:
        """None: P's first tokens are what this node would sample itself."""
        if ticket.sampling_digest == sampling.first_token_digest:
            return None
        return cls.MISMATCH if ticket.sampling_digest else cls.UNKNOWN


@dataclass(slots=True, eq=False)
class Intake:
    """One TAKE_OVER request until its KV is here, or is computed here."""

    request: Request
    num_attempts: int = 0
    has_recalled: bool = False  # the pool was asked
    load_id: str | None = None  # None: asking
    is_ready: bool = False  # P has announced blocks; ours are reserved as soon as there are any
    redraw: Redraw | None = None  # None: the load's first tokens are adopted


class KvTransfers:
    """Owns every lease's and every load's tie to its request. Lives on the step loop's thread.

    reply: sends to the API process.  report: takes an Update that did not come out of a step.
    """

    def __init__(
        self,
        connector: SchedulerHalf,
        reply: Callable[[FromEngine], None],
        report: Callable[[Update], None],
        pool: Pool | None = None,
    ) -> None:
        self._connector = connector
        self._recalls = PoolSearches(pool)
        self._reply = reply
        self._report = report
        self._intakes: dict[str, Intake] = {}  # by request id
        self._loads: dict[str, Intake | None] = {}  # by load id; None: an orphan
        self.counters: dict[str, float] = {"prefills_local_total": 0.0, "prefills_remote_total": 0.0}
        self.counters |= {reason.counter: 0.0 for reason in Redraw}

    @property
    def num_orphans(self) -> int:
        """Loads whose request is gone or went another way, and whose blocks may still be written."""
        return sum(intake is None for intake in self._loads.values()) + self._recalls.num_orphans

    def generate(self, request: Request, scheduler: Scheduler) -> None:
        """Admit a GENERATE. Raises Overloaded."""
        self._recalls.admit(request, scheduler)

    # P

    def open_lease(self, request: Request, scheduler: Scheduler) -> None:
        """Admit a PREFILL: queue it and hand out its ticket. Raises what `Scheduler.add` raises, leaving no lease."""
        message, sampling = request.message, request.sampling
        try:
            ticket = self._connector.open_lease(
                request.request_id,
                request.prompt_token_ids,
                request.salt,
                sampling.n,
                hold=message.hold_lease,
                sampling_digest=sampling.first_token_digest,
            )
        except HandoffError as error:
            raise PrefillUnavailable(str(error)) from error
        request.lease_id = ticket.lease.lease_id
        try:
            self._recalls.admit(request, scheduler)
        except BaseException:
            self._connector.end_lease(ticket.lease.lease_id, LeaseEnd.REVOKED)
            raise
        self._reply(TicketOpened(request.request_id, ticket))

    def on_preempt(self, seq: Sequence) -> None:
        """A leased sequence is about to lose its blocks: what its reader has read of them is void from here on."""
        request = seq.request
        assert request.lease_id is not None
        generation = self._connector.retract(request.lease_id)
        if generation is not None:
            request.lease_generation = generation

    def finish_lease(self, update: Update) -> None:
        """A PREFILL's first tokens are sampled, and its prompt has been published."""
        request = update.request
        assert request.lease_id is not None
        if len(request.first_tokens) == request.sampling.n:
            self._connector.finish_lease(request.lease_id, request.first_tokens, request.prefill_s)
        else:  # aborted before it had any: nobody can take it over
            self._connector.end_lease(request.lease_id, LeaseEnd.REVOKED)

    def revoke(self, request: Request) -> None:
        """Before a PREFILL is aborted: its blocks are about to be freed. Idempotent."""
        if request.lease_id is not None:
            self._connector.end_lease(request.lease_id, LeaseEnd.REVOKED)

    def release(self, lease_id: str, scheduler: Scheduler) -> None:
        """The router says that nobody will come."""
        self._connector.end_lease(lease_id, LeaseEnd.RELEASED)
        self._end_lease(lease_id, scheduler)

    def _end_lease(self, lease_id: str, scheduler: Scheduler) -> None:
        update = scheduler.end_lease(lease_id)
        if update is not None:
            self._report(update)

    # D

    def take_over(self, request: Request, scheduler: Scheduler) -> None:
        """Admit a TAKE_OVER: load what its ticket promises, or ask where to prefill, or see that it is not worth it."""
        scheduler.park(request)
        intake = Intake(request)
        self._intakes[request.request_id] = intake
        message = request.message
        if message.ticket is not None:
            self._load(intake, message.ticket, message.load_deadline_s, scheduler)
            return
        intake.has_recalled = True
        if not self._recalls.start(request, scheduler, lambda _: self._choose(intake, scheduler)):
            self._choose(intake, scheduler)

    def _choose(self, intake: Intake, scheduler: Scheduler) -> None:
        """What is missing is computed by some P, or here when that is not worth it."""
        request = intake.request
        num_cached = scheduler.pin(request)
        if len(request.prompt_token_ids) - num_cached < max(1, request.message.min_remote_tokens):
            self.prefill_locally(request.request_id, scheduler)
        else:
            self._reply(NeedsPrefill(request.request_id, num_cached))

    def use_ticket(self, request_id: str, ticket: Ticket, deadline_s: float, scheduler: Scheduler) -> None:
        """The API process found a P. Ignored when the request is gone meanwhile."""
        intake = self._intakes.get(request_id)
        if intake is not None and intake.load_id is None:
            self._load(intake, ticket, deadline_s, scheduler)

    def prefill_locally(self, request_id: str, scheduler: Scheduler) -> None:
        """Compute the prompt here. Ignored when the request is gone meanwhile, or a load is under way."""
        intake = self._intakes.get(request_id)
        if intake is not None and intake.load_id is None:
            del self._intakes[request_id]
            self.counters["prefills_local_total"] += 1
            request, go_on = intake.request, scheduler.fall_back_to_local
            if intake.has_recalled or not self._recalls.start(request, scheduler, go_on):
                go_on(request)

    def _load(self, intake: Intake, ticket: Ticket, deadline_s: float, scheduler: Scheduler) -> None:
        request, num_prompt = intake.request, len(intake.request.prompt_token_ids)
        if ticket.num_tokens != num_prompt:
            wrong = f"the ticket is for {ticket.num_tokens} tokens, the prompt has {num_prompt}"
            self._ask_again(intake, LoadFailure.REJECTED, wrong)
            return
        intake.redraw = None if request.first_tokens else Redraw.due(ticket, request.sampling)
        request.redraws = intake.redraw is not None
        intake.num_attempts += 1
        intake.load_id = request.load_id = f"{request.request_id}#{intake.num_attempts}"
        intake.is_ready = False
        self._loads[intake.load_id] = intake
        self._connector.begin_load(intake.load_id, ticket, deadline_s)

    def _ask_again(self, intake: Intake, reason: LoadFailure, detail: str) -> None:
        text = f"{reason}: {detail}" if detail else str(reason)
        request = intake.request
        self._reply(NeedsPrefill(request.request_id, request.num_cached_tokens, text, bool(request.first_tokens)))

    def reserve(self, scheduler: Scheduler) -> None:
        """Blocks for the loads that wait for them, best claim first. Called before each step."""
        wanting = [intake for intake in self._intakes.values() if intake.is_ready]
        for intake in sorted(wanting, key=lambda intake: intake.request.claim):
            if scheduler.reserve(intake.request) is not None:
                intake.is_ready = False
        self._recalls.reserve(scheduler)

    def forget(self, request: Request) -> None:
        """The request has ended. Its load, if there is one, is cancelled and becomes an orphan. Idempotent."""
        self._recalls.forget(request)
        intake = self._intakes.pop(request.request_id, None)
        if intake is not None and intake.load_id is not None:
            self._loads[intake.load_id] = None
            self._connector.cancel_load(intake.load_id)

    # events

    def take_events(self, scheduler: Scheduler) -> None:
        """Carry out what the connector has to say."""
        for event in self._connector.poll():
            self._handle(event, scheduler)

    def _handle(self, event: Event, scheduler: Scheduler) -> None:
        if isinstance(event, LeaseEnded):
            self._end_lease(event.lease_id, scheduler)
            return
        if isinstance(event, PrefixFound | PrefixLoaded):
            self._recalls.take(event, scheduler)
            return
        intake = self._loads.get(event.load_id)
        match event:
            case LoadDrained():
                self._loads.pop(event.load_id, None)
                scheduler.drain(event.load_id)
            case LoadDone():
                self._loads.pop(event.load_id, None)
                if intake is None:
                    scheduler.drain(event.load_id)  # it was cancelled too late to fail
                else:
                    del self._intakes[intake.request.request_id]
                    intake.request.marks.load_steps = event.steps
                    self.counters["prefills_remote_total"] += 1
                    if intake.redraw is not None:
                        self.counters[intake.redraw.counter] += 1
                    self._report_some(scheduler.admit_loaded(intake.request))
            case LoadReady() if intake is not None:
                intake.is_ready = True
            case FirstTokens() if intake is not None:
                intake.request.marks.prefill_leg_s = event.prefill_s
                self._take_first_tokens(intake, event, scheduler)
            case LoadFailed() if intake is not None:
                self._loads[event.load_id] = None
                intake.load_id, intake.is_ready = None, False
                scheduler.drop_load(intake.request)
                self._ask_again(intake, event.reason, event.detail)

    def _take_first_tokens(self, intake: Intake, event: FirstTokens, scheduler: Scheduler) -> None:
        if intake.redraw is not None or intake.request.first_tokens:
            return  # they are not this request's, or come from a second P
        if len(event.tokens) != intake.request.sampling.n:  # a P that breaks its ticket's promise
            self._connector.cancel_load(event.load_id)
            self._handle(LoadFailed(event.load_id, LoadFailure.REJECTED, "wrong number of first tokens"), scheduler)
            return
        self._report_some(scheduler.set_first_tokens(intake.request, event.tokens))

    def _report_some(self, update: Update | None) -> None:
        if update is not None:
            self._report(update)


def admit(
    message: AddRequest, handoffs: KvTransfers, scheduler: Scheduler, drawn_seed: int, vocab_size: int
) -> Request:
    """Validate a request and put it on its way. Raises PdError (InvalidRequest, Overloaded, ...), leaving no trace."""
    message.sampling.validate(vocab_size)
    if not _are_below(vocab_size, message.prompt_token_ids):
        raise InvalidRequest(f"the prompt has token ids outside the vocabulary 0..{vocab_size - 1}", "prompt")
    request = Request.from_message(message, drawn_seed=drawn_seed)
    scheduler.validate(request)
    match message.work:
        case Work.GENERATE:
            handoffs.generate(request, scheduler)
        case Work.PREFILL:
            handoffs.open_lease(request, scheduler)
        case Work.TAKE_OVER:
            handoffs.take_over(request, scheduler)
    return request


def _are_below(limit: int, token_ids: list[int]) -> bool:
    """Whether 0 <= id < `limit` for all: 17 us for 4,096 of them where Python's own loop takes 105, min and max 63."""
    try:
        packed = array("I", token_ids)
    except OverflowError:  # less than 0, or 2**32 and more
        return False
    return not packed or int(np.frombuffer(packed, np.uint32).max()) < limit


def refusal(message: AddRequest, error: PdError) -> RequestFailed:
    """The terminal reply to a request that `admit` refused."""
    param = error.param if isinstance(error, InvalidRequest) else None
    return RequestFailed(message.request_id, type(error).__name__, str(error), param, error.code)
