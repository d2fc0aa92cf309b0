"""Nodes of a simulated cluster by name, over the shapes with known steps (`device.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.slo.device import DEVICES, SHAPES
from pd_cluster.errors import StartupError
from pd_cluster.planning.role_counts import RoleCounts
from pd_cluster.planning.simulated_cluster import RoleDevices, SimulatedCluster

if TYPE_CHECKING:
    from pd_cluster.planning.simulated_node import Rule

_NAME = re.compile(r"(?:(?P<prefills>[1-9]\d*)P(?P<decodes>[1-9]\d*)D|(?P<mixed>[1-9]\d*)M)(?:-TP(?P<ranks>[1-9]\d*))?")


@dataclass(frozen=True, slots=True)
class Setting:
    """Nodes of a cluster: NPMD or NM, each of one GPU; with -TP2 of two."""

    name: str
    num_prefills: int
    num_decodes: int  # or mixed ones
    num_ranks: int = 1

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Raises StartupError."""
        found = _NAME.fullmatch(name)
        num_ranks = int(found["ranks"] or 1) if found else 0
        if found is None or (SHAPES[0], num_ranks) not in DEVICES:
            raise StartupError(f"setting {name!r} is not like 2P1D or 3M, with -TP2 for nodes of two ranks")
        return cls(name, int(found["prefills"] or 0), int(found["decodes"] or found["mixed"]), num_ranks)

    @property
    def num_gpus(self) -> int:
        return (self.num_prefills + self.num_decodes) * self.num_ranks

    @property
    def roles(self) -> RoleCounts:
        has_prefills = self.num_prefills > 0
        return RoleCounts(self.num_prefills, self.num_decodes * has_prefills, self.num_decodes * (not has_prefills))

    def cluster(self, rule: Rule, seed: int, shape: str = SHAPES[0]) -> SimulatedCluster:
        """Raises StartupError."""
        device = DEVICES.get((shape, self.num_ranks))
        if device is None:
            raise StartupError(f"no steps of {shape} are known for nodes of {self.num_ranks} ranks")
        return SimulatedCluster(self.roles, rule, seed, RoleDevices.alike(device))
