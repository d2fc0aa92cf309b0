"""Every file in tests/deploy/values renders, is valid in three Kubernetes versions, holds together, and has a
golden of how it differs from the defaults. Those in tests/deploy/values/refused are refused with the sentence of their
first line.

REGENERATE_GOLDENS=1 pytest tests/deploy   writes the goldens anew; read the difference before it is committed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python
import pytest
import yaml

from tests.deploy import invariants
from tests.deploy.chart import CHART, EXAMPLES, changed, example_values, one, parser, pods, render
from tests.deploy.custom_resources import check_with_crds
from tests.deploy.test_chart_examples import GOLDENS, INVARIANTS
from tests.deploy.validity import VERSIONS, faults, is_custom
from tests.deploy.value_files import FOLDER, ValueFile, difference, file_names, value_file

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES, REFUSED = file_names(), file_names(FOLDER / "refused")
PROCESSES = ("node", "prefill", "decode", "router", "pool", "check")  # the containers that run `pd-cluster`


@pytest.mark.parametrize("name", FILES)
def test_values_are_valid_in_the_versions_that_they_are_for(name: str) -> None:
    file = value_file(name)
    versions = [version for version in VERSIONS if file.is_for(version)]
    assert versions[-1:] == [VERSIONS[-1]]
    wrong = [(version, fault) for version in versions for found in file.objects for fault in faults(found, version)]
    assert wrong == []


@pytest.mark.skipif("CRD_DIR" not in os.environ, reason="CRD_DIR names no directory of CRDs (*.yaml)")
def test_custom_resources_of_values_are_valid_by_the_projects_own_definitions() -> None:
    crds = [yaml.safe_load(path.read_text()) for path in Path(os.environ["CRD_DIR"]).glob("*.yaml")]
    found = [(name, body) for name in FILES for body in value_file(name).objects if is_custom(body)]
    assert len(found) >= 20
    assert [(name, text) for name, body in found for text in check_with_crds(body, crds)] == []


@pytest.mark.parametrize("name", FILES)
def test_objects_of_values_hold_together(name: str) -> None:
    file = value_file(name)
    wrong = {invariant.__name__: invariant(file.own_objects) for invariant in INVARIANTS}
    wrong["volumes"] = [fault for fault in invariants.volumes(file.objects) if not _is_brought(fault, file)]
    kept = [fault for name, faults in wrong.items() if name not in file.gives_up for fault in faults]
    assert kept == []
    assert {name for name in file.gives_up if not wrong[name]} == set(), "given up, and holds"


def _is_brought(fault: str, file: ValueFile) -> bool:
    missing = fault.removesuffix(" is not there").partition(": ")[2]
    return fault.endswith(" is not there") and file.names(missing)


@pytest.mark.parametrize("name", FILES)
def test_our_command_line_takes_the_containers_of_values(name: str) -> None:
    ours = [container for part in pods(value_file(name).own_objects) for container in part.containers]
    parsed = [parser().parse_args(container["args"]) for container in ours if container["name"] in PROCESSES]
    assert len(parsed) >= 2


@pytest.mark.parametrize("name", FILES)
def test_values_change_what_their_golden_says(name: str) -> None:
    path, text = GOLDENS / "values" / f"{name}.diff", difference(value_file(name).objects)
    if os.environ.get("REGENERATE_GOLDENS"):
        path.write_text(text)
    assert path.read_text() == text, "the chart renders something else: see this module's docstring"
    assert text, "these values change nothing"


def test_every_file_of_values_has_a_golden_and_no_golden_is_left_over() -> None:
    assert sorted(path.stem for path in (GOLDENS / "values").iterdir()) == FILES


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_contradict_are_refused_with_a_sentence(name: str) -> None:
    text = (FOLDER / "refused" / f"{name}.yaml").read_text()
    comment, _, rest = text.partition("\n")
    sentence = comment.removeprefix("# ")
    assert len(sentence) >= 20
    with pytest.raises(helm_python.HelmError) as raised:
        render(yaml.safe_load(rest))
    assert sentence in str(raised.value)


def test_every_value_is_given_by_a_file() -> None:
    """By those here or by the chart's examples. So each is rendered, validated and compared."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    given = [value_file(name).values for name in FILES] + [example_values(name) for name in EXAMPLES]
    given += [{"nodeDefaults": role} for one in given for role in (one.get("roles") or {}).values() if role]
    del values["roles"]
    assert {".".join(path) for path in leaves(values) if not any(has(one, path) for one in given)} == set()


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths to the values that are no maps of further ones. What users name themselves is one value."""
    own = ("annotations", "labels", "podSecurityContext", "containerSecurityContext")
    if not isinstance(value, dict) or not value or path[-1:] in [(name,) for name in own]:
        yield path
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, key))


def has(values: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def test_a_difference_names_what_is_new_gone_and_other() -> None:
    objects = render({"roles": {"prefill": None, "both": {"kind": "mixed", "replicas": 3}}})
    text = difference(objects)
    assert "no StatefulSet/demo-pd-cluster-prefill\n" in text
    assert "StatefulSet/demo-pd-cluster-both (new, as StatefulSet/demo-pd-cluster-decode of defaults)\n" in text
    assert "\n  - spec.replicas: 1\n" in text
    assert "\n  + spec.replicas: 3\n" in text
    assert difference(render()) == ""


def test_a_field_that_is_unknown_is_found_in_every_version() -> None:
    objects = changed(render())
    one(objects, "StatefulSet", "decode")["spec"]["template"]["spec"]["volumez"] = []
    found = [fault for version in VERSIONS for body in objects for fault in faults(body, version)]
    assert len(found) == len(VERSIONS)
    assert all("volumez" in fault for fault in found)


@pytest.mark.parametrize(
    ("first", "versions"),
    [("# Kubernetes 1.31: image volumes", VERSIONS[1:]), ("# Kubernetes is old", VERSIONS), ("a: 1", VERSIONS)],
)
def test_a_file_says_which_kubernetes_it_needs(first: str, versions: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(f"{first}\nb: 1\n")
    assert tuple(version for version in VERSIONS if ValueFile(path).is_for(version)) == versions


@pytest.mark.parametrize(
    ("text", "is_named"),
    [("{name: ca-bundle}", True), ("{name: ca-bundles}", False), ("# a word of ca-bundle\n{}", False)],
)
def test_what_a_user_brings_is_named_in_the_file(text: str, is_named: Any, tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text(text)
    assert ValueFile(path).names("ConfigMap/ca-bundle") is is_named
