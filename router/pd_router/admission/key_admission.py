"""Lets requests of known clients in: by their key's limits, in turn when the nodes are full, and not if too late."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pd_router.admission.fair_queue import FairQueue, Turn
from pd_router.admission.key_limits import KeyLimits
from pd_router.admission.node_room import MORE_SLOTS, RESERVE, NodeRoom
from pd_router.config import HandoffOrder
from pd_router.errors import KeyRefused, RateLimited

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_http.reply import HeaderList
    from pd_router.admission.api_keys import ApiKey, KeyRing
    from pd_router.body import RequestBody
    from pd_router.choice import RouteChoice
    from pd_router.config import RouterConfig
    from pd_router.metrics import RouterMetrics
    from pd_router.node_table import NodeTable
    from pd_router.prompt_route import PromptRoute
    from pd_router.worker_messages import KeyUsage

LOOK_AGAIN_S = 0.02  # while requests wait: nodes may have become free without an answer of this router
SHARE_EVERY_S = 0.1  # between two messages to the other workers of a router
ACTIVE_S = 60.0  # since its last request a key counts among those that share the nodes
# By which a promised retry may be later than others: what was let in before it took longer than expected
LATER = 2.0
SPACING = 1.25  # of retries, in the time that the nodes need for them: they serve other keys, too
# Of the mean over all keys: a key with fewer requests than that passes prompts that wait at the prefill nodes. With all
# of its share of the slots instead, a greedy key's first 31 prompts (64 slots) passed too.
FAR_LESS = 1 / 8
# The part of the bytes that may wait that held retries get. They exceed the limit of their key: without this bound
# those of one key could keep all other keys out of the queue
MOST_HELD = 1 / 2
_FAILED = frozenset({"refused", "failed", "crashed"})  # outcomes of requests that cost their key no tokens
_REASONS = {
    "requests": "this key has used its requests of this minute",
    "tokens": "this key has used its tokens of this minute",
    "concurrency": "this key has as many requests under way as it may",
    "late": "the nodes are busy: the first token would come too late",
    "queue": "the nodes are busy",
}


class Visit:
    """One request that was let in, or waits for that. Call `end` exactly once."""

    __slots__ = ("_admission", "_begun_s", "content", "future", "is_inside", "limits", "model", "queued_s", "turn")

    def __init__(
        self, admission: KeyAdmission, limits: KeyLimits, model: str | None, content: bytes, begun_s: float
    ) -> None:
        self.limits = limits
        self.model = model
        self.content = content
        self.turn: Turn[Visit]
        self.future: asyncio.Future[None] | None = None  # while it waits
        self.is_inside = False
        self.queued_s = 0.0  # that it has waited
        self._admission = admission
        self._begun_s = begun_s

    def go_in(self) -> None:
        self.is_inside = True
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
            if used is not None:
                admission.queue.correct(turn.key, turn.weight, sum(used) - turn.cost)
            admission.room.free(self.model, turn.sequences)
            admission.pump()


class KeyAdmission:
    """One per router process."""

    def __init__(self, config: RouterConfig, table: NodeTable, metrics: RouterMetrics, ring: KeyRing) -> None:
        self.clock = table.clock
        self.queue: FairQueue[Visit] = FairQueue()
        self.room = NodeRoom(table)
        self._max_queue = config.max_queue
        self._max_queue_bytes = config.max_queue_bytes
        self._num_held = self._held_bytes = 0  # retries that wait for a place of their key, and their bodies
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
        self._limits = {name: limits for name, limits in self._limits.items() if name in ring.by_name}
        for name, limits in self._limits.items():
            limits.configure(ring.by_name[name])

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
        return limits

    def shape(self, limits: KeyLimits, body: RequestBody) -> None:
        """Set the fields that a key decides: the salt of its tenant, and its priority at nodes.

        Raises InvalidRequest if the client gave one in another type.
        """
        if "cache_salt" not in body and "priority" not in body:
            body.update(limits.fields)
            return
        salt = limits.key.salted(body.checked("cache_salt", str) or "")
        priority = max(limits.key.priority, body.checked("priority", int) or 0)
        body.put("cache_salt", salt or None)
        body.put("priority", priority or None)

    def let_relay(self, headers: HeaderList, content: bytes) -> None:
        """Admit a small call that is no generation. One without `content` counts as none.

        Raises KeyRefused, RateLimited.
        """
        limits = self.find(headers)
        if content:
            if (refusal := limits.admit(0.0, lambda: hash(content), self.clock())) is not None:
                reason, seconds = refusal
                raise self._refusal(limits, reason, seconds or limits.refuse(0.0, hash(content), self.clock()))
            limits.running -= 1

    # --- other processes of this router

    async def share_usage(self, share: Callable[[KeyUsage], None]) -> None:
        """Call `share` with what keys have used, periodically, until cancelled."""
        while True:
            await asyncio.sleep(SHARE_EVERY_S)
            usage = {name: news for name, limits in self._limits.items() if (news := limits.news()) is not None}
            if usage:
                share(usage)

    def hear_usage(self, worker: int, usage: KeyUsage | None) -> None:
        """Count what keys have used in another worker. None: that worker has ended."""
        running = self._elsewhere.setdefault(worker, {})
        if usage is None:
            usage = dict.fromkeys(running, (0, 0.0, 0))
        for name, (requests, tokens, count) in usage.items():
            if (key := self._ring.by_name.get(name)) is not None:
                limits = self.limits_of(key)
                limits.take(requests, tokens)
                running[name] = count
                limits.elsewhere = sum(one.get(name, 0) for one in self._elsewhere.values())
                limits.let_held()

    # --- requests

    @property
    def waiting_bytes(self) -> int:
        """Of all bodies that wait here: in turns, and for a place of their key. --max-queue-mb bounds the sum."""
        return self.queue.num_bytes + self._held_bytes

    async def enter(
        self, limits: KeyLimits, body: RequestBody, content: bytes, plan: RouteChoice | PromptRoute
    ) -> Visit:
        """Return when the request may go to the nodes. `plan`: what would happen now. `content`: equal for a retry.

        Raises RateLimited.
        """
        key = limits.key
        sequences = 0 if plan.order is HandoffOrder.PROMPT else body.num_samples
        cost = plan.num_tokens + (sequences and sequences * min(limits.mean_output, body.most_output))
        if (refusal := limits.admit(cost, lambda: hash(content), self.clock())) is not None:
            reason, seconds = refusal
            if seconds:
                raise self._refusal(limits, reason, seconds)
            if not self._may_hold(content):
                raise self._refusal(limits, "queue", limits.refuse(cost, hash(content), self.clock()))
            await self._hold(limits, cost, content)
        visit = Visit(self, limits, body.model, content, self.clock())
        visit.turn = turn = Turn(
            visit, key.name, key.weight, body.get("priority", int) or 0, cost, sequences, len(content)
        )
        try:
            is_promised = self._check_late(turn, plan)
            if len(self.queue) or not self._fits(turn):
                await self._wait(turn, is_promised=is_promised)
            else:
                self.queue.serve(turn)
                visit.go_in()
        except BaseException:
            visit.end(None, "refused")
            raise
        return visit

    def _may_hold(self, content: bytes) -> bool:
        """Whether a retry may wait for a place of its key. A key may have promised places to MAX_PROMISES of them."""
        if self._num_held >= self._max_queue or self.waiting_bytes + len(content) > self._max_queue_bytes:
            return False
        return self._held_bytes + len(content) <= MOST_HELD * self._max_queue_bytes

    async def _hold(self, limits: KeyLimits, cost: float, content: bytes) -> None:
        """Wait until a request of the key ends, behind other retries. Raises RateLimited if that takes too long."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def go() -> None:
            if not admitted.done():
                admitted.set_result(None)

        held = limits.hold(cost, go)
        self._num_held += 1
        self._held_bytes += len(content)
        try:
            async with asyncio.timeout(min(limits.hold_s, self._max_queue_s)):
                await admitted
        except TimeoutError:
            if limits.release(held):
                seconds = limits.refuse(cost, hash(content), self.clock())
                raise self._refusal(limits, "concurrency", seconds) from None
        except BaseException:  # the client left
            if not limits.release(held):
                limits.uncount()
                limits.end(cost, (0, 0), 0.0)
            raise
        finally:
            self._num_held -= 1
            self._held_bytes -= len(content)

    def _check_late(self, turn: Turn[Visit], plan: RouteChoice | PromptRoute) -> bool:
        """Whether the request was told to come now. Raises RateLimited if its turn or its first token come too late.

        A retry that was told to come now may be later than others, so that what takes longer than expected does not
        refuse it again.
        """
        late = turn.item.limits.late
        if not (self._latest_s or len(late) or len(self.queue)):
            return False
        now_s = self.clock()
        late.lapse(now_s)
        is_promised = bool(len(late)) and late.claim(hash(turn.item.content), now_s)
        turn_s, kept_s = self._wait_s(turn), self._kept_s(turn)
        nodes_s = plan.first_token_s(now_s) if self._latest_s else None
        patience, before_s = (LATER, 0.0) if is_promised else (1.0, kept_s)
        if nodes_s is not None and nodes_s + turn_s + before_s > self._latest_s * patience:
            raise self._later(turn, nodes_s + turn_s + kept_s - self._latest_s, "late")
        if turn_s + before_s > (limit_s := self._max_queue_s / LATER) * patience:
            raise self._later(turn, turn_s + kept_s - limit_s, "queue")
        return is_promised

    async def _wait(self, turn: Turn[Visit], *, is_promised: bool) -> None:
        """Wait for the turn. Raises RateLimited if it does not come in time, or the queue is full of better ones."""
        visit, begun_s = turn.item, self.clock()
        visit.future = asyncio.get_running_loop().create_future()
        self.queue.push(turn)
        self.pump()  # the room may be older than 10 ms, or others may wait for what this one does not need
        try:
            if len(self.queue) > self._max_queue * (LATER if is_promised else 1):
                self._send_last_away()
            while self.waiting_bytes > self._max_queue_bytes:
                self._send_last_away()
            self._look_again()
            async with asyncio.timeout(self._max_queue_s):
                await visit.future
        except TimeoutError:
            raise self._later(turn, self._wait_s(turn), "queue") from None
        finally:
            visit.future = None  # its exception's traceback refers here: a cycle would keep the body
            self.queue.remove(turn)
            visit.queued_s = self.clock() - begun_s
            self._metrics.queue_s.observe(visit.queued_s)

    def _send_last_away(self) -> None:
        """Refuse the request that would be served last."""
        last = self.queue.last()
        self.queue.remove(last)
        if last.item.future is not None and not last.item.future.done():
            last.item.future.set_exception(self._later(last, self._wait_s(last), "queue"))

    def pump(self) -> None:
        """Let requests in as far as the nodes have room."""
        if len(self.queue):
            self.room.look_again()
        while len(self.queue) and (turn := self.queue.pop(self._fits)) is not None:
            turn.item.go_in()

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if len(self.queue):
            self._look_again()
            self.pump()

    def _fits(self, turn: Turn[Visit]) -> bool:
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

    def _wait_s(self, turn: Turn[Visit]) -> float:
        """Until its turn comes: the nodes have to read the prompts before it, and to end as many answers."""
        cost, sequences = self.queue.ahead(turn)
        room = self.room.of(turn.item.model)
        reading_s = cost / room.tokens_per_s if room.tokens_per_s else 0.0
        return max(reading_s, sequences * turn.item.limits.mean_s / room.slots if room.slots else 0.0)

    def _kept_s(self, turn: Turn[Visit]) -> float:
        """For which the nodes are promised to retries of this key."""
        late, room = turn.item.limits.late, self.room.of(turn.item.model)
        reading_s = late.tokens / room.tokens_per_s if room.tokens_per_s else 0.0
        answering_s = len(late) * turn.item.limits.mean_s / room.slots if room.slots else 0.0
        return SPACING * max(reading_s, answering_s)

    def _later(self, turn: Turn[Visit], wait_s: float, reason: str) -> RateLimited:
        """The refusal of a request for which the nodes have no time before `wait_s`."""
        limits = turn.item.limits
        return self._refusal(
            limits, reason, limits.late.promise(hash(turn.item.content), self.clock(), wait_s, turn.cost)
        )

    def _refusal(self, limits: KeyLimits, reason: str, retry_after_s: int) -> RateLimited:
        self._metrics.refusals.labels(limits.key.name, reason).inc()
        return RateLimited(f"{_REASONS[reason]}; try again in {retry_after_s} s", retry_after_s)
