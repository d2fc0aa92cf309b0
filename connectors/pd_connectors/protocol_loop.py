"""A peer-to-peer connector without its thread: the owner's half, the reader's half, and what joins them to the engine.

`PeerToPeerConnector` gives it a thread and the real clock; the simulation in the tests turns it by hand.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from pd_connectors.base import LoadDone
from pd_connectors.channel import Channel, FromOwner, FromReader, OwnerLost
from pd_connectors.lease import LeaseTable
from pd_connectors.owner import Owner
from pd_connectors.protocol.clock import PatientClock
from pd_connectors.protocol.errors import LeaseEnd
from pd_connectors.pull_limits import RENEWALS_PER_TTL, PullLimits
from pd_connectors.reader import Reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.base import ConnectorContext, Event
    from pd_connectors.transport import Transport

MAX_SLEEP_S = 60.0
SILENCE_S = 3.0  # a step loop that does not turn for so long is frozen, unless it allowed itself more
MAX_ROUNDS = 64  # of reading all sockets, before timers get their turn


class StepLoopWatch:
    """Whether the engine's step loop still turns, as seen from the control thread, which lives on when it does not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turned_at: float | None = None  # None: it has not begun
        self._allowed_s = SILENCE_S

    def turned(self) -> None:
        """The step loop has called."""
        self._turned_at = self._clock()

    def allow_silence(self, allowed_s: float) -> None:
        """See SchedulerHalf.allow_silence."""
        self._allowed_s = max(SILENCE_S, allowed_s)
        self.turned()

    @property
    def is_frozen(self) -> bool:
        return self._turned_at is not None and self._clock() - self._turned_at >= self._allowed_s


class ProtocolLoop:
    """`leases`, `submit`, `take_events` and `stats` are for any thread; `turn` and the rest for the control thread."""

    def __init__(
        self,
        context: ConnectorContext,
        transport: Transport,
        channel: Channel,
        clock: Callable[[], float],
        limits: PullLimits,
    ) -> None:
        self._clock = PatientClock(clock, context.lease_ttl_s / RENEWALS_PER_TTL)
        self.leases = LeaseTable(context.engine_id, context.epoch, context.layout, context.lease_ttl_s, self._clock)
        self._transport = transport
        self._channel = channel
        self._commands: deque[Callable[[Reader, float], None]] = deque()
        self._events: deque[Event] = deque()
        self._step_loop = StepLoopWatch(self._clock)
        self._owner = Owner(context, self.leases, channel.reply, lambda: self._step_loop.is_frozen)
        self._reader = Reader(context, limits, transport, channel.ask, self._events.append, channel.forget)
        self._wake_engine: Callable[[], None] = _no_waker
        transport.set_waker(channel.wake)

    def open(self) -> None:
        """The transport knows the cache: greet readers from now on."""
        self._owner.open(self._transport.describe())

    # any thread

    def submit(self, commands: Sequence[Callable[[Reader, float], None]]) -> None:
        """Have the control thread apply these to the reader's half."""
        self._commands.extend(commands)
        self._channel.wake()

    def nudge(self) -> None:
        """The lease table has changed."""
        self._channel.wake()

    def take_events(self) -> list[Event]:
        """See SchedulerHalf.poll."""
        self._step_loop.turned()
        events: list[Event] = list(self.leases.take_ended())
        while self._events:
            event = self._events.popleft()
            if isinstance(event, LoadDone):
                event = replace(event, steps=replace(event.steps, wake_s=self._clock() - event.done_at))
            events.append(event)
        return events

    def allow_silence(self, allowed_s: float) -> None:
        """See SchedulerHalf.allow_silence."""
        self._step_loop.allow_silence(allowed_s)

    def set_waker(self, wake: Callable[[], None]) -> None:
        """See SchedulerHalf.set_waker."""
        self._wake_engine = wake

    def stats(self) -> dict[str, float]:
        """See Connector.stats."""
        reader = self._reader
        return {
            **reader.counters.stats(),
            "loads_open": float(reader.num_loads),
            "loads_reading": float(reader.num_reading),
            "leases_open": float(len(self.leases)),
            "quarantined_loads": float(reader.num_quarantined_loads),
            "quarantined_blocks": float(reader.num_quarantined_blocks),
            **self._channel.stats(),
        }

    # the control thread

    def turn(self) -> float:
        """Do all that can be done now. Returns how many seconds to sleep at most before the next turn.

        Everything that has arrived is heard before anything expires.
        """
        self._clock.resume()
        reader = self._reader
        while self._commands:
            self._commands.popleft()(reader, self._clock())
        for completion in self._transport.poll():
            reader.on_completion(completion, self._clock())
        has_more = self._hear()
        reader.tick(self._clock())
        next_expiry = self.leases.expire()
        self._owner.push()
        if self._events or self.leases.has_ended:
            self._wake_engine()
        next_turn = min(next_expiry, reader.next_timer(), self._clock() + MAX_SLEEP_S)
        sleep_s = 0.0 if has_more or self._commands else max(0.0, next_turn - self._clock())
        self._clock.sleep(sleep_s)
        return sleep_s

    def _hear(self) -> bool:
        """Handle what has arrived. True: a flood of messages was cut off, so that the timers get their turn."""
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

    def shut_down(self, deadline_s: float) -> None:
        """End every lease and load, tell the peers, and free transport and channel."""
        self.leases.end_all(LeaseEnd.REVOKED)
        self._reader.cancel_all(self._clock())
        self._owner.push()
        self._channel.close()
        self._transport.close(deadline_s)


def _no_waker() -> None:
    """The waker until the engine sets its own: its step loop does not sleep yet."""
