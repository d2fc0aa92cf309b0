"""The peer-to-peer connector: an `ProtocolLoop` with a control thread and the real clock.

Three threads touch it. The engine's step loop calls the two halves: lease changes take effect under the lease table's
lock before the call returns, everything about loads is queued. The control thread owns all sockets and the state of
loads, answers Confirm, and sleeps when nothing is due. The transport has a thread of its own for calls that may block.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from pd_connectors.base import API_VERSION, CacheDescription, Connector, ConnectorContext, Event, LoadSpec, PublishSpec
from pd_connectors.protocol.errors import ConnectorUnavailable, LeaseEnd
from pd_connectors.protocol.hashing import prompt_digest
from pd_connectors.protocol.ticket import TICKET_LIFETIME_S, Ticket
from pd_connectors.protocol_loop import ProtocolLoop
from pd_connectors.pull_limits import RENEWALS_PER_TTL, PullLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.channel import Channel
    from pd_connectors.protocol.messages import SampledToken
    from pd_connectors.reader import Reader
    from pd_connectors.transport import Transport

READ_BYTES = 64 << 20  # large enough for full bandwidth (32 MiB is), small enough to share the link fairly

logger = logging.getLogger(__name__)


class PeerToPeerConnector(Connector):
    """Pull over any Transport and Channel, both of which it owns."""

    api_version = API_VERSION
    name = "p2p"

    def __init__(
        self,
        context: ConnectorContext,
        transport: Transport,
        channel: Channel,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = context
        self._transport = transport
        self._channel = channel
        limits = PullLimits(
            renew_every_s=min(context.renew_every_s, context.lease_ttl_s / RENEWALS_PER_TTL),
            silence_s=context.silence_s,
            read_s=context.read_deadline_s,
            confirm_s=context.confirm_deadline_s,
            max_blocks_per_read=max(1, READ_BYTES // context.layout.block_bytes),
        )
        self._exchange = ProtocolLoop(context, transport, channel, clock, limits)
        self._num_blocks = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._death = ""

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
        lease = self._exchange.leases.open(len(prompt_token_ids), hold=hold)
        self._exchange.nudge()  # it may be the next to expire
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

    def finish_lease(self, lease_id: str, first_tokens: tuple[SampledToken, ...], prefill_s: float = 0.0) -> None:
        self._exchange.leases.finish(lease_id, first_tokens, prefill_s)
        self._exchange.nudge()

    def retract(self, lease_id: str) -> int | None:
        generation = self._exchange.leases.retract(lease_id)
        self._exchange.nudge()
        return generation

    def end_lease(self, lease_id: str, reason: LeaseEnd) -> None:
        self._exchange.leases.end(lease_id, reason)
        self._exchange.nudge()

    # scheduler half, as D

    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        def begin(reader: Reader, now: float) -> None:
            reader.begin(load_id, ticket, deadline_s, now)

        self._exchange.submit([begin])

    def cancel_load(self, load_id: str) -> None:
        def cancel(reader: Reader, now: float) -> None:
            reader.cancel(load_id, now)

        self._exchange.submit([cancel])

    def poll(self) -> list[Event]:
        """Raises ConnectorUnavailable when the control thread failed (our own bug): no load would ever end."""
        if self._death:
            raise ConnectorUnavailable(f"the connector's control thread failed: {self._death}")
        return self._exchange.take_events()

    def allow_silence(self, allowed_s: float) -> None:
        self._exchange.allow_silence(allowed_s)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._exchange.set_waker(wake)

    # worker half

    def register_kv_cache(self, cache: CacheDescription) -> None:
        """Raises ConnectorUnavailable when the transport does not start."""
        assert self._thread is None, "the cache is registered once"
        assert cache.layout == self._context.layout, (cache.layout, self._context.layout)
        self._num_blocks = cache.num_blocks
        self._transport.register(cache)
        self._exchange.open()
        self._thread = threading.Thread(target=self._run, name=f"pd-{self.name}-control", daemon=True)
        self._thread.start()

    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        for load in loads:
            for group, run in zip(self._context.layout.groups, load.runs, strict=True):
                assert run.span.stop == group.handed_over(load.num_tokens).stop, load
                assert all(0 <= block_id < self._num_blocks for block_id in run.block_ids), load
        if loads:
            self._exchange.submit([_reserve(load) for load in loads])

    def send_after(self, publishes: Sequence[PublishSpec]) -> None:
        for publish in publishes:
            self._exchange.leases.announce(publish)
        if publishes:
            self._exchange.nudge()

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is None:
            self._exchange.shut_down(self._context.close_deadline_s)
            return
        self._channel.wake()
        self._thread.join(self._context.close_deadline_s)
        if self._thread.is_alive():
            logger.error("the control thread did not end within %g s", self._context.close_deadline_s)

    def stats(self) -> dict[str, float]:
        return self._exchange.stats()

    # the control thread

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._channel.wait(self._exchange.turn())
        except Exception as error:
            logger.exception("the control thread failed; every lease and load ends")
            self._death = repr(error)
        finally:
            self._exchange.shut_down(self._context.close_deadline_s / 2)


def _reserve(load: LoadSpec) -> Callable[[Reader, float], None]:
    return lambda reader, now: reader.reserve(load, now)
