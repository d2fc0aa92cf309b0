"""The peer-to-peer connector: leases as P, loads as D, over any Transport and Channel.

Three threads touch it. The engine's step loop calls the two halves: lease changes take effect under the lease table's
lock before the call returns, everything about loads is queued. The control thread owns all sockets and the state of
loads, answers Confirm, and sleeps when nothing is due. The transport has a thread of its own for calls that may block.

`register_kv_cache` starts the control thread. The simulation in the tests calls `open` and `turn` instead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from pd_connectors.base import (
    API_VERSION,
    CacheDescription,
    Connector,
    ConnectorContext,
    Event,
    LoadDone,
    LoadFailed,
    LoadSpec,
    PublishSpec,
)
from pd_connectors.channel import Channel, FromOwner, FromReader, OwnerLost
from pd_connectors.lease import LeaseTable
from pd_connectors.owner import Owner
from pd_connectors.protocol.clock import PatientClock
from pd_connectors.protocol.errors import ConnectorUnavailable, LeaseEnd, LoadFailure
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.layout import KVKind
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts, SampledToken
from pd_connectors.protocol.ticket import TICKET_LIFETIME_S, Ticket
from pd_connectors.pull_limits import RENEWALS_PER_TTL, PullLimits
from pd_connectors.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.transport import Transport

READ_BYTES = 64 << 20  # of one rank; large enough for full bandwidth (32 MiB is), small enough to share the link fairly
MAX_SLEEP_S = 60.0
# A step loop that does not turn for so long is frozen, unless it allowed itself more: as its API process judges it
SILENCE_S = 2.5
MAX_ROUNDS = 64  # of reading all sockets, before timers get their turn

logger = logging.getLogger(__name__)


class StepLoopWatch:
    """Whether the engine's step loop still turns, for the control thread, which runs on when it hangs."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turned_at: float | None = None  # None: the step loop has not begun
        self._allowed_s = SILENCE_S

    def turned(self) -> None:
        """Note that the step loop has called `poll`."""
        self._turned_at = self._clock()

    def allow_silence(self, allowed_s: float) -> None:
        """See SchedulerHalf.allow_silence."""
        self._allowed_s = max(SILENCE_S, allowed_s)
        self.turned()

    @property
    def is_frozen(self) -> bool:
        return self._turned_at is not None and self._clock() - self._turned_at >= self._allowed_s


class LoadCounters:
    """How the loads of one connector ended. Counted by the control thread, read by any."""

    def __init__(self, num_groups: int) -> None:
        self.failed = dict.fromkeys(LoadFailure, 0)
        self.done = 0
        self.group_bytes = (0,) * num_groups  # bytes read, by group of the layout
        self.transfer_s = 0.0

    def count(self, event: Event) -> None:
        """Count a load's end. Other events change nothing."""
        match event:
            case LoadFailed(_, reason, _):
                self.failed[reason] += 1
            case LoadDone():
                self.done += 1
                self.group_bytes = tuple(a + b for a, b in zip(self.group_bytes, event.group_bytes, strict=True))
                self.transfer_s += event.transfer_s

    def stats(self) -> dict[str, float]:
        """See Connector.stats. The sum over all groups has a name of its own, so that no query counts bytes twice."""
        return {
            "kv_transfer_bytes_total": float(sum(self.group_bytes)),
            **{f"kv_group_transfer_bytes_total|group={i}": float(n) for i, n in enumerate(self.group_bytes)},
            "kv_transfer_seconds_total": self.transfer_s,
            "loads_done_total": float(self.done),
            **{f"loads_failed_total|reason={reason}": float(n) for reason, n in self.failed.items()},
        }


class PeerToPeerConnector(Connector):
    """Owns its transport and its channel. `limits`: None takes those of the context."""

    api_version = API_VERSION
    name = "p2p"

    def __init__(
        self,
        context: ConnectorContext,
        transport: Transport,
        channel: Channel,
        *,
        clock: Callable[[], float] = time.monotonic,
        limits: PullLimits | None = None,
    ) -> None:
        self._context = context
        self._transport = transport
        self._channel = channel
        self._clock = PatientClock(clock, context.lease_ttl_s / RENEWALS_PER_TTL)
        self.leases = LeaseTable(context.engine_id, context.epoch, context.layout, context.lease_ttl_s, self._clock)
        self._commands: deque[Callable[[Reader, float], None]] = deque()
        self._events: deque[Event] = deque()
        self._counters = LoadCounters(len(context.layout.groups))
        self._step_loop = StepLoopWatch(self._clock)
        self._owner = Owner(context, self.leases, channel.reply, lambda: self._step_loop.is_frozen)
        self._reader = Reader(context, limits or _limits(context), transport, channel.ask, self._emit, channel.forget)
        self._wake_engine: Callable[[], None] = _no_waker
        self._num_blocks: tuple[int, ...] = ()  # by group
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._death = ""
        transport.set_waker(channel.wake)

    @property
    def control_port(self) -> int:
        return self._channel.port

    # scheduler half, as P

    def open_lease(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        salt: str,
        num_samples: int,
        *,
        hold: bool,
        sampling_digest: bytes = b"",
    ) -> Ticket:
        context = self._context
        lease = self.leases.open(len(prompt_token_ids), hold=hold)
        self._channel.wake()  # it may be the next to expire
        return Ticket(
            request_id=request_id,
            lease=lease,
            generation=0,
            expires_at_s=time.time() + TICKET_LIFETIME_S,
            fingerprint=context.fingerprint,
            layout=context.layout,
            prompt_digest=prompt_digest(prompt_token_ids, salt),
            num_tokens=len(prompt_token_ids),
            num_samples=num_samples,
            host=context.host,
            port=self.control_port,
            sampling_digest=sampling_digest,
        )

    def finish_lease(
        self, lease_id: str, first_tokens: tuple[SampledToken, ...], prefill: PrefillFacts = NO_PREFILL
    ) -> None:
        self.leases.finish(lease_id, first_tokens, prefill)
        self._channel.wake()

    def retract(self, lease_id: str) -> int | None:
        generation = self.leases.retract(lease_id)
        self._channel.wake()
        return generation

    def end_lease(self, lease_id: str, reason: LeaseEnd) -> None:
        self.leases.end(lease_id, reason)
        self._channel.wake()

    # scheduler half, as D

    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        self.submit(lambda reader, now: reader.begin(load_id, ticket, deadline_s, now))

    def cancel_load(self, load_id: str, reason: LoadFailure = LoadFailure.CANCELLED) -> None:
        self.submit(lambda reader, now: reader.cancel(load_id, now, reason))

    def poll(self) -> list[Event]:
        """Raises ConnectorUnavailable when the control thread failed (our own bug): no load would ever end."""
        if self._death:
            raise ConnectorUnavailable(f"the connector's control thread failed: {self._death}")
        self._step_loop.turned()
        events: list[Event] = list(self.leases.take_ended())
        while self._events:
            event = self._events.popleft()
            if isinstance(event, LoadDone):
                event = replace(event, steps=replace(event.steps, wake_s=self._clock() - event.done_at))
            events.append(event)
        return events

    def allow_silence(self, allowed_s: float) -> None:
        self._step_loop.allow_silence(allowed_s)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake_engine = wake

    def submit(self, *commands: Callable[[Reader, float], None]) -> None:
        """Have the control thread apply these to the reader's half."""
        self._commands.extend(commands)
        self._channel.wake()

    # worker half

    def register_kv_cache(self, cache: CacheDescription) -> None:
        """Raises ConnectorUnavailable when the transport does not start."""
        assert self._thread is None, "the cache is registered once"
        assert cache.layout == self._context.layout, (cache.layout, self._context.layout)
        self.open(cache)
        self._thread = threading.Thread(target=self._run, name=f"pd-{self.name}-control", daemon=True)
        self._thread.start()

    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            groups = zip(self._context.layout.groups, self._num_blocks, load.runs, strict=False)
            assert len(load.runs) >= len(self._context.layout.required), load
            for group, num_blocks, run in groups:
                needed = group.handed_over(load.num_tokens)
                assert needed.start <= run.first_block, load
                assert run.span.stop == needed.stop, load
                assert all(0 <= block_id < num_blocks for block_id in run.block_ids), load
        if loads:
            self.submit(*(_reserve(load) for load in loads))

    def send_after(self, publishes: Sequence[PublishSpec]) -> None:
        for publish in publishes:
            self.leases.announce(publish)
        if publishes:
            self._channel.wake()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is None:
            self._shut_down(self._context.close_deadline_s)
            return
        self._channel.wake()
        self._thread.join(self._context.close_deadline_s)
        if self._thread.is_alive():
            logger.error("the control thread did not end within %g s", self._context.close_deadline_s)

    def stats(self) -> dict[str, float]:
        reader, links = self._reader, self._reader.links
        return {
            **self._counters.stats(),
            "loads_open": float(reader.loads.num_loads),
            "loads_reading": float(reader.loads.num_reading),
            "leases_open": float(len(self.leases)),
            "quarantined_loads": float(reader.loads.num_quarantined_loads),
            "quarantined_blocks": float(reader.loads.num_quarantined_blocks),
            **self._channel.stats(),
            **{
                f"kv_peer_bytes_per_second|peer={peer},memory={links.memory}": speed
                for peer, speed in links.speeds().items()
            },
            **{
                f"kv_peer_slow|peer={peer},memory={links.memory}": float(is_slow)
                for peer, is_slow in links.are_slow().items()
            },
        }

    # the control thread

    def open(self, cache: CacheDescription) -> None:
        """Make the cache readable and answer greetings from now on. Raises ConnectorUnavailable."""
        self._num_blocks = tuple(tensor.shape[0] for tensor in cache.tensors)
        self._reader.links.memory = cache.tensors[0].device.type if cache.tensors else ""
        self._transport.register(cache)
        self._owner.open(self._transport.describe())

    def turn(self) -> float:
        """Do all that can be done now. Returns how many seconds to sleep at most before the next turn.

        Everything that has arrived is read before anything expires.
        """
        self._clock.resume()
        reader = self._reader
        while self._commands:
            self._commands.popleft()(reader, self._clock())
        for completion in self._transport.poll():
            reader.on_completion(completion, self._clock())
        has_more = self._receive()
        reader.tick(self._clock())
        next_expiry = self.leases.expire()
        self._owner.push()
        if self._events or self.leases.has_ended:
            self._wake_engine()
        next_turn = min(next_expiry, reader.next_timer(), self._clock() + MAX_SLEEP_S)
        sleep_s = 0.0 if has_more or self._commands else max(0.0, next_turn - self._clock())
        self._clock.sleep(sleep_s)
        return sleep_s

    def _receive(self) -> bool:
        """Handle the messages that have arrived. True: some are left, so that the timers get their turn."""
        for _ in range(MAX_ROUNDS):
            incoming = self._channel.receive()
            if not incoming:
                return False
            for item in incoming:
                match item:
                    case FromReader(reader, message):
                        self._owner.on_message(reader, message)
                    case FromOwner(owner, reply):
                        self._reader.on_message(owner, reply, self._clock())
                    case OwnerLost(owner):
                        self._reader.on_lost(owner, self._clock())
        return True

    def _emit(self, event: Event) -> None:
        self._counters.count(event)
        self._events.append(event)

    def _shut_down(self, deadline_s: float) -> None:
        """End every lease and load, tell the peers, and free transport and channel."""
        self.leases.end_all(LeaseEnd.REVOKED)
        self._reader.cancel_all(self._clock())
        self._owner.push()
        self._channel.close()
        self._transport.close(deadline_s)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._channel.wait(self.turn())
        except Exception as error:
            logger.exception("the control thread failed; every lease and load ends")
            self._death = repr(error)
        finally:
            self._shut_down(self._context.close_deadline_s / 2)


def _limits(context: ConnectorContext) -> PullLimits:
    # Without the one state of a load: 77 MB of Qwen3-Next, beside which a read would have a block of 1.6 MB
    layout = context.layout
    paged = [group for group in layout.groups if group.kind is not KVKind.STATE] or layout.groups
    paged_bytes = sum(group.rank_bytes(layout.tp_size) for group in paged)
    return PullLimits(
        renew_every_s=min(context.renew_every_s, context.lease_ttl_s / RENEWALS_PER_TTL),
        silence_s=context.silence_s,
        read_s=context.read_deadline_s,
        confirm_s=context.confirm_deadline_s,
        max_blocks_per_read=max(1, READ_BYTES // paged_bytes),
    )


def _reserve(load: LoadSpec) -> Callable[[Reader, float], None]:
    return lambda reader, now: reader.reserve(load, now)


def _no_waker() -> None:
    """The waker until the engine sets its own: its step loop does not sleep yet."""
