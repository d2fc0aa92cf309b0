"""The chart as tests see it: rendered by Helm's own SDK into objects, and the pods inside them."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import helm_python
import yaml

from pd_cluster.launch.cli import build_parser

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "pd-cluster"
EXAMPLES = sorted(path.stem for path in (CHART / "examples").glob("*.yaml"))
RELEASE, NAMESPACE = "demo", "llm"

Object: TypeAlias = dict[str, Any]


def load_chart() -> helm_python.Chart:
    """The chart; close it, or use it as a context manager."""
    return helm_python.Chart.load(CHART)


def example_values(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.load((CHART / "examples" / f"{name}.yaml").read_text(), yaml.CSafeLoader)
    return values


@cache
def parser() -> argparse.ArgumentParser:
    return build_parser()


def render(values: dict[str, Any] | None = None, *, name: str = RELEASE) -> list[Object]:
    """Every object of the release, hooks included. Raises helm_python.HelmError for values that the chart refuses."""
    objects: list[Object] = pickle.loads(_rendered(json.dumps(values, sort_keys=True), name))
    return objects


@cache
def _rendered(values: str, name: str) -> bytes:
    """Each values once: a rendering is most of a test's time. The test that two are alike does not come here."""
    with load_chart() as chart:
        return pickle.dumps(objects_of(chart.render(json.loads(values), name=name, namespace=NAMESPACE)))


class _Strict(yaml.CSafeLoader):  # type: ignore[misc]
    """Refuses a key that is there twice, of which YAML's libraries take the last one and API servers none."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise yaml.YAMLError(f"{twice} twice in one mapping{node.start_mark}")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def objects_of(manifests: dict[str, str]) -> list[Object]:
    """The objects in rendered templates, notes left out."""
    texts = (text for path, text in sorted(manifests.items()) if not path.endswith("NOTES.txt"))
    return [found for text in texts for found in pickle.loads(_read(text))]


@cache
def _read(text: str) -> bytes:
    """Most values change few of the templates' texts."""
    return pickle.dumps([found for found in yaml.load_all(text, Loader=_Strict) if found is not None])


def of_kind(objects: Iterable[Object], *kinds: str) -> list[Object]:
    return [found for found in objects if found["kind"] in kinds]


def one(objects: Iterable[Object], kind: str, name: str) -> Object:
    """The object of this kind with a name that ends so."""
    [found] = [found for found in objects if found["kind"] == kind and found["metadata"]["name"].endswith(name)]
    return found


@dataclass(frozen=True)
class PodPart:
    """A pod, or a template of pods. `owner` names its object, for messages."""

    owner: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[dict[str, Any]]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    @property
    def serving(self) -> list[dict[str, Any]]:
        """Those that run all the time."""
        containers: list[dict[str, Any]] = self.spec["containers"]
        return containers

    @property
    def port_names(self) -> set[str]:
        return {port["name"] for container in self.containers for port in container.get("ports", [])}


def title(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def pods(objects: Iterable[Object]) -> Iterator[PodPart]:
    """Pods and pod templates."""
    for found in objects:
        if found["kind"] == "Pod":
            yield PodPart(title(found), found["metadata"].get("labels", {}), found["spec"])
        elif found["kind"] in ("Deployment", "StatefulSet", "Job"):
            template = found["spec"]["template"]
            yield PodPart(title(found), template["metadata"].get("labels", {}), template["spec"])


def flag_of(container: dict[str, Any], name: str) -> str:
    """The value of `--name=value` among a container's arguments. Raises KeyError."""
    for argument in container["args"]:
        if str(argument).startswith(f"--{name}="):
            return str(argument).split("=", 1)[1]
    raise KeyError(f"{container['name']} has no --{name}")


def changed(objects: list[Object]) -> list[Object]:
    """A copy to seed a fault in."""
    return copy.deepcopy(objects)
