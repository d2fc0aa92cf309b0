"""D's side of a handoff, as policy: which ticket to trust, whom to ask next, when to prefill here, when to give up.

kv_transfer_params of the request         the prompt's KV comes from
do_remote_decode                          here, for another node (the P leg)
ticket, verified                          that ticket's lease (P-first)
do_remote_prefill and an offer            this engine's cache, else the offer's nodes, best first (D-first)
none, or nothing that can be trusted      here

after a failed load, `on_load_failure`:   any: the offer's next node, else here   remote: the next node, else an error
                                          local: here                             fail: an error
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from pd_cluster.errors import PeersDied, PrefillUnavailable
from pd_cluster.protocol.messages import NeedsPrefill, PrefillLocally, UseTicket, Work
from pd_cluster.server.generation_request import GenerationRequest, KvSource
from pd_cluster.server.prefill_client import PREFILL_PARAMS, PeerError, PeerFault, PrefillClient
from pd_cluster.server.sampling import api_fields
from pd_connectors.protocol.errors import BadSignature, LoadFailure, ProtocolMismatch, TicketError, TicketExpired
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.ticket import Offer, Paper, Ticket, verify

if TYPE_CHECKING:
    from pd_cluster.server.schema import KvTransferParams
    from pd_cluster.server.state import NodeState

Tokenize = Callable[[], Awaitable[list[int]]]

logger = logging.getLogger("pd_cluster.server")

GROUP_HEADER = "x-pd-group"  # D to P: see `GenerationRequest.group`; the router drops what clients send under this name


class Untrusted(Exception):
    """A ticket or offer that must not be acted on; `reason` is what it is counted under."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def trusted_ticket(state: NodeState, token: str, prompt: list[int], salt: str) -> Ticket:
    """The ticket inside `token`, when it is this cluster's and promises this prompt. Raises Untrusted.

    Under which parameters P samples is the engine's business: the KV is the same.
    """
    ticket = _verified(state, token, Ticket)
    if ticket.fingerprint != state.ready.fingerprint:
        raise Untrusted("fingerprint_mismatch")
    if ticket.num_tokens != len(prompt) or ticket.prompt_digest != prompt_digest(prompt, salt):
        raise Untrusted("prompt_mismatch")
    return ticket


def _verified(state: NodeState, token: str, kind: type[Paper]) -> Paper:
    try:
        return verify(state.key, token, kind, time.time())
    except BadSignature as error:
        raise Untrusted("bad_signature") from error
    except TicketExpired as error:
        raise Untrusted("expired") from error
    except ProtocolMismatch as error:
        logger.info("%s", error)
        raise Untrusted("protocol_mismatch") from error
    except TicketError as error:
        raise Untrusted("malformed") from error


async def plan_handoff(
    state: NodeState, params: KvTransferParams | None, tokenize: Tokenize, salt: str
) -> tuple[list[int], KvSource]:
    """The prompt's ids and where its KV comes from. P's ids are taken when its ticket vouches for them.

    Raises PrefillUnavailable when nothing in `params` can be trusted and this node may not prefill by itself.
    """
    if params is None or not params.do_remote_prefill:
        return await tokenize(), KvSource()
    faults: list[str] = []
    urls: tuple[str, ...] = ()
    if params.offer:
        try:
            urls = _verified(state, params.offer, Offer).prefill_urls
        except Untrusted as error:
            faults.append(f"offer_{error.reason}")
    if params.ticket:
        given = _plausible_ids(state, params.prompt_token_ids)
        prompt = await tokenize() if given is None else given
        try:
            return prompt, KvSource(Work.TAKE_OVER, trusted_ticket(state, params.ticket, prompt, salt), urls)
        except Untrusted as error:
            faults.append(f"ticket_{error.reason}")
    elif not urls and not faults:
        faults.append("no_ticket")
    for fault in faults:
        state.metrics.fallbacks.labels(fault).inc()
    policy = state.config.handoff.on_load_failure
    if urls and (not params.ticket or policy in ("any", "remote")):
        return await tokenize(), KvSource(Work.TAKE_OVER, None, urls)
    if policy in ("remote", "fail"):
        raise PrefillUnavailable(f"no usable ticket ({', '.join(faults)}), and this node may not prefill by itself")
    logger.info("prefilling here: %s", ", ".join(faults))
    return await tokenize(), KvSource()


def _plausible_ids(state: NodeState, ids: list[int] | None) -> list[int] | None:
    if not ids or len(ids) > state.ready.max_model_len or min(ids) < 0 or max(ids) >= state.tokenizer.vocab_size:
        return None
    return ids


class PrefillSearch:
    """Answers one request's NeedsPrefill, and stays connected to the node that prefills. Close it with the request."""

    def __init__(self, state: NodeState, job: GenerationRequest) -> None:
        self._state = state
        self._job = job
        self._urls = list(job.plan.prefill_urls)
        self._ends_s = time.monotonic() + state.config.handoff.load_deadline_s
        self._legs: list[PrefillClient] = []
        self._dead: set[str] = set()  # prefill nodes that died while the request was with them
        ticket, is_open = job.plan.ticket, job.plan.work is Work.TAKE_OVER
        # None: not settled, the engine may still ask or do it itself
        self.prefill_node: str | None = ticket.lease.engine_id if ticket else None if is_open else state.node_id

    async def answer(self, needs: NeedsPrefill) -> UseTicket | PrefillLocally:
        """Raises PrefillUnavailable, PeersDied."""
        policy = self._state.config.handoff.on_load_failure
        reason = needs.reason
        if reason:
            cause = reason.partition(":")[0]  # the rest is words; a label has few values
            self._fell_back(cause, reason)
            if await self._has_died(cause):
                self._bury(self.prefill_node or "")
        await self.close()  # the node whose load failed
        while self._urls and (not reason or policy in ("any", "remote")):
            left_s = self._ends_s - time.monotonic()
            if left_s <= 0:
                reason = "deadline"
                self._fell_back(reason)
                break
            url = self._urls.pop(0)
            try:
                ticket = await self._ask(url, left_s)
            except PeerError as error:
                reason = error.fault
                self._fell_back(reason, str(error))
                if error.fault is PeerFault.DIED:
                    self._bury(url)
                continue
            self.prefill_node = ticket.lease.engine_id
            return UseTicket(self._job.request_id, ticket, max(self._ends_s - time.monotonic(), 0.001))
        if policy in ("any", "local"):
            self.prefill_node = self._state.node_id
            return PrefillLocally(self._job.request_id)
        raise PrefillUnavailable(
            f"no prefill node could serve the request ({reason}), and this node may not do it itself"
        )

    def has_tokens(self) -> None:
        """The engine has generated. If it never asked, it has prefilled by itself."""
        if self.prefill_node is None:
            self.prefill_node = self._state.node_id

    async def _has_died(self, cause: str) -> bool:
        """Whether the node whose load failed has died, perhaps of this very request.

        A node that cannot be reached for its KV and says over HTTP that it is well has not: a closed port or a broken
        network between the nodes must not turn every request into a final error. Of the node of a ticket that came with
        the request, no HTTP address is known here.
        """
        if cause == LoadFailure.PEER_RESTARTED or any(leg.has_died for leg in self._legs):
            return True
        if cause != LoadFailure.UNREACHABLE:
            return False
        return not self._legs or not await self._legs[-1].lives()

    def _bury(self, name: str) -> None:
        """A prefill node died of this request, perhaps. Raises PeersDied when it must not meet another one."""
        self._dead.add(name)
        if len(self._dead) >= self._state.config.handoff.max_node_deaths:
            self._fell_back("nodes_died")
            raise PeersDied(
                f"{len(self._dead)} prefill nodes died while they served this request; it is not tried again"
            )

    async def close(self) -> None:
        """Hang up on every prefill node asked. Idempotent."""
        while self._legs:
            await self._legs.pop().close()

    async def _ask(self, url: str, left_s: float) -> Ticket:
        assert self._state.peers is not None, "the app's lifespan has not begun"
        job = self._job
        body = {
            "prompt": job.prompt,
            "max_tokens": 1,
            "stream": False,
            "priority": job.priority,
            "cache_salt": job.salt or None,
            "kv_transfer_params": PREFILL_PARAMS,
        } | api_fields(job.sampling)
        headers = {"x-request-id": job.client_request_id, GROUP_HEADER: job.group}
        leg = await PrefillClient.open(self._state.peers, url, body, headers, left_s)
        self._legs.append(leg)
        try:
            return trusted_ticket(self._state, leg.ticket, job.prompt, job.salt)
        except Untrusted as error:
            await self.close()
            raise PeerError(PeerFault.BAD_ANSWER, f"{url}: {error.reason}") from error

    def _fell_back(self, reason: str, detail: str = "") -> None:
        self._state.metrics.fallbacks.labels(reason).inc()
        logger.info("request %s: %s", self._job.request_id, detail or reason)
