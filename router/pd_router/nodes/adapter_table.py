"""The adapters of the cluster, as the nodes' feeds tell them: the newest record of each name."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pd_connectors.protocol.adapters import MAX_RECORDS, AdapterRecord, newer, trim

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pd_connectors.protocol.adapters import AdapterState

# Until a request's adapter can be used, by tier: a copy to the device, and the files before it (8B, rank 16: 84 MB)
LOAD_S = (0.0, 0.002, 0.3)
FREE_BITS = 16  # of a stamp, drawn: two routers in one millisecond make two stamps


class AdapterTable:
    """Records by name."""

    def __init__(self) -> None:
        self._records: dict[str, AdapterRecord] = {}

    def learn(self, record: AdapterRecord) -> None:
        """Keep the record if it is the newest of its name, and there are not too many."""
        if newer(self._records, record) and (record.name in self._records or len(self._records) < 2 * MAX_RECORDS):
            self._records[record.name] = record
            trim(self._records)

    @property
    def records(self) -> list[AdapterRecord]:
        """All, with those of names that were unloaded."""
        return list(self._records.values())

    def find(self, name: str | None) -> AdapterRecord | None:
        """The record of a name that means an adapter now."""
        record = self._records.get(name or "")
        return record if record is not None and record.is_live else None

    def next_stamp(self, now_s: float) -> int:
        """Higher than that of each record. `now_s`: wall clock."""
        known = max((record.stamp for record in self._records.values()), default=0) >> FREE_BITS
        return (max(int(now_s * 1000), known + 1) << FREE_BITS) + secrets.randbits(FREE_BITS)

    def lacking(self, adapters: Mapping[str, AdapterState]) -> Iterator[AdapterRecord]:
        """What a node with these has to be told. Names of a command line are that node's own."""
        for record in self._records.values():
            told = adapters.get(record.name)
            if record.stamp and (told.record.stamp < record.stamp if told else record.is_live):
                yield record


def load_s(state: AdapterState) -> float:
    """Until the node that tells this can use the adapter."""
    return LOAD_S[min(max(0, state.tier), len(LOAD_S) - 1)]
