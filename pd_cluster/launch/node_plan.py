"""The nodes that `pd-cluster up` starts, and how it deals the machine's GPUs or cores to them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from pd_cluster.config import CacheConfig
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from pd_cluster.config import NodeConfig

NODE_HOST = "127.0.0.1"
ROLES = ("prefill", "decode", "mixed")
DRAIN_S = 5.0  # default of --drain-s here: short, because Ctrl-C at a keyboard waits for it
GPU_QUERY_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node to start.

    `devices`: its CUDA_VISIBLE_DEVICES; None: the node inherits the variable. `port`: the node's HTTP port on
    NODE_HOST.
    """

    name: str
    role: str
    flags: tuple[str, ...]
    devices: str | None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://{NODE_HOST}:{self.port}"


@dataclass(frozen=True, slots=True)
class RolePlan:
    """How many nodes of a role to start, the ranks (`--tp`) of each, and a rank's host cache; None: that of all.

    `has_disk`: whether the flags of the disk, given for all, hold for this role.
    """

    count: int
    tp: int = 1
    host_cache_gb: float | None = None
    has_disk: bool = True

    def settings(self, config: NodeConfig) -> NodeConfig:
        """Those of the role's nodes, of which `config` are those of all."""
        cache = config.cache if self.host_cache_gb is None else replace(config.cache, host_cache_gb=self.host_cache_gb)
        if not self.has_disk:
            cache = replace(cache, disk_cache_dir="", disk_cache_gb=CacheConfig().disk_cache_gb)
        return replace(config, model=replace(config.model, tp=self.tp), cache=cache)


def role_plans(namespace: argparse.Namespace, default_tp: int) -> dict[str, RolePlan]:
    """The roles of which there are nodes. Raises StartupError when none can decode, or a flag would have no effect."""
    roles: dict[str, RolePlan] = {}
    for role in ROLES:
        count = getattr(namespace, role)
        own = {name: getattr(namespace, f"{role}_{name}", None) for name in ("tp", "host_cache_gb")}
        given = {name: value for name, value in own.items() if value is not None}
        for name, value in () if count else given.items():
            flag = f"--{role}-{name.replace('_', '-')}"
            raise StartupError(f"{flag} {value:g}: there are no {role} nodes (--{role} 0)")
        if count:
            roles[role] = RolePlan(count, **{"tp": default_tp, **given})
    if not roles.keys() & {"decode", "mixed"}:
        raise StartupError("no node can decode: --decode or --mixed must be at least 1")
    host_gb = {
        role: getattr(namespace, "host_cache_gb", 0.0) if plan.host_cache_gb is None else plan.host_cache_gb
        for role, plan in roles.items()
    }
    if not any(host_gb.values()):
        return roles  # and a disk is refused
    return {role: replace(plan, has_disk=host_gb[role] > 0) for role, plan in roles.items()}


def role_problems(
    roles: Mapping[str, RolePlan], config: NodeConfig, find: Callable[[NodeConfig], Iterable[str]]
) -> Iterator[str]:
    """What `find` finds wrong in the settings of each role. Names the roles that have a problem, unless all have it."""
    kinds = dict.fromkeys(replace(plan, count=1) for plan in roles.values())
    found = {kind: list(find(kind.settings(config))) for kind in kinds}
    for problem in dict.fromkeys(chain.from_iterable(found.values())):
        having = [role for role, plan in roles.items() if problem in found[replace(plan, count=1)]]
        yield problem if len(having) == len(roles) else f"{' and '.join(having)} nodes: {problem}"


def plan_nodes(
    roles: Mapping[str, RolePlan], flags: Sequence[str], gpus: Sequence[str], num_cores: int
) -> list[NodePlan]:
    """The nodes to start, each with a GPU for every rank; without GPUs, all ranks divide the cores.

    Every node gets the share of a node on the GPU with most nodes, so that a request fits all nodes or none.
    Raises StartupError when a node has more ranks than there are GPUs.
    """
    nodes = [(role, index, plan.tp) for role, plan in roles.items() for index in range(plan.count)]
    given = {flag.split("=")[0] for flag in flags}
    shared: list[str] = []
    dealt, num_sharing = _deal(nodes, len(gpus)) if gpus else ([], 0)
    if num_sharing > 1 and "--gpu-share" not in given:
        shared.append(f"--gpu-share={1 / num_sharing:.3g}")
    if not gpus and "--num-threads" not in given:
        shared.append(f"--num-threads={max(1, num_cores // sum(tp for _, _, tp in nodes))}")
    if "--drain-s" not in given:
        shared.append(f"--drain-s={DRAIN_S:g}")
    plans: list[NodePlan] = []
    for place, (role, index, tp) in enumerate(nodes):
        name, devices = f"{role}-{index}", ",".join(gpus[rank] for rank in dealt[place]) if gpus else None
        host_gb = roles[role].host_cache_gb
        own = [f"--tp={tp}"] if host_gb is None else [f"--tp={tp}", f"--host-cache-gb={host_gb:g}"]
        # One node a directory; the name is the same at the next start, which finds the files
        every = [
            f"{flag}/{name}" if flag.startswith("--disk-cache-dir=") else flag
            for flag in flags
            if roles[role].has_disk or not flag.startswith("--disk-cache-")
        ]
        plans.append(NodePlan(name, role, (*every, *own, *shared, f"--node-id={name}"), devices))
    return plans


def _deal(nodes: Sequence[tuple[str, int, int]], num_gpus: int) -> tuple[list[range], int]:
    """A run of GPUs for each (role, index, tp), and the number of nodes on the GPU that has most of them.

    Each node gets the first run with the fewest nodes on its fullest GPU: a free run if there is any.
    """
    loads = [0] * num_gpus
    dealt: list[range] = []
    for role, _, tp in nodes:
        if tp > num_gpus:
            raise StartupError(f"--tp {tp}: a {role} node needs {tp} GPUs, and this machine shows {num_gpus}")
        start = min(range(num_gpus - tp + 1), key=lambda first: max(loads[first : first + tp]))
        dealt.append(range(start, start + tp))
        for gpu in dealt[-1]:
            loads[gpu] += 1
    return dealt, max(loads)


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as entries of CUDA_VISIBLE_DEVICES. Does not import torch."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [item.strip() for item in chosen.split(",") if item.strip() not in ("", "-1")]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        listing = subprocess.run(
            [tool, "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True, text=True, check=True, timeout=GPU_QUERY_DEADLINE_S,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []  # no driver: torch finds no GPU in the nodes either
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]
