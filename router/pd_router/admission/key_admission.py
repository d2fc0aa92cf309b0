"""Lets requests of known clients in: by their key's limits, in turn when the nodes are full, and not if too late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_http.errors import ModelNotFound
from pd_router.admission.fair_queue import FairQueue, Turn
from pd_router.admission.key_limits import KeyLimits, whole_seconds
from pd_router.admission.node_room import MORE_SLOTS, RESERVE, NodeRoom
from pd_router.config import HandoffOrder
from pd_router.errors import KeyRefused, RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_http.reply import HeaderList
    from pd_router.admission.api_keys import ApiKey, KeyRing
    from pd_router.admission.key_limits import KeyUsage
    from pd_router.calls.body import RequestBody
    from pd_router.config import RouterConfig
    from pd_router.nodes.node_table import NodeTable
    from pd_router.policy.route import Route
    from pd_router.records.metrics import RouterMetrics

LOOK_AGAIN_S = 0.02  # while requests wait: nodes may have become free without an answer of this router
SHARE_EVERY_S = 0.1  # between two messages to the other workers of a router
ACTIVE_S = 60.0  # since its last request a key counts among those that share the nodes
# Of --max-queue-s: a request that is expected to wait longer is refused at once. Others may take longer than expected
EXPECTED = 1 / 2
# Of the mean over all keys: a key with fewer requests than that passes prompts that wait at the prefill nodes. With all
# of its share of the slots instead, a greedy key's first 31 prompts (64 slots) passed too.
FAR_LESS = 1 / 8
_FAILED = frozenset({"refused", "failed", "crashed"})  # outcomes of requests that cost their key no tokens
_REASONS = {
    "requests": "this key has used its requests of this minute",
    "tokens": "this key has used its tokens of this minute",
    "concurrency": "this key has as many requests under way as it may",
    "late": "the nodes are busy: the first token would come too late",
    "queue": "the nodes are busy",
}


class AdmittedRequest:
    """One request that was let in, or waits for that. Call `end` exactly once."""

    __slots__ = ("_admission", "_begun_s", "future", "is_inside", "limits", "model", "queued_s", "turn")

    def __init__(self, admission: KeyAdmission, limits: KeyLimits, model: str | None, begun_s: float) -> None:
        self.limits = limits
        self.model = model
        self.turn: Turn[AdmittedRequest]
        self.future: asyncio.Future[None] | None = None  # while it waits
        self.is_inside = False
        self.queued_s = 0.0  # that it has waited
        self._admission = admission
        self._begun_s = begun_s

    def go_in(self) -> None:
        self.is_inside = True
        self.limits.inside += 1
        self._admission.room.take(self.model, self.turn.sequences, self.turn.cost)
        if self.future is not None and not self.future.done():
            self.future.set_result(None)

    def end(self, used: tuple[int, int] | None, outcome: str) -> None:
        """`used`: tokens of prompt and answer, if they are known. `outcome`: as the router counts it."""
        admission, turn = self._admission, self.turn
        del self.turn  # it refers here: a cycle would keep the body until a search for garbage
        if not self.is_inside:  # it is no request either: the nodes had no time for it, not its key
            self.limits.uncount()
        if not self.is_inside or (used is None and outcome in _FAILED):
            used = (0, 0)
        self.limits.end(turn.cost, used, admission.clock() - self._begun_s - self.queued_s)
        if self.is_inside:
            self.limits.inside -= 1
            if used is not None:
                admission.queue.correct(turn.key, turn.weight, sum(used) - turn.cost)
            admission.room.free(self.model, turn.sequences)
            admission.pump()


class KeyAdmission:
    """One per router process."""

    def __init__(self, config: RouterConfig, table: NodeTable, metrics: RouterMetrics, ring: KeyRing) -> None:
        self.clock = table.clock
        self.queue: FairQueue[AdmittedRequest] = FairQueue(lambda turn: turn.item.limits.has_place)
        self.room = NodeRoom(table)
        self._table = table
        self._max_queue = config.max_queue
        self._max_queue_bytes = config.max_queue_bytes
        self._max_queue_s = config.max_queue_s
        self._latest_s = config.slo_ttft_ms / 1000 * config.slo_slack  # 0: none is too late
        self._metrics = metrics
        self._ring = ring
        self._limits: dict[str, KeyLimits] = {}
        self._elsewhere: dict[int, dict[str, int]] = {}  # worker -> key -> requests under way
        self._active, self._counted_s = 1, 0.0  # keys with requests lately
        self._timer: asyncio.TimerHandle | None = None
        metrics.num_queued.set_function(self.queue.__len__)

    # --- keys

    def adopt(self, ring: KeyRing) -> None:
        """Take other keys. Requests under way stay; what keys have used stays used."""
        self._ring = ring
        # Those of a key that is out stay until other processes know that it has no requests any more
        known, limits = ring.by_name, self._limits
        kept = (name for name, one in limits.items() if name in known or one.running or not one.is_reported)
        self._limits = {name: limits[name] for name in kept}
        for name in self._limits.keys() & ring.by_name.keys():
            self._limits[name].configure(ring.by_name[name])
            self._limits[name].elsewhere = self._num_elsewhere(name)

    def find(self, headers: HeaderList) -> KeyLimits:
        """The limits of the key that the request names. Raises KeyRefused."""
        key = self._ring.find(headers)
        if key is None:
            self._metrics.refusals.labels("", "key").inc()
            raise KeyRefused("the request has no API key of this router: authorization: Bearer KEY, or x-api-key: KEY")
        return self.limits_of(key)

    def limits_of(self, key: ApiKey) -> KeyLimits:
        """What the key has used in this process."""
        limits = self._limits.get(key.name)
        if limits is None:
            limits = self._limits[key.name] = KeyLimits(key, self.clock())
            limits.elsewhere = self._num_elsewhere(key.name)
        return limits

    def shape(self, limits: KeyLimits, body: RequestBody) -> None:
        """Set the fields that a key decides: the salt of its tenant, and its priority at nodes.

        Raises InvalidRequest if the client gave one in another type, ModelNotFound for another tenant's adapter.
        """
        self.check_model(limits.key, body.model)
        if "cache_salt" not in body and "priority" not in body:
            body.update(limits.fields)
            return
        salt = limits.key.salted(body.checked("cache_salt", str) or "")
        priority = max(limits.key.priority, body.checked("priority", int) or 0)
        body.put("cache_salt", salt or None)
        body.put("priority", priority or None)

    def check_model(self, key: ApiKey, model: str | None) -> None:
        """Raises ModelNotFound for an adapter that the key may not use, as for one that there is not."""
        if model and key.adapters is not None and model not in key.adapters and self._table.is_adapter(model):
            raise ModelNotFound(f"no node serves the model {model!r}", param="model")

    def let_relay(self, headers: HeaderList, content: bytes) -> None:
        """Admit a small call that is no generation. One without `content` counts as none.

        Raises KeyRefused, RateLimited.
        """
        limits = self.find(headers)
        if content:
            if (refusal := limits.admit(0.0, self.clock())) is not None:
                raise self._refusal(limits, *refusal)
            limits.running -= 1

    # --- other processes of this router

    async def share_usage(self, share: Callable[[KeyUsage], None]) -> None:
        """Call `share` with what keys have used, periodically, until cancelled."""
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            usage = {name: news for name, limits in self._limits.items() if (news := limits.news()) is not None}
            if usage:
                share(usage)

    def receive_usage(self, worker: int, usage: KeyUsage | None) -> None:
        """Count what keys have used in another worker. None: that worker has ended."""
        running = self._elsewhere.setdefault(worker, {})
        if usage is None:
            usage = dict.fromkeys(running, (0, 0.0, 0))
        for name, (requests, tokens, count) in usage.items():
            running[name] = count
            if (key := self._ring.by_name.get(name)) is not None:
                limits = self.limits_of(key)
                limits.take(requests, tokens)
                limits.elsewhere = self._num_elsewhere(name)

    def _num_elsewhere(self, name: str) -> int:
        return sum(running.get(name, 0) for running in self._elsewhere.values())

    # --- requests

    async def enter(self, limits: KeyLimits, body: RequestBody, route: Route) -> AdmittedRequest:
        """Return when the request may go to the nodes. `route`: what would happen now.

        Raises RateLimited.
        """
        key = limits.key
        sequences = 0 if route.order is HandoffOrder.PROMPT else body.num_samples
        num_tokens = route.prompt.tokens_at(route.decodes[0])
        cost = num_tokens + (sequences and sequences * min(limits.mean_output, body.most_output))
        if (refusal := limits.admit(cost, self.clock())) is not None:
            raise self._refusal(limits, *refusal)
        admitted = AdmittedRequest(self, limits, body.model, self.clock())
        admitted.turn = turn = Turn(
            admitted, key.name, key.weight, body.get("priority", int) or 0, cost, sequences, body.num_bytes
        )
        try:
            self._check_late(turn, route)
            if self.queue.has_ready or not limits.has_place or not self._fits(turn):
                await self._wait(turn)
            else:
                self.queue.serve(turn)
                admitted.go_in()
        except BaseException:
            admitted.end(None, "refused")
            raise
        return admitted

    def _check_late(self, turn: Turn[AdmittedRequest], route: Route) -> None:
        """Raises RateLimited if its turn or its first token come too late, until what is before it is through."""
        limits = turn.item.limits
        if not (self._latest_s or len(self.queue)) and limits.has_place:
            return
        turn_s, own = self._wait_s(turn), "" if limits.has_place else "concurrency"
        nodes_s = route.first_token_s(self.clock()) if self._latest_s else None
        if nodes_s is not None and nodes_s + turn_s > self._latest_s:
            raise self._refusal(limits, own or "late", whole_seconds(nodes_s + turn_s))
        if turn_s > EXPECTED * self._max_queue_s:
            raise self._refusal(limits, own or "queue", whole_seconds(turn_s))

    async def _wait(self, turn: Turn[AdmittedRequest]) -> None:
        """Wait for the turn. Raises RateLimited if it does not come in time, or the queue is full of better ones."""
        admitted, begun_s = turn.item, self.clock()
        admitted.future = asyncio.get_running_loop().create_future()
        self.queue.push(turn)
        self.pump()  # the room may be older than 10 ms, or others may wait for what this one does not need
        try:
            while len(self.queue) > self._max_queue or self.queue.num_bytes > self._max_queue_bytes:
                self._send_last_away()
            self._look_again()
            async with asyncio.timeout(self._max_queue_s):
                await admitted.future
        except TimeoutError:
            raise self._later(turn) from None
        finally:
            admitted.future = None  # its exception's traceback refers here: a cycle would keep the body
            self.queue.remove(turn)
            admitted.queued_s = self.clock() - begun_s
            self._metrics.queue_s.observe(admitted.queued_s)

    def _send_last_away(self) -> None:
        """Refuse the request that would be served last."""
        last = self.queue.last()
        self.queue.remove(last)
        if last.item.future is not None and not last.item.future.done():
            last.item.future.set_exception(self._later(last))

    def pump(self) -> None:
        """Let requests in as far as the nodes have room."""
        if self.queue.has_ready:
            self.room.look_again()
        while (turn := self.queue.pop(self._fits)) is not None:
            turn.item.go_in()

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if len(self.queue):
            self._look_again()
            self.pump()

    def _fits(self, turn: Turn[AdmittedRequest]) -> bool:
        """Whether the nodes have room for it. The last places are for keys with less than their share.

        Those with far less need no room in the queue of a prefill node either, where a better priority lets them pass.
        """
        room, num_keys = self.room.of(turn.item.model), self._num_active()
        has_tokens, running = room.tokens > 0, turn.item.limits.running
        if not turn.sequences:  # only its prompt is read: it needs no place at a decode node
            return has_tokens
        sequences = min(turn.sequences, room.slots)
        if room.sequences < sequences:
            return False
        # With few slots and many keys nothing would ever fit but for the last of these
        if has_tokens and (running <= room.slots / num_keys or not self.room.running.get(turn.item.model)):
            return True
        if num_keys == 1:
            return has_tokens
        if running < FAR_LESS * self._num_running() / num_keys:
            return True
        return has_tokens and room.sequences - sequences >= (MORE_SLOTS + RESERVE) * room.slots

    def _num_running(self) -> int:
        """Requests of all keys, those that wait included."""
        return sum(one.running for one in self._limits.values())

    def _num_active(self) -> int:
        now_s = self.clock()
        if now_s >= self._counted_s + 1.0:
            self._counted_s = now_s
            lately = (one.running > 0 or now_s - one.last_s < ACTIVE_S for one in self._limits.values())
            self._active = max(1, sum(lately))  # the key of the turn may have been taken out
        return self._active

    # --- times

    def _wait_s(self, turn: Turn[AdmittedRequest]) -> float:
        """Until its turn comes: the nodes have to read the prompts before it, and to end as many answers."""
        cost, sequences = self.queue.ahead(turn)
        room = self.room.of(turn.item.model)
        reading_s = cost / room.tokens_per_s if room.tokens_per_s else 0.0
        answering_s = sequences * turn.item.limits.mean_s / room.slots if room.slots else 0.0
        return max(reading_s, answering_s, turn.item.limits.place_s())

    def _later(self, turn: Turn[AdmittedRequest]) -> RateLimited:
        limits = turn.item.limits
        reason = "queue" if limits.has_place else "concurrency"
        return self._refusal(limits, reason, whole_seconds(self._wait_s(turn)))

    def _refusal(self, limits: KeyLimits, reason: str, retry_after_s: int) -> RateLimited:
        self._metrics.refusals.labels(limits.key.name, reason).inc()
        return RateLimited(f"{_REASONS[reason]}; try again in {retry_after_s} s", retry_after_s)
