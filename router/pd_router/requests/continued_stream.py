"""Finds the node that goes on with a stream when the one that wrote it failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

from pd_connectors.protocol.feed import CHARGE_HEADER, PREFILL_CHARGE_HEADER
from pd_connectors.protocol.text_chain import chain_key
from pd_http.errors import NodesDied
from pd_http.node_answers import FailureKind
from pd_router.calls.headers import REQUEST_ID
from pd_router.nodes.upstream import LegFailed, Refused
from pd_router.policy.charge import charge_for
from pd_router.policy.prompt_facts import prompt_facts
from pd_router.requests.continued_route import choose_resume_node
from pd_router.requests.legs import DecodeLeg
from pd_router.requests.liveness_guard import LivenessGuard
from pd_router.requests.resume_nodes import ResumeNodes, may_continue
from pd_router.requests.stream_record import StreamRecord

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pd_http.frames import Continuation
    from pd_router.calls.body import RequestBody
    from pd_router.calls.headers import Headers
    from pd_router.nodes.node import Node
    from pd_router.requests.continued_route import ContinuedRoute
    from pd_router.requests.node_deaths import NodeDeaths
    from pd_router.requests.services import Services

log = logging.getLogger("pd_router")
LOOK_AGAIN_S = 0.05  # between two looks for a node that came up
# Of each choice. A node that wrote so many is past the place at which the node before it died. A stream that kills
# nodes by its tokens kills the next one there, or within a block of KV.
OUTLIVED_TOKENS = 64


class ContinuedStream:
    """The stream of one request, over all nodes that write it.

    `note` counts a failed leg. `judge` does so too, and raises NodesDied if no other node may be asked.
    """

    def __init__(
        self,
        services: Services,
        path: str,
        body: RequestBody,
        headers: Headers,
        deaths: NodeDeaths,
        note: Callable[[str, LegFailed], None],
        judge: Callable[[str, LegFailed], Awaitable[None]],
    ) -> None:
        self.record = StreamRecord()
        self._s = services
        self._path = path
        self._body = body
        self._headers = headers
        self._id = headers[REQUEST_ID]
        self._deaths = deaths
        self._note = note
        self._judge = judge
        self._resume_nodes = ResumeNodes(self.record)
        self._num_before = 0  # tokens of the record when the newest leg began

    def guard(self, node: Node) -> LivenessGuard:
        """While entered, LegFailed is raised if `node` is judged down and another one can go on."""
        return LivenessGuard(node, lambda: self.record.can_continue and bool(self._candidates()))

    async def go_on(self, leg: DecodeLeg, failure: LegFailed) -> DecodeLeg | None:
        """A leg that has begun after the last byte that the client has. None: the stream cannot be continued.

        `leg` is closed before: a node that comes back must not write beside the next one. Raises NodesDied.
        """
        leg.close()
        count = self._s.metrics.legs.continuations.labels
        if not may_continue(self.record, leg.given_up):
            count("final" if self.record.head is not None else "no_frames").inc()
            self._note("stream", failure)
            return None
        try:
            self._resume_nodes.fail(leg.node, self._deaths.epoch_of(leg.node))
            if self.record.num_tokens > self._num_before:
                self._deaths.ran()
            num_choices = max(self._body.num_samples, self.record.num_choices)
            if self.record.num_tokens - self._num_before >= OUTLIVED_TOKENS * num_choices:
                self._deaths.outlive()
            self._num_before = self.record.num_tokens
            await self._judge("stream", failure)
            next_leg = await self._find()
        except NodesDied as error:
            count(error.code).inc()
            raise
        count("no_node" if next_leg is None else "continued").inc()
        log.warning(
            "request %s: %s goes on with its stream after %d tokens of %s",
            self._id, "no node" if next_leg is None else next_leg.node.node_id,
            self.record.num_tokens, leg.node.node_id,
        )  # fmt: skip
        return next_leg

    async def _find(self) -> DecodeLeg | None:
        """Ask one node after the other. While there is none, wait: nodes that drained or died are started again."""
        clock = self._s.table.clock
        ends_at = clock() + self._s.config.continue_wait_s
        continuation = self.record.continuation()
        prompt = prompt_facts(self._body, self._s.table, chain_key(self._s.key))
        refused: set[Node] = set()  # for now: their queue is full, or they drain
        ask_again_at, pause_s = clock(), LOOK_AGAIN_S
        while True:
            resume_nodes = [node for node in self._candidates() if node not in refused]
            s = self._s
            route = choose_resume_node(s.policy, s.table, self._body.model, prompt, self.record, s.config, resume_nodes)
            if route is not None:
                node = route.node
                try:
                    return await self._open(route, continuation)
                except LegFailed as failure:
                    await self._judge("continue", failure)
                    if failure.kind is FailureKind.REFUSED:
                        refused.add(node)
                    else:
                        self._resume_nodes.fail(node, self._deaths.epoch_of(node))
                except Refused as refusal:
                    self._resume_nodes.fail(node, node.epoch)
                    log.warning("request %s: %s refuses to go on: %s", self._id, node.node_id, refusal)
            elif clock() >= ends_at:
                return None
            else:
                await asyncio.sleep(LOOK_AGAIN_S)
                if refused and clock() >= ask_again_at:
                    refused.clear()
                    ask_again_at, pause_s = clock() + pause_s, 2 * pause_s

    async def _open(self, route: ContinuedRoute, continuation: Continuation) -> DecodeLeg:
        """Raises LegFailed, Refused."""
        s, node = self._s, route.node
        params: dict[str, Any] = {"continuation": continuation}
        with contextlib.ExitStack() as until_begun:
            reading = None
            if route.prefills:
                params |= {"do_remote_prefill": True, "offer": s.signed_offer(route.prefills)}
                first = route.prefills[0]
                charge = charge_for(route.chosen, first, s.table.clock, reads=True, generates=False)
                reading = until_begun.enter_context(charge)
                self._headers[PREFILL_CHARGE_HEADER] = reading.name
            else:
                self._headers.pop(PREFILL_CHARGE_HEADER, None)
            body = self._body.with_transfer(params)  # before the charge, which only the leg releases
            charge = charge_for(route.chosen, node, s.table.clock, reads=reading is None, generates=True)
            self._headers[CHARGE_HEADER] = charge.name
            leg = DecodeLeg(s.upstream, node, charge, self.record)
            self._deaths.meet(node)
            with LivenessGuard(node, lambda: True):
                await leg.open(self._path, self._headers, body, s.config.first_byte_timeout_s, s.config.idle_timeout_s)
            if reading is not None and leg.prefilled_by == route.prefills[0].node_id:
                reading.prefill_done()
        s.table.answered(node)
        return leg

    def _candidates(self) -> list[Node]:
        """Prefill nodes too, where no node that decodes writes the same stream: as while versions are replaced."""
        return self._s.table.answering(self._body.model, self._resume_nodes.among)
