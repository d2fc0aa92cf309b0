"""One request on its way through the nodes: P-first, D-first, direct or a prompt alone, and legs that fail."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import orjson
from msgspec.structs import replace

from pd_connectors.protocol.feed import CHARGE_HEADER, PREFILL_CHARGE_HEADER
from pd_http.node_answers import FailureKind
from pd_http.sse import SSE_DONE
from pd_router.calls.headers import DECODE_BY, PREDICTED, PREFILL_BY, TICKET
from pd_router.config import HandoffOrder
from pd_router.errors import NodeFailed
from pd_router.nodes.node import DECODERS, READERS, Role
from pd_router.nodes.upstream import LegFailed, Refused
from pd_router.policy.candidates import NO_DECODE_NODE, NO_PREFILL_NODE
from pd_router.policy.charge import charge_for
from pd_router.requests.continued_stream import ContinuedStream
from pd_router.requests.legs import DecodeLeg, Handoff, PrefillLeg
from pd_router.requests.liveness_guard import LivenessGuard
from pd_router.requests.node_request import NodeRequest, may_be_tried_again
from pd_router.requests.splice import send_answer

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_router.nodes.node import Node
    from pd_router.requests.stream_record import StreamRecord
    from pd_router.requests.untried_nodes import Choose

log = logging.getLogger("pd_router")


class RoutedRequest(NodeRequest):
    """Cancelling it closes its legs, and releases the ticket unless a D has answered with it."""

    _record_of_stream: StreamRecord | None = None  # of all nodes that wrote the stream

    async def _serve(self) -> None:
        self._stream = ContinuedStream(
            self._s, self._record.path, self._body, self._headers, self._deaths, self._note, self._judge
        )
        self._record_of_stream = self._stream.record
        try:
            if self.route.order is HandoffOrder.PROMPT:
                await self._prompt()
            elif await self._spill():
                return
            elif self.route.order is HandoffOrder.P_FIRST:
                await self._p_first()
            elif self.route.order is HandoffOrder.D_FIRST:
                await self._d_first()
            else:
                await self._direct()
        finally:
            del self._stream  # it refers to this request: a cycle would keep the body until a search for garbage

    def _reported_usage(self) -> tuple[int, int] | None:
        found, reported = super()._reported_usage(), self._record_of_stream
        if found is not None or reported is None or reported.head is None:
            return found
        return reported.head.num_prompt_tokens, reported.num_tokens

    # --- orders

    async def _prompt(self) -> None:
        """No lease, no ticket, and decode nodes last."""
        config = self._s.config
        may_all = self.route.reason == NO_PREFILL_NODE or config.on_prefill_failure == "local"
        roles = tuple(Role) if may_all else READERS
        nodes = self._untried(self.route.decodes, roles, self.route.best, config.max_prefill_tries)
        leg, last = await self._first_answer("prompt", nodes, self._body.plain())
        if leg is None:
            await self._give_up(last, "every node that can read prompts went down; try again later")
            return
        if leg.node.role is Role.DECODE and self.route.reason != NO_PREFILL_NODE:
            self.route = self.route.because("prefill-failed")
        await self._answer(leg, prefill_by=None)

    async def _spill(self) -> bool:
        """Let one node read and answer although there are two, as planned. False: it was not planned, or none did."""
        while (otherwise := self.route.otherwise) is not None:
            decode, _ = await self._try_decodes(self._body.plain(), self.route.best, has_other_way=lambda: True)
            if decode is not None:
                await self._answer(decode, prefill_by=None)
                return True
            self.route, self.phase = otherwise, "prefill"
        return False

    async def _p_first(self) -> None:
        leg, handoff = await self._open_prefill()
        if leg is None or handoff is None:
            await self._fall_back()
            return
        # If D's answer fails, P's leg is closed too: nothing needs the rest of the prefill.
        is_served = is_taken = False
        self._s.background.keep(leg.drain(self._s.config.response_timeout_s, self._drain_failed))
        try:
            params = dict(handoff.params)
            if spare := self._offer(without=leg.node):
                params["offer"] = spare
            decode = await self._open_decode(self._body.with_transfer(params))
            if decode is None:
                return
            is_taken = True
            is_alone = self.route.order is HandoffOrder.DIRECT
            if is_alone or decode.prefilled_by == decode.node.node_id:  # D refused the ticket, or its load failed
                leg.close()
                self._release(handoff)
            is_served = await self._answer(decode, prefill_by=None if is_alone else leg.node)
        finally:
            if not is_served:
                leg.close()
            if not is_taken:
                self._release(handoff)

    async def _d_first(self) -> None:
        offered = self.route.offered(self._s.table.clock(), 1)
        if not offered:  # all went down during `_spill`
            await self._fall_back()
            return
        body = self._body.with_transfer({"do_remote_prefill": True, "offer": self._offer()})
        # D asks the first node of the offer, if it asks for a prefill at all
        with charge_for(
            self.route, offered[0], self._s.table.clock, reads=True, generates=False,
            shows_reading=self._body.shows_reading,
        ) as charge:  # fmt: skip
            self._headers[PREFILL_CHARGE_HEADER] = charge.name
            decode = await self._open_decode(body)
            if decode is not None and decode.whole is None and decode.prefilled_by == offered[0].node_id:
                charge.prefill_done()
        if decode is not None:
            await self._answer(decode, prefill_by=None)

    async def _direct(self) -> None:
        decode = await self._open_decode(self._body.plain())
        if decode is not None:
            await self._answer(decode, prefill_by=None)

    async def _fall_back(self) -> None:
        """No P has answered: let D prefill. Raises NodeFailed if local prefill is not allowed."""
        if self._s.config.on_prefill_failure == "fail":
            raise NodeFailed("no prefill node answered, and local prefill is not allowed (on_prefill_failure)")
        self._set_direct("prefill-failed")
        await self._direct()

    def _set_direct(self, reason: str) -> None:
        self.route = self.route.direct(reason)

    # --- legs

    async def _open_prefill(self) -> tuple[PrefillLeg | None, Handoff | None]:
        """A leg and its ticket, or (None, None) if no P gave one. Raises Refused, NodesDied."""
        s = self._s
        body = self._body.for_prefill()
        headers = self._headers.copy()
        headers[TICKET] = "stream"
        route, limit = self.route, s.config.max_prefill_tries
        nodes = self._untried(route.prefills, (Role.PREFILL,), route.best_prefill, limit)
        has_local = s.config.on_prefill_failure == "local"
        while (node := nodes.take()) is not None:
            self._predict(node)
            charge = charge_for(route, node, s.table.clock, reads=True, generates=False)
            headers[CHARGE_HEADER] = charge.name
            self._record.until(s.table.clock(), "plan")
            leg = PrefillLeg(s.upstream, node, charge)
            self._deaths.meet(node)
            try:
                with LivenessGuard(node, lambda: has_local or nodes.has_next):
                    handoff = await leg.open(self._record.path, headers, body, s.config.ticket_timeout_s)
            except LegFailed as failure:
                self._record.until(s.table.clock(), "retry")
                await self._judge("prefill", failure)
                continue
            s.table.answered(node)
            now_s = s.table.clock()
            self._record.until(now_s, "ticket")
            s.metrics.ticket_s.observe(now_s - self._record.arrived_s)
            return leg, handoff
        s.metrics.legs.exhausted.labels("prefill").inc()
        return None, None

    async def _open_decode(self, body: bytes) -> DecodeLeg | None:
        """A leg that has begun to answer. None: the client got the last node's own error.

        Raises Refused, NodeFailed, NoNode, NodesDied.
        """
        leg, last = await self._try_decodes(body, self.route.best, has_other_way=self._has_other_way)
        if leg is None and (last is None or may_be_tried_again(last)) and self._has_alone():
            self._set_direct("no-pair")
            leg, failure = await self._try_decodes(self._body.plain(), self.route.best_alone)
            last = failure or last
        if leg is None and (last is None or may_be_tried_again(last)) and (keepers := self._keepers()):
            self.route = replace(self.route.direct(NO_DECODE_NODE), decodes=keepers)
            leg, failure = await self._try_decodes(self._body.plain(), self.route.best)
            last = failure or last
        if leg is not None:
            return leg
        await self._give_up(last, "every decode node went down while the request was prefilled; try again")
        return None

    async def _try_decodes(
        self, body: bytes, choose: Choose, *, has_other_way: Callable[[], bool] = lambda: False
    ) -> tuple[DecodeLeg | None, LegFailed | None]:
        """See `_first_answer`."""
        self.phase = "decode"
        nodes = self._untried(self.route.decodes, DECODERS, choose, self._s.config.max_decode_tries)
        record = self._stream.record if self._body.wants_stream else None
        return await self._first_answer("decode", nodes, body, record=record, has_other_way=has_other_way)

    def _has_alone(self) -> bool:
        """Whether a decode node that does not pair with the prefill nodes can serve the request, if no other does."""
        if self.route.order is HandoffOrder.DIRECT or self._s.config.on_prefill_failure == "fail":
            return False
        decodes = self._healthy(*DECODERS)()
        return self.route.best_alone(decodes, self._s.table.clock()) is not None

    def _has_other_way(self) -> bool:
        return self._has_alone() or bool(self._keepers())

    def _keepers(self) -> tuple[Node, ...]:
        """Prefill nodes that read and answer the request, because no decode node is left."""
        nodes = () if self.route.reason == NO_DECODE_NODE else self._s.table.answering(self._body.model)
        return tuple(node for node in nodes if node.role is Role.PREFILL)

    def _drain_failed(self, failure: LegFailed) -> None:
        """Count a failure of P after its ticket. D learns of it from the lease."""
        if failure.kind is FailureKind.DIED:
            self._deaths.add(failure.node)
        self._note("prefill_after_ticket", failure)

    async def _answer(self, leg: DecodeLeg, prefill_by: Node | None) -> bool:
        """Pass D's answer on to the client. False if D broke off; the client then got an error event."""
        s, nodes, on_piece = self._s, {PREFILL_BY: prefill_by or leg.node}, None
        if self.route.order is not HandoffOrder.PROMPT:
            nodes[DECODE_BY], on_piece = leg.node, self._note_piece()
        self.phase, self._whole, self._writer = "stream", leg.whole, leg.node
        self._record.prefill_by = leg.prefilled_by or (prefill_by or leg.node).node_id
        self._name_route()
        if (predicted_s := self._record.predicted_s) is not None:
            self._reply.headers[PREDICTED] = f"{predicted_s:.4f}"
        try:
            last = await send_answer(leg, self._reply, nodes, s.config.idle_timeout_s, self._stream, on_piece)
            self._reported(last, is_first_node=last is leg)
            self._record.served_by = last.node.node_id
        except LegFailed:
            self.outcome = "broken"
            return False
        finally:
            leg.close()
        return True

    def _note_piece(self) -> Callable[[bytes], None]:
        record, clock, metrics = self._record, self._s.table.clock, self._s.metrics
        totals, order = metrics.models.of(record.model), self.route.order.value
        stream, num_before = self._stream.record, 0

        def note(data: bytes) -> None:
            nonlocal num_before
            num_tokens, num_before = stream.num_told - num_before, stream.num_told
            if not record.first_s:
                record.first_piece(clock())
                metrics.first_token_took(record.model, order, record.first_s - record.arrived_s)
            elif num_tokens:
                totals.piece(record, clock(), num_tokens)
            elif stream.head is None and not data.endswith(SSE_DONE):  # no frames; the end follows the last token
                totals.piece(record, clock())

        return note

    # --- details

    def _offer(self, without: Node | None = None) -> str | None:
        """The signed list of prefill nodes that D may ask; None: there are none."""
        s = self._s
        nodes = self.route.offered(s.table.clock(), s.config.offer_size, without)
        if not nodes:
            return None
        for node in nodes:
            self._deaths.meet(node)
        return s.signed_offer(nodes)

    def _release(self, handoff: Handoff) -> None:
        if handoff.ticket is not None:
            self._s.background.spawn(self._send_release(handoff.node, handoff.ticket))

    async def _send_release(self, node: Node, ticket: str) -> None:
        s = self._s
        headers: dict[str, Any] = {"content-type": "application/json", "x-request-id": self._headers["x-request-id"]}
        if (authorization := self._headers.get("authorization")) is not None:
            headers["authorization"] = authorization
        try:
            body = orjson.dumps({"ticket": ticket})
            await s.upstream.post_whole(node, "/pd/release", headers, body, s.config.control_timeout_s)
        except (LegFailed, Refused) as error:
            s.metrics.releases.labels("failed").inc()  # the lease expires by itself
            log.warning("request %s: could not release its ticket: %s", self._headers["x-request-id"], error)
            return
        s.metrics.releases.labels("ok").inc()
