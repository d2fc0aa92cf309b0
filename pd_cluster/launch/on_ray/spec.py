"""Specification of a cluster on Ray: a YAML file, read into frozen structs and checked before anything starts."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
import yaml

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.launch.command_parser import REMOVED
from pd_cluster.launch.flags import config_from, given_flags
from pd_cluster.launch.model_path import resolve_model
from pd_cluster.launch.preflight import model_problems, setting_problems
from pd_cluster.launch.up_flags import MOST_OF_A_ROLE, PER_NODE
from pd_http.settings import flag_of, in_bounds, refuse
from pd_router.config import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

NODE_ROLES = ("prefill", "decode", "mixed")
ROUTER = "router"
ROLES = (*NODE_ROLES, ROUTER)
DEFAULT_ROUTER_PORT = RouterConfig(start_empty=True).port
# Set by this package. The key is passed in the environment, so that no command line shows it.
_NODE_FIXED = PER_NODE | {"cluster_key_file"}
_ROUTER_FIXED = frozenset(
    {*NODE_ROLES, "start_empty", "cluster_key_file", "host", "listen_fd", "tls_cert", "tls_key", "tls_ca", "tls_name"}
)

FlagValue = str | int | float | bool
Amount = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RoleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Number of processes of a role, the resources that each reserves, and their flags."""

    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_OF_A_ROLE)] = 0
    cpus: Amount = 1.0
    gpus: Amount = 0.0  # below 1: a share of one GPU and of its memory; above: as many ranks (--tp)
    resources: dict[str, Amount] = {}  # Ray's custom resources
    flags: dict[str, FlagValue] = {}  # as on the command line, without dashes in front

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of the placement group. Not empty, because Ray forbids that."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount > 0} or {"CPU": 0.001}


class ClusterSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A cluster, as `read_spec` returns it. `name` tells several clusters on one Ray cluster apart."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")] = "pd"
    address: str = ""  # of the Ray cluster; "": start a Ray on this machine
    placement: Literal["spread", "pack"] = "spread"
    flags: dict[str, FlagValue] = {}  # of every node, whatever its role
    prefill: RoleSpec = RoleSpec()
    decode: RoleSpec = RoleSpec()
    mixed: RoleSpec = RoleSpec()
    router: RoleSpec = RoleSpec(count=1)
    grace_s: Seconds = 30.0  # for the requests of a process that leaves
    start_deadline_s: Seconds = 600.0  # until a process must be ready
    balance: bool = False  # the controller lets roles of nodes follow the load, by the targets in `flags`
    orphan_s: Seconds = 120.0  # a process ends after so long without a controller's question

    def role(self, name: str) -> RoleSpec:
        spec: RoleSpec = getattr(self, name)
        return spec

    @property
    def counts(self) -> dict[str, int]:
        return {role: self.role(role).count for role in ROLES}

    @property
    def targets_s(self) -> tuple[float, float]:
        """Of the first token and of the time per token, that all nodes have. 0: none."""
        given = [self.flags.get(name) for name in ("slo-ttft-ms", "slo-tpot-ms")]
        ttft_s, tpot_s = (value / 1e3 if isinstance(value, float | int) else 0.0 for value in given)
        return ttft_s, tpot_s

    @property
    def cpus(self) -> float:
        return sum(self.role(role).cpus * self.role(role).count for role in ROLES)

    @property
    def host(self) -> str:
        """Address that processes listen on; "": their Ray node's. A Ray started here serves this machine only."""
        return "" if self.address else "127.0.0.1"

    @property
    def router_port(self) -> int:
        return int(self.router.flags.get("port", DEFAULT_ROUTER_PORT))

    def arguments(self, role: str) -> tuple[str, ...]:
        """Flags for a process of `role`: the file's, and those that follow from its resources."""
        if role == ROUTER:
            flags = [f"--{name}={value}" for name, value in self.router.flags.items() if not isinstance(value, bool)]
            return (
                *flags,
                "--start-empty",
                *(() if "drain-s" in self.router.flags else (f"--drain-s={self.grace_s:g}",)),
            )
        spec = self.role(role)
        given = _node_values({**self.flags, **spec.flags})
        values: dict[str, Any] = {"start_deadline_s": self.start_deadline_s, "drain_s": self.grace_s}
        if spec.gpus > 1:
            values["tp"] = int(spec.gpus)
        elif spec.gpus == 0:
            values["num_threads"] = max(1, int(spec.cpus) // given.get("tp", 1))
        elif spec.gpus < 1:  # several nodes share the GPU, and so its memory
            values["gpu_share"] = spec.gpus
        return tuple(given_flags(Namespace(**{**values, **given})))


def read_spec(path: Path) -> ClusterSpec:
    """Read the file. Raises StartupError, which names the file and the place in it."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} is not YAML: {error}") from error
    try:
        return check(msgspec.convert(data or {}, ClusterSpec))
    except (msgspec.ValidationError, StartupError) as error:
        raise _at(str(path), error) from error


def check(spec: ClusterSpec) -> ClusterSpec:
    """Return `spec` if a cluster can be made from it. Raises StartupError, a line for each mistake of all roles.

    Where values of a role contradict each other, its block size and pool are judged once they no longer do.
    """
    roles = {name: spec.role(name) for name in ROLES}
    found = {name: list(_node_problems({**spec.flags, **roles[name].flags}, roles[name])) for name in NODE_ROLES}
    found[ROUTER] = list(_router_problems(spec.router.flags))
    of_resources = (_resource_problems(name, role) for name, role in roles.items())
    refuse(chain(_count_problems(spec.counts), *of_resources, _by_role(found), _balance_problems(spec)))
    return spec


def _balance_problems(spec: ClusterSpec) -> Iterator[str]:
    if spec.balance and not all(spec.targets_s):
        yield "balance: it predicts how many requests meet their targets; set slo-ttft-ms and slo-tpot-ms in flags"


def _resource_problems(name: str, role: RoleSpec) -> Iterator[str]:
    if role.resources.keys() & {"CPU", "GPU"}:
        yield f"{name}: write CPU and GPU as cpus and gpus, not under resources"
    if name in NODE_ROLES and role.gpus > 1 and role.gpus % 1:
        yield f"{name}: gpus must be a share of one GPU or a whole number of them"


def _node_problems(flags: Mapping[str, FlagValue], role: RoleSpec) -> Iterator[str]:
    """What is wrong with the flags of a node, of which all that can be read are checked."""
    values, problems = _typed_values(flags, NodeConfig.sections().values(), _NODE_FIXED)
    yield from problems
    tp = values.get("tp")
    if role.gpus and tp is not None and tp != max(1, role.gpus) and in_bounds(ModelConfig(tp=tp)).tp == tp:
        yield f"tp is {tp}, but gpus is {role.gpus:g}; a rank has one GPU, so leave tp out"
    try:
        yield from setting_problems(config_from(Namespace(**values)))
    except StartupError as error:
        yield from str(error).splitlines()


def _router_problems(flags: Mapping[str, FlagValue]) -> Iterator[str]:
    values, problems = _typed_values(flags, (RouterConfig,), _ROUTER_FIXED)
    yield from problems
    try:
        RouterConfig(start_empty=True, **values)
    except StartupError as error:
        yield from str(error).splitlines()


def _by_role(found: Mapping[str, Collection[str]]) -> Iterator[str]:
    """A line for each of the problems by role. It names the roles that have it: flags of all nodes are in three."""
    for problem in dict.fromkeys(chain.from_iterable(found.values())):
        yield f"flags of {', '.join(role for role in found if problem in found[role])}: {problem}"


def _at(place: str, error: Exception) -> StartupError:
    """The same mistakes, a line each, with their place."""
    return StartupError("\n".join(f"{place}: {line}" for line in str(error).splitlines()))


def check_models(spec: ClusterSpec) -> None:
    """Raise StartupError for what the nodes of this machine would refuse of a model, each after its start."""
    found: dict[str, list[str]] = {}
    for role in filter(spec.counts.get, NODE_ROLES):
        config = config_from(Namespace(**_node_values({**spec.flags, **spec.role(role).flags})))
        found[role] = list(model_problems(config, resolve_model(config.model.model)))
    refuse(_by_role(found))


def check_counts(counts: Mapping[str, int]) -> None:
    """Raise StartupError when these numbers of processes cannot serve a request."""
    refuse(_count_problems(counts))


def _count_problems(counts: Mapping[str, int]) -> Iterator[str]:
    if counts["decode"] + counts["mixed"] == 0:
        yield "no node can decode: decode or mixed must be at least 1"
    if counts[ROUTER] == 0:
        yield "there is no router: its count must be at least 1"


def _node_values(flags: Mapping[str, FlagValue]) -> dict[str, Any]:
    """Field name -> value, of the right type. Raises StartupError."""
    values, problems = _typed_values(flags, NodeConfig.sections().values(), _NODE_FIXED)
    refuse(problems)
    return values


def _typed_values(
    flags: Mapping[str, FlagValue], kinds: Iterable[type], fixed: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """Field name -> value, of the right type, and what is wrong with the other flags, a line each.

    `kinds`: the dataclasses of the flags. `fixed`: names of fields that no file sets.
    """
    known: dict[str, tuple[str, Any, Any]] = {}
    for kind in kinds:
        types = get_type_hints(kind)
        for item in fields(kind):
            if item.name not in fixed:
                known[flag_of(item)] = (item.name, types[item.name], item.metadata.get("choices"))
    values: dict[str, Any] = {}
    problems: list[str] = []
    for flag, value in flags.items():
        if flag not in known:
            gone = REMOVED.get(f"--{flag}")
            problems.append(f"{flag!r} " + (f"was removed: {gone}" if gone else "is unknown or cannot be set here"))
            continue
        name, *form = known[flag]
        try:
            values[name] = _typed(value, *form)
        except StartupError as error:
            problems.append(f"{flag}: {error}")
    return values, problems


def _typed(value: FlagValue, kind: Any, choices: Any) -> Any:
    """Raises StartupError."""
    if kind == tuple[str, ...]:
        return str(value).split()
    try:
        typed = msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise StartupError(str(error)) from error
    if choices and typed not in choices:
        raise StartupError(f"must be one of {', '.join(choices)}, not {typed!r}")
    return typed
