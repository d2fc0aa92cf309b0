"""What nodes and routers tell each other about adapters (LoRA): one record for each name.

Of two records of a name the one with the higher stamp counts, at every node and router: so the order in which they
arrive does not matter, nor how often.
"""

from __future__ import annotations

import msgspec

# Tiers, of which each takes longer to use an adapter from than the one before
ON_DEVICE, IN_HOST, ON_FILE = 0, 1, 2
LEVELS = ("device", "host", "file")
MAX_RECORDS = 1000  # of a node, and of a router
MAX_PATH_CHARS = 4096


class AdapterRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a name means."""

    name: str
    path: str = ""  # as the order gives it, below a node's --lora-dir
    digest: str = ""  # of the files; "": the name was unloaded
    stamp: int = 0  # higher is newer; 0: of a node's command line, so it is that node's own

    @property
    def is_live(self) -> bool:
        return bool(self.digest)


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """A record as a node's feed tells it."""

    record: AdapterRecord
    tier: int = ON_FILE


def newer(records: dict[str, AdapterRecord], record: AdapterRecord) -> bool:
    """Whether `record` is newer than the one of its name, or the first one."""
    known = records.get(record.name)
    return known is None or record.stamp > known.stamp


def trim(records: dict[str, AdapterRecord]) -> int:
    """Forget the oldest unloaded names where there are more than MAX_RECORDS. -> the highest stamp of these, or 0."""
    excess, highest = len(records) - MAX_RECORDS, 0
    for record in sorted(records.values(), key=lambda one: (one.is_live, one.stamp))[: max(0, excess)]:
        if not record.is_live:
            del records[record.name]
            highest = record.stamp
    return highest
