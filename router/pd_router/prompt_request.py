"""A request about its prompts alone on its way to one node: no lease, no ticket, no decode node."""

from __future__ import annotations

from pd_connectors.protocol.feed import CHARGE_HEADER
from pd_router.candidates import Candidates
from pd_router.headers import PREFILL_BY
from pd_router.legs import DecodeLeg
from pd_router.liveness_guard import LivenessGuard
from pd_router.node_request import NodeRequest, may_be_tried_again
from pd_router.node_table import Node, Role
from pd_router.prompt_route import PromptRoute
from pd_router.splice import send_answer
from pd_router.upstream import LegFailed


class OneLeg:
    """A streamed answer that no other node goes on with. Implements `FollowingLegs`."""

    def guard(self, node: Node) -> LivenessGuard:
        return LivenessGuard(node, lambda: False)

    async def go_on(self, leg: DecodeLeg, failure: LegFailed) -> None:
        return None


class PromptRequest(NodeRequest[PromptRoute]):
    """A request that no decode node is needed for. Cancelling it closes its leg, and the node stops reading."""

    async def _serve(self) -> None:
        s = self._s
        leg, last = await self._open()
        if leg is None:
            await self._give_up(last, "every node that can read prompts went down; try again later")
            return
        if leg.node.role is Role.DECODE and self.plan.reason != "no-prefill-node":
            self.plan = self.plan.because("prefill-failed")
        self.phase, self._whole = "stream", leg.whole
        self._record.prefill_by = leg.node.node_id
        self._name_route()
        try:
            await send_answer(leg, self._reply, {PREFILL_BY: leg.node}, s.config.idle_timeout_s, OneLeg())
            self._record.reported(leg.report, is_first_node=True)
        except LegFailed as failure:
            self._note("stream", failure)
            self.outcome = "broken"
        finally:
            leg.close()

    async def _open(self) -> tuple[DecodeLeg | None, LegFailed | None]:
        """(a leg that has begun to answer or None, the last failure if a leg failed). All tries share one deadline.

        Raises Refused, NodesDied.
        """
        s, body = self._s, self._body.plain()
        candidates = Candidates(
            self.plan.nodes, self._healthy(*self.plan.roles), self.plan.best, s.config.max_prefill_tries, s.table.clock
        )
        last: LegFailed | None = None
        wait_s = s.config.first_byte_timeout_s if self._body.wants_stream else s.config.response_timeout_s
        ends_at = s.table.clock() + wait_s
        while (node := candidates.take()) is not None:
            charge = self._book(node, self._body.num_bytes)
            self._headers[CHARGE_HEADER] = charge.name
            leg = DecodeLeg(s.upstream, node, charge)
            self._casualties.meet(node)
            now_s = s.table.clock()
            self._record.until(now_s, "plan")
            left_s = max(0.0, ends_at - now_s)
            try:
                with LivenessGuard(node, lambda: candidates.has_next):
                    await leg.open(self._path, self._headers, body, left_s, s.config.idle_timeout_s)
            except LegFailed as failure:
                self._record.until(s.table.clock(), "retry")
                await self._judge("prompt", failure)
                last = failure.with_traceback(None)  # which refers to this frame: a cycle, and it keeps the body
                if not may_be_tried_again(failure):
                    return None, last
                continue
            s.table.answered(node)
            self._record.answered(s.table.clock(), node.node_id)
            return leg, last
        s.metrics.exhausted.labels("prompt").inc()
        return None, last
