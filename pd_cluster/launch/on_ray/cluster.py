"""The controller's interface to Ray. Only this file and `connect.py` import Ray. Its calls block for milliseconds."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import PdError
from pd_cluster.launch.on_ray.policy import RayNode
from pd_cluster.launch.on_ray.unit import Place, Secret, Unit, UnitPlan, UnitReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_cluster.launch.on_ray.policy import Placement

CONTROLLER = "controller"
MODE = "RAY_AUTH_MODE"
NODE_ID_LABEL = "ray.io/node-id"
_LEDGERS = b"pd-cluster"  # namespace of Ray's key-value store


class Ledger(msgspec.Struct, frozen=True):
    """State that a restarted controller needs: the goal, and the number of the last unit.

    `boot`: a random id that `up` draws, so that nothing is taken over from an earlier cluster of the same name.
    """

    boot: str
    counts: dict[str, int]
    closing: bool = False
    serial: int = 0


class UnitDied(PdError):
    """The actor is dead, and so is every process that it started."""


class UnitActor:
    """`Unit` as a Ray actor. All methods are coroutines, which makes Ray run them on one event loop."""

    async def __init__(self, plan: UnitPlan, key: Secret) -> None:  # type: ignore[misc]  # Ray awaits it
        import ray
        from ray.util.placement_group import get_current_placement_group, remove_placement_group

        context = ray.get_runtime_context()
        gpus = tuple(str(gpu) for gpu in context.get_accelerator_ids().get("GPU", ()))
        place = Place(context.get_node_id(), plan.host or ray.util.get_node_ip_address(), gpus)
        # the end of the reservation also ends this actor
        self._unit = Unit(plan, key, place, lambda: remove_placement_group(get_current_placement_group()))
        self._unit.begin()

    async def report(self) -> UnitReport:
        return self._unit.report()

    async def leave(self) -> None:
        self._unit.leave()

    async def stop(self, grace_s: float) -> None:
        self._unit.stop(grace_s)


class RayCluster:
    """The units of one cluster, by name. Each is a detached actor in a detached placement group of one bundle.

    Each unit has a group of its own, because Ray frees only whole groups. Use it from one thread or event loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._handles: dict[str, Any] = {}
        self._buried: set[str] = set()

    @property
    def namespace(self) -> str:
        return namespace_of(self._name)

    @property
    def here(self) -> str:
        """The Ray node of this process."""
        import ray

        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def ray_nodes(self) -> list[RayNode]:
        import ray

        return [
            RayNode(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
            for node in ray.nodes()
            if node["Alive"]
        ]

    def find(self) -> list[str]:
        """Names of the units that exist, including those of an earlier controller."""
        import ray

        for name in ray.util.list_named_actors():
            if name == CONTROLLER or name in self._handles:
                continue
            with contextlib.suppress(ValueError):  # it died meanwhile
                handle = ray.get_actor(name, namespace=self.namespace)
                if name in self._buried:
                    ray.kill(handle)  # `discard` could not reach it
                else:
                    self._handles[name] = handle
        return list(self._handles)

    def create(self, plan: UnitPlan, key: Secret, bundle: Mapping[str, float], choice: Placement) -> None:
        """Reserve resources and create an actor there. Ray does both when it has room."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        avoid = [{NODE_ID_LABEL: f"!in({','.join(choice.avoid)})"}] if choice.avoid else None
        group = placement_group(
            [dict(bundle)],
            strategy="STRICT_PACK",  # required by the soft target; the group has one bundle
            name=self._group_name(plan.name),
            lifetime="detached",
            _soft_target_node_id=choice.target,
            bundle_label_selector=avoid,
        )
        self._handles[plan.name] = (
            ray.remote(UnitActor)
            .options(
                name=plan.name,
                namespace=self.namespace,
                lifetime="detached",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                resources={name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")},
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote(plan, key)
        )

    def discard(self, name: str) -> None:
        """Remove a unit's actor and reservation in any state. The process ends with its actor."""
        import ray
        from ray.util.placement_group import get_placement_group, remove_placement_group

        self._buried.add(name)
        handle = self._handles.pop(name, None)
        if handle is not None:
            ray.kill(handle)
        with contextlib.suppress(ValueError):  # already removed
            remove_placement_group(get_placement_group(self._group_name(name)))

    def stray_groups(self) -> list[str]:
        """Names of units that have a placement group and no actor."""
        from ray.util.placement_group import placement_group_table

        prefix = self._group_name("")
        groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
        names = [group["name"].removeprefix(prefix) for group in groups if group["name"].startswith(prefix)]
        return [name for name in names if name not in self._handles]

    async def report(self, name: str) -> UnitReport:
        """Wait until the unit's actor reports. The wait has no deadline here; the caller sets one.

        Raises UnitDied when the actor has died, TimeoutError when Ray cannot reach the actor now.
        """
        from ray.exceptions import ActorDiedError, RayError, RayTaskError

        handle = self._handles.get(name)
        if handle is None:
            raise UnitDied("Ray could not create its actor")
        try:
            report: UnitReport = await handle.report.remote()
        except (ActorDiedError, RayTaskError) as error:
            raise UnitDied(reason(error)) from error
        except RayError as error:
            raise TimeoutError from error  # Ray cannot reach it now
        return report

    def leave(self, name: str) -> None:
        self._handles[name].leave.remote()

    def stop(self, name: str, grace_s: float) -> None:
        self._handles[name].stop.remote(grace_s)

    def save(self, ledger: Ledger) -> None:
        from ray.experimental.internal_kv import _internal_kv_put

        _internal_kv_put(self._name.encode(), msgspec.json.encode(ledger), namespace=_LEDGERS)

    def load(self) -> Ledger | None:
        from ray.experimental.internal_kv import _internal_kv_get

        data = _internal_kv_get(self._name.encode(), namespace=_LEDGERS)
        return None if data is None else msgspec.json.decode(data, type=Ledger)

    def forget(self) -> None:
        from ray.experimental.internal_kv import _internal_kv_del

        _internal_kv_del(self._name.encode(), namespace=_LEDGERS)

    def _group_name(self, unit: str) -> str:
        return f"{self.namespace}/{unit}"


def reason(error: BaseException) -> str:
    """The last line of a Ray error, which names the cause."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()


def namespace_of(name: str) -> str:
    """The Ray namespace of the cluster called `name`."""
    return f"pd-cluster/{name}"


def authentication_mode() -> str:
    """Whether this process of Ray demands a token: "token", or another word if it does not."""
    return os.environ.get(MODE, "")
