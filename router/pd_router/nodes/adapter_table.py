"""The adapters of the cluster, as the nodes' feeds tell them: the newest record of each name."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pd_connectors.protocol.adapters import IN_HOST, MAX_RECORDS, ON_FILE, AdapterRecord, newer, trim

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pd_connectors.protocol.adapters import AdapterState
    from pd_connectors.protocol.feed import NodeLoad

# Until a request's adapter can be used, by tier: a copy to the device, and the files before it (8B, rank 16: 84 MB)
LOAD_S = (0.0, 0.002, 0.3)
FREE_BITS = 16  # of a stamp, drawn: two routers in one millisecond make two stamps


class AdapterTable:
    """Records by name."""

    def __init__(self) -> None:
        self._records: dict[str, AdapterRecord] = {}
        self._ended = set[str]()  # names of which it has known a meaning that is another now, or none
        self._forgotten = 0  # the highest stamp of such a name that is not among the records any more

    def learn(self, record: AdapterRecord) -> bool:
        """Keep the record if it is the newest of its name, and there are not too many. -> Whether it is kept."""
        may_add = len(self._records) < 2 * MAX_RECORDS and not self._is_forgotten(record)
        is_kept = newer(self._records, record) and (record.name in self._records or may_add)
        if is_kept:
            if self.find(record.name) is not None:
                self._ended.add(record.name)
            self._records[record.name] = record
            highest = trim(self._records)
            # Else a router that has just started would take names that it has not heard of yet for forgotten ones
            if highest and (gone := self._ended - self._records.keys()):
                self._ended -= gone
                self._forgotten = max(self._forgotten, highest)
        return is_kept

    def _is_forgotten(self, record: AdapterRecord) -> bool:
        """Of a node that was away when the name was unloaded, and 1,000 others after it."""
        return record.is_live and 0 < record.stamp <= self._forgotten and record.name not in self._records

    @property
    def records(self) -> list[AdapterRecord]:
        """All, with those of names that were unloaded."""
        return list(self._records.values())

    def find(self, name: str | None) -> AdapterRecord | None:
        """The record of a name that means an adapter now."""
        record = self._records.get(name or "")
        return record if record is not None and record.is_live else None

    def is_unloaded(self, name: str) -> bool:
        """Whether the name means no adapter any more, whatever nodes say that have not been told."""
        record = self._records.get(name)
        return record is not None and not record.is_live

    def seen_stamp(self, name: str) -> int:
        """Of the newest that this router knows of the name; 0: nothing."""
        record = self._records.get(name)
        return self._forgotten if record is None else record.stamp

    def next_stamp(self, now_s: float) -> int:
        """Higher than that of each record. `now_s`: wall clock."""
        known = max([record.stamp for record in self._records.values()] + [self._forgotten]) >> FREE_BITS
        return (max(int(now_s * 1000), known + 1) << FREE_BITS) + secrets.randbits(FREE_BITS)

    def lacking(self, adapters: Mapping[str, AdapterState]) -> Iterator[AdapterRecord]:
        """What a node with these has to be told. Names of a command line are that node's own."""
        for record in self._records.values():
            told = adapters.get(record.name)
            if record.stamp and (told.record.stamp < record.stamp if told else record.is_live):
                yield record
        for state in adapters.values():
            if self._is_forgotten(state.record):
                yield AdapterRecord(state.record.name, stamp=state.record.stamp + 1)


def load_s(state: AdapterState, load: NodeLoad | None = None) -> float:
    """Until the node that tells this can use the adapter. `load`: of the node, which may have measured files."""
    tier, read_s = min(max(0, state.tier), ON_FILE), 0.0 if load is None else load.adapter_s
    return LOAD_S[IN_HOST] + read_s if tier == ON_FILE and read_s > 0.0 else LOAD_S[tier]
