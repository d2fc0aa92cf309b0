"""All loads of a reader, live and draining: by id, by peer and by lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_connectors.peer import Peer
    from pd_connectors.protocol.messages import LeaseRef
    from pd_connectors.pull import Pull


class PullTable:
    """The control thread changes it; the gauges may be read by any thread."""

    def __init__(self) -> None:
        self._home: dict[str, Peer] = {}  # load id -> its peer
        self._by_lease: dict[str, list[Pull]] = {}

    def add(self, peer: Peer, pull: Pull) -> None:
        peer.pulls[pull.load_id] = pull
        self._home[pull.load_id] = peer
        self._by_lease.setdefault(pull.ticket.lease.lease_id, []).append(pull)

    def remove(self, peer: Peer, pull: Pull) -> bool:
        """Whether it was there."""
        if peer.pulls.pop(pull.load_id, None) is None:
            return False
        del self._home[pull.load_id]
        same_lease = self._by_lease[pull.ticket.lease.lease_id]
        same_lease.remove(pull)
        if not same_lease:
            del self._by_lease[pull.ticket.lease.lease_id]
        return True

    def peer_of(self, load_id: str) -> Peer | None:
        """None: the load is unknown, or over."""
        return self._home.get(load_id)

    def of_lease(self, lease: LeaseRef) -> list[Pull]:
        """The loads of this lease, of this boot epoch of its owner."""
        return [pull for pull in self._by_lease.get(lease.lease_id, ()) if pull.ticket.lease == lease]

    # gauges

    @property
    def num_loads(self) -> int:
        """The number of live and draining loads."""
        return len(self._home)

    @property
    def num_reading(self) -> int:
        """The number of live loads with some blocks read."""
        return sum(pull.is_live and pull.reads.has_read for pull in self._pulls())

    @property
    def num_quarantined_blocks(self) -> int:
        """The number of blocks of failed loads that a read may still write."""
        return sum(pull.reads.num_blocks_in_flight for pull in self._pulls() if not pull.is_live)

    @property
    def num_quarantined_loads(self) -> int:
        """The number of failed loads that have not drained."""
        return sum(not pull.is_live for pull in self._pulls())

    def _pulls(self) -> list[Pull]:
        found = (peer.pulls.get(load_id) for load_id, peer in list(self._home.items()))
        return [pull for pull in found if pull is not None]
