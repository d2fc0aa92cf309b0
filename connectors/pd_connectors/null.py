"""The connector `none`: for a node that neither hands KV out nor takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_connectors.base import (
    API_VERSION,
    CacheDescription,
    Connector,
    ConnectorContext,
    Event,
    LoadDrained,
    LoadFailed,
    LoadSpec,
    PublishSpec,
)
from pd_connectors.protocol.errors import ConnectorUnavailable, LeaseEnd, LoadFailure
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts, SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_connectors.protocol.ticket import Ticket
    from pd_connectors.rank_port import RankPort


class NullConnector(Connector):
    """`open_lease` raises ConnectorUnavailable; every load fails as REJECTED."""

    api_version = API_VERSION
    name = "none"

    def __init__(self, context: ConnectorContext) -> None:
        self._events: list[Event] = []
        self._wake: Callable[[], None] = lambda: None
        self._num_rejected = 0

    @classmethod
    def serve_rank(cls, context: ConnectorContext, cache: CacheDescription, port: RankPort) -> None:
        return None

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
        raise ConnectorUnavailable("this node runs with connector 'none': it hands no KV out")

    def finish_lease(
        self, lease_id: str, first_tokens: tuple[SampledToken, ...], prefill: PrefillFacts = NO_PREFILL
    ) -> None:
        """Does nothing: this connector has no leases."""

    def retract(self, lease_id: str) -> int | None:
        return None

    def end_lease(self, lease_id: str, reason: LeaseEnd) -> None:
        """Does nothing: this connector has no leases."""

    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        detail = "this node runs with connector 'none': it takes no KV over"
        self._events += [LoadFailed(load_id, LoadFailure.REJECTED, detail), LoadDrained(load_id)]
        self._num_rejected += 1
        self._wake()

    def cancel_load(self, load_id: str, reason: LoadFailure = LoadFailure.CANCELLED) -> None:
        """Does nothing: the load has failed already."""

    def poll(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def register_kv_cache(self, cache: CacheDescription) -> None:
        """The cache is never read by a peer."""

    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        assert not loads, "every load has failed before"

    def send_after(self, publishes: Sequence[PublishSpec]) -> None:
        assert not publishes, "there is no lease"

    def close(self) -> None:
        """Does nothing: this connector holds no resources."""

    def stats(self) -> dict[str, float]:
        return {f"loads_failed_total|reason={LoadFailure.REJECTED}": float(self._num_rejected)}
