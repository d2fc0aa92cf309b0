"""What requests of every order share: the legs that fail, the nodes that die, and the errors that the client gets."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from math import inf
from typing import TYPE_CHECKING

import msgspec
import orjson

from pd_connectors.protocol.feed import CHARGE_HEADER
from pd_http.errors import ABSENT_CODES, ModelNotFound, NodesDied, PdError
from pd_http.node_answers import FailureKind, code_of, usage_in
from pd_http.reply import JSON_TYPE
from pd_router.calls.headers import ROUTE, Headers
from pd_router.config import HandoffOrder
from pd_router.errors import NodeFailed, NoNode
from pd_router.nodes.upstream import Answer, LegFailed, Refused
from pd_router.policy.charge import charge_for
from pd_router.requests.legs import DecodeLeg
from pd_router.requests.liveness_guard import LivenessGuard
from pd_router.requests.node_deaths import NodeDeaths
from pd_router.requests.untried_nodes import Choose, UntriedNodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_router.calls.body import RequestBody
    from pd_router.calls.reply import CallReply
    from pd_router.nodes.node import Node, Role
    from pd_router.policy.route import Route
    from pd_router.records.call_record import CallRecord
    from pd_router.requests.services import Services
    from pd_router.requests.stream_record import StreamRecord

log = logging.getLogger("pd_router")
# With these statuses another node may succeed. Not 504: the request's time is up on every node.
_RETRYABLE = frozenset({429, 500, 502, 503, 529})
# Failures that count against a node. An HTTP answer of any status does not: the request may be its cause, so a client
# could eject every node. Slowness does not either: it is load, and /health judges it.
_ILLNESS = frozenset({FailureKind.CONNECT, FailureKind.BROKEN, FailureKind.BAD_ANSWER})
_JUDGED = frozenset({FailureKind.FROZEN, FailureKind.DIED, FailureKind.LEFT})
# A node that failed a leg like this is not probed when another node dies while it serves the request.
_NOT_SUSPECTED = frozenset(
    {FailureKind.CONNECT, FailureKind.OWN, FailureKind.REFUSED, FailureKind.FROZEN, FailureKind.LEFT}
)


class NodeRequest(ABC):
    """Runs one routed request: `run` sends the client its answer, or raises a PdError before its first byte."""

    def __init__(
        self, services: Services, body: RequestBody, headers: Headers, route: Route, reply: CallReply,
        record: CallRecord,
    ) -> None:  # fmt: skip
        self.route = route
        self.phase = "prefill"  # prefill | decode | stream: for counting clients that leave
        self.outcome = "ok"  # ok | refused | failed | broken
        self._s = services
        self._body = body
        self._headers = headers
        self._reply = reply
        self._record = record
        self._deaths = NodeDeaths(services.config.max_node_deaths)
        self._whole: Answer | None = None  # the answer, if it was not streamed
        self._writer: Node | None = None  # of the answer, or of its end
        self._has_clamped = False

    async def run(self) -> None:
        try:
            await self._serve()
        except Refused as refusal:
            self.outcome = "refused"
            await self._pass_on(refusal.answer, refusal.answer.status)
        except NodesDied as error:
            self._s.metrics.legs.stoppers[error.code].inc()
            self._name_route()
            raise
        except PdError:
            self._name_route()
            raise

    def used(self) -> tuple[int, int] | None:
        """Tokens of prompt and answer, after `run`, as far as the body allows. None: the node does not tell."""
        if (report := self._record.report) is not None:
            return report.num_prompt_tokens, report.num_output_tokens
        return None if (reported := self._reported_usage()) is None else self._allowed(reported)

    def _reported_usage(self) -> tuple[int, int] | None:
        """What an answer without a report tells."""
        return None if self._whole is None else usage_in(self._whole.body)

    def _reported(self, leg: DecodeLeg, *, is_first_node: bool) -> None:
        """Take the report at the end of the answer that `leg` wrote."""
        self._writer = leg.node
        if (report := leg.report) is not None:
            prompt, output = self._allowed((report.num_prompt_tokens, report.num_output_tokens))
            if self._has_clamped or not 0 <= report.num_cached_tokens <= prompt:
                cached = min(max(0, report.num_cached_tokens), prompt)
                report = msgspec.structs.replace(
                    report, num_prompt_tokens=prompt, num_output_tokens=output, num_cached_tokens=cached
                )
            if report.num_output_tokens and not (prompt_facts := self.route.prompt).is_several:
                num_tokens = report.num_output_tokens / prompt_facts.num_sequences
                self._s.table.answers.note(self._record.model, num_tokens, self._body.most_output)
        self._record.reported(report, is_first_node=is_first_node)

    def _allowed(self, reported: tuple[int, int]) -> tuple[int, int]:
        """Within what the body allows: a node's report may be wrong, and the key pays for it."""
        node = self._writer
        used = self._body.allowed(reported, (node.max_model_len if node is not None else None) or inf)
        if used != reported and not self._has_clamped:
            self._has_clamped, name = True, self._record.served_by
            self._s.metrics.reports_clamped.labels(name).inc()
            log.warning(
                "request %s: %s tells %s tokens of prompt and answer; %s are possible",
                self._headers["x-request-id"],
                name,
                reported,
                used,
            )
        return used

    @abstractmethod
    async def _serve(self) -> None:
        """Ask nodes, and send the client its answer. Raises PdError, and Refused before the client's first byte."""

    # --- legs

    def _healthy(self, *roles: Role) -> Callable[[], list[Node]]:
        return lambda: self._s.table.healthy(roles, self._body.model)

    def _untried(self, nodes: Iterable[Node], roles: Iterable[Role], choose: Choose, limit: int) -> UntriedNodes:
        return UntriedNodes(tuple(nodes), self._healthy(*roles), choose, limit, self._s.table.clock)

    async def _first_answer(
        self,
        kind: str,
        nodes: UntriedNodes,
        body: bytes,
        *,
        record: StreamRecord | None = None,
        has_other_way: Callable[[], bool] = lambda: False,
    ) -> tuple[DecodeLeg | None, LegFailed | None]:
        """(a leg that has begun to answer or None, the last failure if a leg failed). All tries share one deadline.

        `kind`: the name of the legs. `record`: of a stream that other nodes may continue. `has_other_way`: whether
        the request can be served even if no node is left. Raises Refused, NodesDied.
        """
        s, is_prompt = self._s, self.route.order is HandoffOrder.PROMPT
        last: LegFailed | None = None
        wait_s = s.config.first_byte_timeout_s if self._body.wants_stream else s.config.response_timeout_s
        ends_at = s.table.clock() + wait_s
        while (node := nodes.take()) is not None:
            if self.route.order is not HandoffOrder.P_FIRST:  # else P's leg has told it
                self._predict(node)
            charge = charge_for(
                self.route, node, s.table.clock, reads=self.route.is_alone, generates=not is_prompt,
                shows_reading=is_prompt or self._body.shows_reading,
            )  # fmt: skip
            self._headers[CHARGE_HEADER] = charge.name
            leg = DecodeLeg(s.upstream, node, charge, record)
            self._deaths.meet(node)
            now_s = s.table.clock()
            self._record.until(now_s, "plan")
            left_s = max(0.0, ends_at - now_s)
            try:
                with LivenessGuard(node, lambda: nodes.has_next or has_other_way()):
                    await leg.open(self._record.path, self._headers, body, left_s, s.config.idle_timeout_s)
            except LegFailed as failure:
                self._record.until(s.table.clock(), "retry")
                await self._judge(kind, failure)
                last = failure.with_traceback(None)  # which refers to this frame: a cycle, and it keeps the body
                if not may_be_tried_again(failure):
                    return None, last
                continue
            s.table.answered(node)
            self._record.answered(s.table.clock(), node.node_id)
            return leg, last
        s.metrics.legs.exhausted.labels(kind).inc()
        return None, last

    async def _judge(self, leg: str, failure: LegFailed) -> None:
        """Count a leg that failed before its first byte. Raises NodesDied if the request must not be tried again."""
        if failure.kind is FailureKind.BROKEN:
            epoch = self._deaths.epoch_of(failure.node)
            if await self._s.upstream.has_died(failure.node, epoch):
                failure.kind = FailureKind.DIED
            elif failure.node.liveness.has_left(epoch):  # no illness: it would eject the boot that follows
                failure.kind = FailureKind.LEFT
        self._note(leg, failure)
        if failure.kind is FailureKind.FROZEN:
            self._deaths.freeze(failure.node)
        if failure.kind in _NOT_SUSPECTED:
            self._deaths.spare(failure.node)
        if failure.kind is FailureKind.DIED:
            self._deaths.add(failure.node)
            # after the first byte the node that writes has the request, and a prefill node that it asks: if that one
            # dies, the writing node goes on alone, so its death does not end a stream
            if self.phase != "stream":
                await self._look_for_others()
        if failure.kind in _JUDGED:
            self._deaths.check()

    async def _look_for_others(self) -> None:
        """Probe the other nodes that had the request, after one died. D-first, only D knows which P it asked."""
        suspects, has_died = self._deaths.suspects, self._s.upstream.has_died
        asked = (has_died(node, epoch, is_silence_death=False) for node, epoch in suspects)
        for (node, _), died in zip(suspects, await asyncio.gather(*asked), strict=True):
            if died:
                self._deaths.add(node)

    def _note(self, leg: str, failure: LegFailed) -> None:
        self._s.metrics.legs.failures.labels(leg, failure.node.node_id, failure.kind.value).inc()
        self._record.failed(f"{leg} {failure.node.node_id} {failure.kind.value}")
        if failure.wait:
            self._s.metrics.legs.waits.labels(failure.wait, failure.node.node_id).inc()
        if failure.kind in _JUDGED:
            self._s.metrics.legs.moves.labels(leg, failure.node.node_id, failure.kind.value).inc()
        if failure.kind in _ILLNESS:
            self._s.table.failed(failure.node, unreachable=failure.kind is FailureKind.CONNECT)
        elif failure.kind is FailureKind.REFUSED:
            self._s.table.answered(failure.node)
        log.warning("request %s: %s leg failed: %s", self._headers["x-request-id"], leg, failure)

    # --- answers without a leg

    async def _give_up(self, last: LegFailed | None, none_left: str) -> None:
        """Give the client the last node's own error. `none_left`: the error if no node was asked.

        Raises NoNode, NodesDied, ModelNotFound; NodeFailed if that node reported none.
        """
        if last is None or last.kind is FailureKind.OWN:
            raise NoNode(none_left if last is None else f"no node could be asked; the last one: {last}")
        if last.is_final:
            raise NodesDied(f"nodes died while they served this request, by the answer of {last.node.node_id}")
        if last.answer is None:
            raise NodeFailed(f"no node could serve the request; the last one: {last}")
        if code_of(last.answer.body) in ABSENT_CODES:
            raise ModelNotFound(f"no node serves the model {self._body.model!r} now", param="model")
        self.outcome = "failed"
        await self._pass_on(last.answer, last.answer.status if last.answer.status in (429, 503, 504, 529) else 502)

    async def _pass_on(self, answer: Answer, status: int) -> None:
        """Answer with a node's error: unchanged if it is JSON."""
        self._name_route()
        try:
            orjson.loads(answer.body)
        except orjson.JSONDecodeError:
            await self._reply.fail(
                NodeFailed(f"a node answered status {answer.status} without a JSON body", status=status)
            )
            return
        retry = [(name.lower(), value) for name, value in answer.headers if name.lower() == b"retry-after"]
        await self._reply.whole(status, [JSON_TYPE, *retry], answer.body)

    def _predict(self, node: Node) -> None:
        """Note when the first token is expected, before `node` is charged with the request."""
        now_s = self._s.table.clock()
        self._record.predict(now_s, self.route.predicted_s(node, now_s))

    def _name_route(self) -> None:
        self._reply.headers[ROUTE] = self.route.text


def may_be_tried_again(failure: LegFailed) -> bool:
    """False if the node says that no retry can succeed, or if the request's time is up."""
    if failure.kind is FailureKind.TIMEOUT or failure.is_final:
        return False
    if failure.answer is None or failure.kind is FailureKind.DIED:
        return True
    return failure.answer.status in _RETRYABLE or code_of(failure.answer.body) in ABSENT_CODES
