"""D's side of a handoff, as policy: which ticket to trust, which node to ask next, when to prefill locally or fail.

kv_transfer_params of the request         source of the prompt's KV
do_remote_decode                          this node, for another node (the prefill leg)
ticket, verified                          that ticket's lease (P-first)
do_remote_prefill and an offer            this engine's cache, else the offer's nodes, best first (D-first)
a ticket of another protocol version      this node: during an upgrade the offer's nodes would answer with such tickets
none, or none that can be trusted         this node
any, and the answer shows the             this node: KV from elsewhere tells no log-probabilities
prompt's log-probabilities
a stream's continuation and an offer      as for a prompt, which is here with the known tokens but the last
a continuation of several choices         this node

after a failed load, `on_load_failure`:   any: the offer's next node, else this one   remote: the next node, else error
                                          local: this node                            fail: error
A continuation is never an error: this node can compute what no other one gives it. It does so, and asks no other
node, when one has died meanwhile: a stream that kills nodes must not reach all of them.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pd_cluster.errors import NodesDied, PrefillUnavailable
from pd_cluster.protocol.messages import NeedsPrefill, PrefillLocally, UseTicket, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.server.bodies.schema import KvTransferParams
from pd_cluster.server.params.sampling import encode_sampling
from pd_cluster.server.requests.generation_request import GenerationRequest, KvSource
from pd_cluster.server.requests.prefill_client import PeerError, PrefillClient
from pd_connectors.protocol.errors import BadSignature, LoadFailure, ProtocolMismatch, TicketError, TicketExpired
from pd_connectors.protocol.feed import CHARGE_HEADER
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.ticket import Offer, Statement, Ticket, verify
from pd_http.node_answers import ASK_TICKET, FailureKind

if TYPE_CHECKING:
    from pd_cluster.server.requests.generation_ask import GenerationAsk
    from pd_cluster.server.requests.prompt_space import PromptSpace
    from pd_cluster.server.state import NodeState

logger = logging.getLogger("pd_cluster.server")

_UNUSED = SamplingParams(max_tokens=1, temperature=0.0)  # of a first token that nothing uses
GROUP_HEADER = "x-pd-group"  # D to P: see `GenerationRequest.group`; the router drops what clients send under this name


class Untrusted(Exception):
    """A ticket or offer that must not be used. `reason` is the label under which it is counted."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def trusted_ticket(state: NodeState, token: str, prompt: list[int], space: PromptSpace) -> Ticket:
    """The ticket in `token`. Raises Untrusted unless this cluster's key signed it for this prompt and model.

    The sampling parameters of P are not compared here: they do not change the KV, and the engine compares them.
    """
    ticket = _verified(state, token, Ticket)
    if ticket.fingerprint != state.ready.fingerprint:
        raise Untrusted(FailureKind.FINGERPRINT_MISMATCH)
    if ticket.num_tokens != len(prompt) or ticket.prompt_digest != prompt_digest(prompt, space.text):
        raise Untrusted("prompt_mismatch")
    return ticket


def _verified(state: NodeState, token: str, kind: type[Statement]) -> Statement:
    try:
        return verify(state.key, token, kind, time.time())
    except BadSignature as error:
        raise Untrusted("bad_signature") from error
    except TicketExpired as error:
        raise Untrusted("expired") from error
    except ProtocolMismatch as error:
        logger.info("%s", error)
        raise Untrusted(FailureKind.PROTOCOL_MISMATCH) from error
    except TicketError as error:
        raise Untrusted("malformed") from error


async def choose_kv_source(state: NodeState, ask: GenerationAsk, index: int) -> tuple[list[int], KvSource]:
    """The token ids of the prompt `index`, and the source of its KV. Given ids are used when the ticket covers them.

    Raises PrefillUnavailable when nothing given can be trusted and this node may not prefill locally.
    """
    tokenize, params = ask.prompts[index], ask.params
    known = ask.known[index] if ask.known else None
    if ask.kv_source is not None:
        return await tokenize(), ask.kv_source
    if len(ask.prompts) > 1:
        # a ticket is for one prompt: each prompt asks the offer's nodes for its own
        params = KvTransferParams(do_remote_prefill=params.do_remote_prefill, offer=params.offer)
    tells_scores = ask.scores is not None and known is None
    if tells_scores or not (params.do_remote_prefill or params.continuation):
        return await tokenize(), KvSource()
    urls, faults = _offered(state, params)
    if known is not None:
        given = _plausible_ids(state, params.prompt_token_ids)  # compared with the digest of the stream's prompt
        prompt = await tokenize() if given is None else given
        for fault in faults:
            state.metrics.fallbacks.labels(fault).inc()
        is_asked = bool(urls and known.only_tokens)
        return prompt, KvSource(Work.TAKE_OVER, None, urls) if is_asked else KvSource()
    if params.ticket:
        given = _plausible_ids(state, params.prompt_token_ids)
        prompt = await tokenize() if given is None else given
        try:
            return prompt, KvSource(Work.TAKE_OVER, trusted_ticket(state, params.ticket, prompt, ask.space), urls)
        except Untrusted as error:
            faults.append(f"ticket_{error.reason}")
    elif not urls and not faults:
        faults.append("no_ticket")
    for fault in faults:
        state.metrics.fallbacks.labels(fault).inc()
    policy = state.config.handoff.on_load_failure
    may_ask = ("remote",) if f"ticket_{FailureKind.PROTOCOL_MISMATCH}" in faults else ("any", "remote")
    if urls and (not params.ticket or policy in may_ask):
        return await tokenize(), KvSource(Work.TAKE_OVER, None, urls)
    if policy in ("remote", "fail"):
        raise PrefillUnavailable(
            f"no usable ticket ({', '.join(faults)}), and --on-load-failure {policy} forbids a local prefill"
        )
    logger.info("prefilling locally: %s", ", ".join(faults))
    return await tokenize(), KvSource()


def _offered(state: NodeState, params: KvTransferParams) -> tuple[tuple[str, ...], list[str]]:
    """The nodes of the router's offer, best first, and why it is not used."""
    if not params.offer:
        return (), []
    try:
        return _verified(state, params.offer, Offer).prefill_urls, []
    except Untrusted as error:
        return (), [f"offer_{error.reason}"]


def _plausible_ids(state: NodeState, ids: list[int] | None) -> list[int] | None:
    if not ids or len(ids) > state.ready.max_model_len or min(ids) < 0 or max(ids) >= state.tokenizer.vocab_size:
        return None
    return ids


class PrefillSearch:
    """Answers NeedsPrefill of one request, and stays connected to the prefill node. Close it with the request."""

    def __init__(self, state: NodeState, request: GenerationRequest) -> None:
        self._state = state
        self._request = request
        self._urls = list(request.kv_source.prefill_urls)
        self._ends_s = time.monotonic() + state.config.handoff.load_deadline_s
        self._legs: list[PrefillClient] = []
        self._dead: set[str] = set()  # prefill nodes that died while they served the request
        self._num_frozen = 0
        ticket, is_open = request.kv_source.ticket, request.kv_source.work is Work.TAKE_OVER
        # None: not known, the engine may still send NeedsPrefill or prefill locally
        self.prefill_node: str | None = ticket.lease.engine_id if ticket else None if is_open else state.node_id

    async def answer(self, needs: NeedsPrefill) -> UseTicket | PrefillLocally:
        """Raises PrefillUnavailable, NodesDied."""
        policy = self._state.config.handoff.on_load_failure
        reason = needs.reason
        if reason:
            cause = reason.partition(":")[0]  # without the details: a label has few values
            self._fell_back(cause, reason)
            if await self._has_died(cause):
                self._bury(self.prefill_node or "")
            self._leave_frozen(cause)
        await self.close()  # close the connection to the node of the failed load
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
                reason = f"peer_{error.kind}"
                self._fell_back(reason, str(error))
                if error.kind is FailureKind.DIED:
                    self._bury(url)
                self._leave_frozen(reason)
                if error.kind is FailureKind.PROTOCOL_MISMATCH and policy == "any":
                    break  # during an upgrade the other nodes would answer with such tickets too
                continue
            self.prefill_node = ticket.lease.engine_id
            return UseTicket(self._request.request_id, ticket, max(self._ends_s - time.monotonic(), 0.001))
        if policy in ("any", "local") or self._request.known is not None:
            self.prefill_node = self._state.node_id
            return PrefillLocally(self._request.request_id)
        forbidden = f"--on-load-failure {policy} forbids a local prefill"
        raise PrefillUnavailable(f"no prefill node could serve the request ({reason}), and {forbidden}")

    def has_tokens(self) -> None:
        """Note that the engine has generated. If it never sent NeedsPrefill, this node has prefilled."""
        if self.prefill_node is None:
            self.prefill_node = self._state.node_id

    async def _has_died(self, cause: str) -> bool:
        """Whether the node of the failed load has died.

        A node that answers /health is alive even if its KV cannot be reached: a closed port or a broken network between
        the nodes must not turn every request into a final error. A node that issued the request's ticket counts as
        dead when it cannot be reached: its HTTP address is not known here. A node that has given up by its own word has
        not died, even if it is gone since: it drained.
        """
        if any(leg.has_given_up for leg in self._legs):
            return False
        if cause == LoadFailure.PEER_RESTARTED or any(leg.has_died for leg in self._legs):
            return True
        if cause != LoadFailure.UNREACHABLE:
            return False
        return not self._legs or not await self._legs[-1].lives()

    def _bury(self, name: str) -> None:
        """Count a prefill node that died during this request. Raises NodesDied at `max_node_deaths`.

        A stream that goes on asks no other node then, and does not end: the router counts the nodes that it kills.
        """
        if self._request.known is not None:
            self._urls.clear()
            return
        self._dead.add(name)
        if len(self._dead) >= self._state.config.handoff.max_node_deaths:
            self._fell_back("nodes_died")
            raise NodesDied(
                f"{len(self._dead)} prefill nodes died while they served this request; it is not tried again"
            )

    def _leave_frozen(self, cause: str) -> None:
        """Ask no third node when two stood still. No final error: behind a cut network they look the same."""
        self._num_frozen += cause == LoadFailure.PEER_FROZEN
        if self._num_frozen >= self._state.config.handoff.max_node_deaths:
            self._urls.clear()

    async def close(self) -> None:
        """Close the connections to all prefill nodes that were asked. Idempotent."""
        while self._legs:
            await self._legs.pop().close()

    async def _ask(self, url: str, left_s: float) -> Ticket:
        assert self._state.peers is not None, "the app's lifespan has not begun"
        request = self._request
        prompt, goes_on = request.loaded_ids, request.known is not None
        more = {
            "sampling": encode_sampling(_UNUSED if goes_on else request.sampling),
            "prompt_steps": request.steps or None,
            "goes_on": goes_on or None,
        }
        body = {
            "model": request.space.name or None,
            "prompt": prompt,
            "priority": request.priority + goes_on,  # P takes one off again
            "cache_salt": request.space.salt or None,
            "kv_transfer_params": ASK_TICKET | more,
        }
        headers = {"x-request-id": request.client_request_id, GROUP_HEADER: request.group, **dict(request.passed_on)}
        if request.prefill_charge:
            headers[CHARGE_HEADER] = request.prefill_charge
        leg = await PrefillClient.open(self._state.peers, url, body, headers, left_s)
        self._legs.append(leg)
        try:
            return trusted_ticket(self._state, leg.ticket, prompt, request.space)
        except Untrusted as error:
            await self.close()
            is_mismatch = error.reason in (FailureKind.PROTOCOL_MISMATCH, FailureKind.FINGERPRINT_MISMATCH)
            kind = FailureKind(error.reason) if is_mismatch else FailureKind.BAD_ANSWER
            raise PeerError(kind, f"{url}: {error.reason}") from error

    def _fell_back(self, reason: str, detail: str = "") -> None:
        self._state.metrics.fallbacks.labels(reason).inc()
        logger.info("request %s: %s", self._request.request_id, detail or reason)
