"""A connector with a pool: another connector's handoff, and a StorePool beside it.

The two share no state. Prefill hands a running request's KV to decode through the handoff, because only that is ordered
with the request (first token, chunk by chunk, fenced); what any later request may want again goes through the pool.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pd_connectors.base import (
    API_VERSION,
    CacheDescription,
    Connector,
    ConnectorContext,
    Event,
    LoadDone,
    LoadDrained,
    LoadSpec,
    Pool,
    PublishSpec,
)
from pd_connectors.pool import PoolLimits, StorePool
from pd_connectors.pool_url import read_pool_url
from pd_connectors.port_share import share_port
from pd_connectors.protocol.errors import LoadFailure
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts, SampledToken
from pd_connectors.ranked_pool import RankedPool, RankPool
from pd_connectors.registry import create_connector, rank_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.base import Closes
    from pd_connectors.protocol.errors import LeaseEnd
    from pd_connectors.protocol.ticket import Ticket
    from pd_connectors.rank_port import RankPort
    from pd_connectors.store import KVStore


def pool_address(context: ConnectorContext, default_url: str) -> tuple[str, int]:
    """Host and port of the pool's server: the option `pool_url`, else `default_url`. Raises ConnectorUnavailable."""
    return read_pool_url(str(dict(context.options).get("pool_url") or ""), default_url)


class PooledConnector(Connector):
    """options: `handoff` ("nixl"), the connector that hands requests over; `pool_deadline_s` (5), of one search.

    A subclass takes the context only. On a further rank its instance has that rank's part of the pool.

    open_store: makes a client; called on the threads that will use it. Raises what the handoff's connector raises.
    """

    api_version = API_VERSION
    name = "pooled"

    def __init__(self, context: ConnectorContext, open_store: Callable[[], KVStore]) -> None:
        options = dict(context.options)
        limits = PoolLimits(deadline_s=float(options.get("pool_deadline_s", PoolLimits().deadline_s)))
        self._store_pool = StorePool(context, open_store, limits)
        shares = [share_port(port, 2) for port in context.rank_ports]
        self._pool = RankedPool(self._store_pool, [pool for _, pool in shares])
        name = "none" if context.rank else str(options.get("handoff", "nixl"))  # see `serve_rank`
        ports = tuple(handoff for handoff, _ in shares)
        self._handoff: Connector = create_connector(name, replace(context, rank_ports=ports))
        self._rank_handoff: Closes | None = None
        self._loads: set[str] = set()  # begun at the handoff, and not terminal

    @classmethod
    def serve_rank(cls, context: ConnectorContext, cache: CacheDescription, port: RankPort) -> PooledConnector:
        build: Callable[[ConnectorContext], PooledConnector] = cls
        connector, (handoff, pool) = build(context), share_port(port, 2)
        try:
            connector._store_pool.open(cache)
            RankPool(connector._store_pool, pool)
            handoff.before = connector._store_pool.settle  # no stream orders what the handoff will write
            name = str(dict(context.options).get("handoff", "nixl"))
            connector._rank_handoff = rank_reader(name, context, cache, handoff)
        except BaseException:
            connector.close()
            raise
        return connector

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def control_port(self) -> int:
        return self._handoff.control_port

    # the handoff's

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
        return self._handoff.open_lease(
            request_id, prompt_token_ids, salt, num_samples, hold=hold, sampling_digest=sampling_digest
        )

    def finish_lease(
        self, lease_id: str, first_tokens: tuple[SampledToken, ...], prefill: PrefillFacts = NO_PREFILL
    ) -> None:
        self._handoff.finish_lease(lease_id, first_tokens, prefill)

    def retract(self, lease_id: str) -> int | None:
        return self._handoff.retract(lease_id)

    def end_lease(self, lease_id: str, reason: LeaseEnd) -> None:
        self._handoff.end_lease(lease_id, reason)

    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        self._loads.add(load_id)
        self._handoff.begin_load(load_id, ticket, deadline_s)

    def cancel_load(self, load_id: str, reason: LoadFailure = LoadFailure.CANCELLED) -> None:
        self._handoff.cancel_load(load_id, reason)

    def send_after(self, publishes: Sequence[PublishSpec]) -> None:
        self._handoff.send_after(publishes)

    # both

    def poll(self) -> list[Event]:
        events = self._handoff.poll()
        self._loads.difference_update(event.load_id for event in events if isinstance(event, LoadDone | LoadDrained))
        return events + self._pool.take_events()

    def allow_silence(self, allowed_s: float) -> None:
        self._handoff.allow_silence(allowed_s)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._handoff.set_waker(wake)
        self._pool.set_waker(wake)

    def register_kv_cache(self, cache: CacheDescription) -> None:
        self._handoff.register_kv_cache(cache)
        self._pool.open(cache)

    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        if loads:
            self._pool.settle()  # no stream orders what the handoff or a loading thread will write
            for load in loads:
                if load.load_id not in self._loads:
                    self._pool.load(load)  # the search may have ended, but the load is the pool's and not the handoff's
            self._handoff.recv_before([load for load in loads if load.load_id in self._loads])

    def close(self) -> None:
        try:
            self._pool.close()
        finally:
            self._handoff.close()
            if self._rank_handoff is not None:
                self._rank_handoff.close()

    def stats(self) -> dict[str, float]:
        return {**self._handoff.stats(), **self._pool.stats()}
