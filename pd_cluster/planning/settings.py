"""Settings of a cluster that a number of GPUs has room for. Pure."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from pd_cluster.planning.role_counts import RoleCounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MOST_NODES = 12  # of a role: all numbers up to it are tried, else every second or third


class RankCounts(NamedTuple):
    """GPUs of each node of a role."""

    prefill: int = 1
    decode: int = 1
    mixed: int = 1


class PlannedSetting(NamedTuple):
    roles: RoleCounts
    ranks: RankCounts

    @property
    def num_gpus(self) -> int:
        return sum(number * ranks for number, ranks in zip(self.roles, self.ranks, strict=True))

    @property
    def is_replicas(self) -> bool:
        return not self.roles.prefill + self.roles.decode

    @property
    def name(self) -> str:
        """2P1D; ranks of more than one GPU as in 1P1D (TP 2/1)."""
        used = [ranks for number, ranks in zip(self.roles, self.ranks, strict=True) if number]
        return self.roles.name + (f" (TP {'/'.join(map(str, used))})" if max(used) > 1 else "")


def settings_of(num_gpus: int, ranks: Sequence[int], per_host: int) -> list[PlannedSetting]:
    """Those that leave no room for a further node of theirs: pairs, replicas, and a few of both together.

    With targets a decode node is a mixed one, but for its name: beside decode nodes, mixed ones have other ranks.
    """
    found = dict.fromkeys(
        setting
        for kinds in product(ranks, repeat=3)
        for setting in _of_kinds(num_gpus, RankCounts(*kinds))
        if fits_hosts(setting, num_gpus, per_host)
    )
    return list(found)


def _of_kinds(num_gpus: int, ranks: RankCounts) -> Iterator[PlannedSetting]:
    step = -(-(num_gpus // min(ranks)) // MOST_NODES)
    for mixed in range(0, num_gpus // ranks.mixed + 1, step if num_gpus <= 8 else 4 * step):
        rest = num_gpus - mixed * ranks.mixed
        for prefill in range(1 if rest else 0, rest // ranks.prefill + 1, step):
            decode = (rest - prefill * ranks.prefill) // ranks.decode
            used = (prefill * ranks.prefill + decode * ranks.decode, rest)
            if decode and (not mixed or ranks.mixed != ranks.decode) and used[1] - used[0] < min(ranks):
                yield _plain(RoleCounts(prefill, decode, mixed), ranks)
    if num_gpus % ranks.mixed == 0:
        yield _plain(RoleCounts(mixed=num_gpus // ranks.mixed), ranks)


def _plain(roles: RoleCounts, ranks: RankCounts) -> PlannedSetting:
    """RankCounts of roles without a node are those of one: else settings that are equal would differ."""
    return PlannedSetting(
        roles, RankCounts(*(each if number else 1 for number, each in zip(roles, ranks, strict=True)))
    )


def fits_hosts(setting: PlannedSetting, num_gpus: int, per_host: int) -> bool:
    """Whether each node has a host: the largest nodes first, each on the first host with room."""
    free = [per_host] * (num_gpus // per_host) + [num_gpus % per_host]
    sizes = (each for number, each in zip(setting.roles, setting.ranks, strict=True) for _ in range(number))
    for size in sorted(sizes, reverse=True):
        at = next((at for at, room in enumerate(free) if room >= size), None)
        if at is None:
            return False
        free[at] -= size
    return True
