"""Nodes of a simulated cluster by name, over the shapes with known steps (`device.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.slo.device import DEVICES, SHAPES
from pd_cluster.errors import StartupError
from pd_cluster.planning.delays import MEASURED
from pd_cluster.planning.device import ScaledDevice
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.simulated_cluster import RoleDevices, SimulatedCluster
from pd_cluster.planning.step_table import packaged_tables

if TYPE_CHECKING:
    from pd_cluster.planning.simulated_node import Rule


_NAME = re.compile(r"(?=.)(?:([1-9]\d*)P)?(?:([1-9]\d*)D)?(?:\+?([1-9]\d*)M)?")


def roles_of(name: str) -> RoleCounts:
    """ "2P1D", "4M" or "1P2D+1M". Raises StartupError."""
    found = _NAME.fullmatch(name)
    roles = RoleCounts(*(int(number or 0) for number in found.groups())) if found else RoleCounts()
    if not roles.decode + roles.mixed:
        raise StartupError(f"{name!r} has no node that decodes, or is not like 2P1D, 4M or 1P2D+1M")
    return roles


@dataclass(frozen=True, slots=True)
class Setting:
    """Nodes of a cluster, each of one GPU; with -TP2 of two."""

    name: str
    roles: RoleCounts
    num_ranks: int = 1

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Raises StartupError."""
        counts, _, ranks = name.partition("-TP")
        num_ranks = int(ranks) if ranks.isdecimal() else 0 if "-TP" in name else 1
        if (SHAPES[0], num_ranks) not in DEVICES:
            raise StartupError(f"setting {name!r}: nodes have one rank, or with -TP2 two")
        return cls(name, roles_of(counts), num_ranks)

    @property
    def num_gpus(self) -> int:
        return sum(self.roles) * self.num_ranks

    def cluster(self, rule: Rule, seed: int, shape: str = SHAPES[0], *, as_planned: float = 0.0) -> SimulatedCluster:
        """`as_planned`: with the packaged step table, of steps so many times as long, and the delays of
        `pd-cluster plan`; 0: not. Raises StartupError.
        """
        device = DEVICES.get((shape, self.num_ranks))
        if as_planned:
            tables = (one for one in packaged_tables().values() if (one.model.name, one.tp) == (shape, self.num_ranks))
            device = next((ScaledDevice(table.device, as_planned) for table in tables), None)
        if device is None:
            raise StartupError(f"no steps of {shape} are known for nodes of {self.num_ranks} ranks")
        return SimulatedCluster(self.roles, rule, seed, RoleDevices.alike(device), MEASURED if as_planned else None)
