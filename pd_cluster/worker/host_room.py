"""How much host memory may still be taken: what the machine has, and what the process's control groups allow."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Left to the rest of the node and the machine: a rank with a GPU takes up to 2 GB beside its blocks
HOST_RESERVE_BYTES = 4_000_000_000
# By version of control groups: folder, files of limit and use, and the names of file pages in memory.stat. These count
# as use and are given up under pressure: after a start they hold the model's weights
_V1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
_V2 = ("", "memory.max", "memory.current", ("inactive_file", "active_file"))


def free_host_bytes(root: Path = Path("/")) -> int:
    """The least of what the machine has available and what each control group above this process leaves."""
    machine = _table(root / "proc/meminfo").get("MemAvailable:", 0) * 1024
    return min([machine, *_group_rooms(root)])


def host_problem(flag: str, wanted_gb: float, num_ranks: int, free_bytes: int) -> str:
    """Why `num_ranks` ranks of this machine cannot take so much each; "" when they can, or want nothing."""
    wanted = wanted_gb * 1e9 * num_ranks
    if not wanted or wanted + HOST_RESERVE_BYTES <= free_bytes:
        return ""
    each = f" for each of {num_ranks} ranks" if num_ranks > 1 else ""
    room = max(0.0, free_bytes - HOST_RESERVE_BYTES) / num_ranks / 1e9
    return (
        f"{flag} {wanted_gb:g}{each}: this machine, or its control group, has {free_bytes / 1e9:.1f} GB free, and "
        f"{HOST_RESERVE_BYTES / 1e9:g} GB of it stay free; give at most {room:.1f}"
    )


def _group_rooms(root: Path) -> Iterator[int]:
    """Bytes left in each control group with a limit, of this process and above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        folder, limit_name, use_name, reclaimable = _V1 if controllers else _V2
        top = root / "sys/fs/cgroup" / folder
        own = top / path.lstrip("/")
        # In a container the path may be the host's, and what is mounted is the container's own group
        for group in [own, *(above for above in own.parents if above.is_relative_to(top))]:
            limit, use = _text(group / limit_name).strip(), _text(group / use_name).strip()
            if limit.isdecimal() and use.isdecimal():
                stat = _table(group / "memory.stat")
                yield max(0, int(limit) - int(use) + sum(stat.get(name, 0) for name in reclaimable))


def _table(path: Path) -> dict[str, int]:
    """The lines of a file: a name, a number, perhaps a unit."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
