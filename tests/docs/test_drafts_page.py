"""The page on drafts: its settings reach decode nodes and no others, in the chart, on Ray and with Compose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from pd_cluster.launch.cli import build_parser
from pd_cluster.launch.flags import config_from
from pd_cluster.launch.on_ray.spec import NODE_ROLES, ROLES, read_spec
from tests.deploy.chart import of_kind, render
from tests.deploy.test_images import load_compose
from tests.docs.pages import ROOT, blocks

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "drafts.md").read_text()
CHART_VALUES, RAY_SPEC = (yaml.safe_load(text) for language, text in blocks(PAGE) if language == "yaml")
PAIR = {"kind": "pair", "gpus": {"count": 1, "claimTemplate": "gpus"}, "pair": CHART_VALUES["roles"]}


def check_roles(commands: list[list[str]]) -> None:
    """Of each process that has roles: its command line."""
    drafting = [command for command in commands if any("speculation" in word for word in command)]
    assert [command[0] for command in drafting] == ["decode"]
    config = config_from(build_parser().parse_args(drafting[0]), environ={})
    assert (config.scheduler.speculation, config.scheduler.max_drafts) == ("lookup", 8)


def commands_of(values: dict[str, Any]) -> list[list[str]]:
    objects = render(values)
    templates = [one["spec"]["template"] for kind in ("StatefulSet", "Deployment") for one in of_kind(objects, kind)]
    return [container["args"] for one in templates for container in one["spec"]["containers"]]


def test_the_chart_s_role() -> None:
    commands = commands_of(CHART_VALUES)
    assert {command[0] for command in commands} == {"prefill", "decode", "router"}
    check_roles(commands)


def test_the_decode_node_of_a_pair() -> None:
    commands = commands_of({"roles": {"prefill": None, "decode": None, "host": PAIR}})
    assert {command[0] for command in commands} == {"prefill", "decode", "router"}
    check_roles(commands)


def test_the_role_on_ray(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"prefill": {"count": 1}} | RAY_SPEC))
    spec = read_spec(file)
    check_roles([[role, *spec.arguments(role)] for role in ROLES])
    assert {"prefill", "decode", "mixed"} == {*NODE_ROLES}


def test_the_node_of_compose() -> None:
    (line,) = [text for _, text in blocks(PAGE) if "docker compose" in text]
    given = dict(word.split("=") for word in line.split() if "=" in word)
    services = load_compose(PD_CLUSTER_KEY="secret", **given)["services"]
    check_roles([one["command"] for one in services.values() if one["image"].startswith("pd-cluster:")])
    plain = load_compose(PD_CLUSTER_KEY="secret")["services"]["decode"]["command"]
    assert config_from(build_parser().parse_args(plain), environ={}).scheduler.speculation == "none"
