"""Values as users have them: the files in tests/deploy/values, what they render, and how that differs from defaults."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from tests.deploy.chart import EXAMPLES, RELEASE, Object, example_values, render, title

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "values"
OURS = "helm.sh/chart"  # the label of every object of the chart: what extraObjects makes may be anything
_NEEDS = re.compile(r"# Kubernetes (\d+)\.(\d+)\b")
_WITHOUT = re.compile(r"^# without (\w+): \S", re.MULTILINE)
_PREFIX = f"{RELEASE}-pd-cluster-"
_Lines: TypeAlias = Counter[str]


@dataclass(frozen=True)
class ValueFile:
    """A file of values. Its first line may say the least Kubernetes version that it needs: `# Kubernetes 1.33: why`.
    A line `# without node_network: why` says which invariant its values give up."""

    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text()

    @cached_property
    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = yaml.load(self.text, yaml.CSafeLoader)
        return values

    @cached_property
    def objects(self) -> list[Object]:
        return render(self.values)

    @property
    def own_objects(self) -> list[Object]:
        return [found for found in self.objects if OURS in found["metadata"].get("labels", {})]

    def is_for(self, version: str) -> bool:
        """Whether it says nothing against this version of Kubernetes."""
        needs = _NEEDS.match(self.text)
        major, minor = (int(part) for part in version.split(".")[:2])
        return needs is None or (major, minor) >= (int(needs[1]), int(needs[2]))

    @property
    def gives_up(self) -> set[str]:
        return set(_WITHOUT.findall(self.text))

    def names(self, missing: str) -> bool:
        """Whether the file names what `Kind/name` is not in the release: its user brings it."""
        name = re.escape(missing.partition("/")[2])
        return re.search(rf"(?<![\w.-]){name}(?![\w.-])", json.dumps(self.values)) is not None


@cache
def value_file(name: str) -> ValueFile:
    return ValueFile(FOLDER / f"{name}.yaml")


def file_names(folder: Path = FOLDER) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


@dataclass(frozen=True)
class _Base:
    """An object to compare with, and where it is from."""

    source: str
    title: str
    lines: tuple[str, ...]

    def named(self, other: str) -> _Lines:
        """Its lines as if it were the object `Kind/name`: names that follow from its own are no difference."""
        mine, theirs = (name.partition("/")[2] for name in (self.title, other))
        parts = {f'component: "{mine.removeprefix(_PREFIX)}"': f'component: "{theirs.removeprefix(_PREFIX)}"'}
        return Counter(replaced(line, {mine: theirs} | parts) for line in self.lines)


def replaced(text: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        text = text.replace(old, new)
    return text


@cache
def _bases() -> list[_Base]:
    sources = {"defaults": render()} | {name: render(example_values(name)) for name in EXAMPLES}
    return [_Base(source, title(found), tuple(lines(found))) for source in sources for found in sources[source]]


def difference(objects: list[Object]) -> str:
    """How the objects differ from those of the defaults, as lines. One that the defaults lack is compared with that of
    its kind in an example that differs least: the examples have goldens of their own."""
    defaults = {base.title: base for base in _bases() if base.source == "defaults"}
    new = {title(found): Counter(lines(found)) for found in objects}
    alike: dict[str, list[str]] = {}  # changes -> the objects that have them
    for name, found in sorted(new.items()):
        base = defaults.get(name) or _nearest(name, found)
        before = base.named(name) if base else Counter()
        said = "" if name in defaults else f" (new, as {base.title} of {base.source})" if base else " (new)"
        text = "".join(f"  {line}\n" for line in _changes(before, found))
        if said or text:
            alike.setdefault(text, []).append(f"{name}{said}\n")
    gone = "".join(f"no {name}\n" for name in sorted(defaults.keys() - new.keys()))
    return gone + "".join("".join(names) + text for text, names in alike.items())


def _changes(before: _Lines, found: _Lines) -> list[str]:
    """Sorted by path, so that the order of keys in a template is no difference."""
    changes = [(line, "-") for line in (before - found).elements()] + [
        (line, "+") for line in (found - before).elements()
    ]
    paths = ((line.partition(": ")[0], sign == "+", line) for line, sign in changes)
    return [f"{'+' if new else '-'} {line.replace('spec.template.spec.', 'pod.', 1)}" for _, new, line in sorted(paths)]


def _nearest(name: str, found: _Lines) -> _Base | None:
    """What is compared with an object that the defaults lack. None: no object of its kind is like it."""
    alike = [base for base in _bases() if base.title.split("/")[0] == name.split("/")[0]]
    nearest = min(alike, key=lambda base: _size(base.named(name), found), default=None)
    return nearest if nearest and _size(nearest.named(name), found) < found.total() else None


def _size(before: _Lines, found: _Lines) -> int:
    return (before - found).total() + (found - before).total()


def lines(found: Object) -> Iterator[str]:
    """The object as `path: value`, without what is random (the key) and what are files of their own."""
    body = dict(found)
    if found["kind"] in ("Secret", "ConfigMap"):
        body |= {part: sorted(found[part]) for part in ("data", "stringData") if part in found}
    if found["kind"] == "PrometheusRule":
        body["spec"] = {"alerts": sum(len(group["rules"]) for group in found["spec"]["groups"])}
    return _flat("", body)


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            if isinstance(inner, dict) and "name" in inner:
                yield from _flat(f"{path}[{inner['name']}]", {key: inner[key] for key in inner if key != "name"})
            else:  # plain values have no places: one that is added moves no other
                yield from _flat(f"{path}[{number if isinstance(inner, dict) else ''}]", inner)
    else:
        yield f"{path}: {json.dumps(value)}"
