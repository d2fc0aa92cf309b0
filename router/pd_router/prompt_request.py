"""A request about its prompts alone on its way to one node: no lease, no ticket, no decode node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_router.candidates import NO_PREFILL_NODE
from pd_router.headers import PREFILL_BY
from pd_router.liveness_guard import LivenessGuard
from pd_router.node_request import NodeRequest
from pd_router.node_table import READERS, Node, Role
from pd_router.splice import send_answer
from pd_router.upstream import LegFailed

if TYPE_CHECKING:
    from pd_router.legs import DecodeLeg


class OneLeg:
    """A streamed answer that no other node goes on with. Implements `FollowingLegs`."""

    def guard(self, node: Node) -> LivenessGuard:
        return LivenessGuard(node, lambda: False)

    async def go_on(self, leg: DecodeLeg, failure: LegFailed) -> None:
        return None


class PromptRequest(NodeRequest):
    """A request that no decode node is needed for. Cancelling it closes its leg, and the node stops reading."""

    async def _serve(self) -> None:
        s = self._s
        leg, last = await self._open()
        if leg is None:
            await self._give_up(last, "every node that can read prompts went down; try again later")
            return
        if leg.node.role is Role.DECODE and self.plan.reason != NO_PREFILL_NODE:
            self.plan = self.plan.because("prefill-failed")
        self.phase, self._whole, self._writer = "stream", leg.whole, leg.node
        self._record.prefill_by = leg.node.node_id
        self._name_route()
        try:
            await send_answer(leg, self._reply, {PREFILL_BY: leg.node}, s.config.idle_timeout_s, OneLeg())
            self._reported(leg, is_first_node=True)
        except LegFailed as failure:
            self._note("stream", failure)
            self.outcome = "broken"
        finally:
            leg.close()

    async def _open(self) -> tuple[DecodeLeg | None, LegFailed | None]:
        """See `_first_answer`."""
        config = self._s.config
        may_all = self.plan.reason == NO_PREFILL_NODE or config.on_prefill_failure == "local"
        roles = tuple(Role) if may_all else READERS
        nodes = self._untried(self.plan.decodes, roles, self.plan.best, config.max_prefill_tries)
        return await self._first_answer("prompt", nodes, self._body.plain())
