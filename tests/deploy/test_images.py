"""The Dockerfile (hadolint) and the compose file; no image is built here."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_cluster.launch.cli import build_parser
from tests.deadlines import HANG_S
from tests.deploy.chart import ROOT

DEPLOY = ROOT / "deploy"
HADOLINT = Path(sys.executable).parent / "hadolint"


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HADOLINT, "--no-color", str(dockerfile)], capture_output=True, text=True, timeout=HANG_S, cwd=dockerfile.parent
    )


def test_dockerfile_is_clean() -> None:
    done = hadolint(DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_object(tmp_path: Path) -> None:
    worse = tmp_path / "Dockerfile"
    worse.write_text((DEPLOY / "Dockerfile").read_text().replace(" AS build-base", ":latest AS build-base").replace(
        "ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm\n", "").replace("${PYTHON_IMAGE}", "python"))  # fmt: skip
    assert "DL3007" in hadolint(worse).stdout


def test_both_targets_run_unprivileged_and_cpu_is_the_default_target() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    stages = {stage.split()[2]: stage for stage in text.split("\nFROM ")[1:]}
    assert list(stages)[-1] == "cpu"
    for target in ("cpu", "cuda"):
        assert stages[target].split()[0] == "runtime"
        assert stages[target].rstrip().endswith("USER 10001:10001")
        assert f"COPY --from=build-{target} " in stages[target]
    assert "\nHEALTHCHECK " in stages["runtime"]


def test_both_targets_have_what_the_chart_s_values_need() -> None:
    """Pods of a router that names a collector, or of an endpoint picker, would not start without these extras."""
    text = (DEPLOY / "Dockerfile").read_text()
    given = [set(line.removeprefix("ARG EXTRAS=").split(",")) for line in text.splitlines() if "ARG EXTRAS=" in line]
    assert given == [{"kubernetes", "gateway", "otel"}] * 2
    known = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert given[0] < set(known)


def test_everything_that_is_copied_passes_the_ignore_file() -> None:
    let_in = [
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    ]
    copied = [
        name
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
    ]
    assert sorted(copied) == sorted(let_in)
    assert all((ROOT / name).exists() for name in copied)


_VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>[A-Z_]+)(?P<how>:[-+?])(?P<word>[^}]*)\}")


def load_compose(**environment: str) -> dict[str, Any]:
    """The file as compose reads it: variables put in, services of other profiles left out."""

    def value(match: re.Match[str]) -> str:
        given, how = environment.get(match["name"], ""), match["how"]
        assert given or how != ":?", match["word"]
        return match["word"] if bool(given) is (how == ":+") else given if how != ":+" else ""

    loaded: dict[str, Any] = yaml.safe_load(_VARIABLE.sub(value, (DEPLOY / "compose.yaml").read_text()))
    active = {"", *environment.get("COMPOSE_PROFILES", "").split(",")}
    loaded["services"] = {
        name: service
        for name, service in loaded["services"].items()
        if active.intersection(service.get("profiles", [""]))
    }
    return loaded


@pytest.fixture(scope="module", params=["", "lmcache"])
def compose(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load_compose(PD_CLUSTER_KEY="secret", COMPOSE_PROFILES=request.param)


def test_nothing_starts_without_a_key() -> None:
    with pytest.raises(AssertionError, match="set it to a secret"):
        load_compose()


def test_our_command_line_takes_every_service(compose: dict[str, Any]) -> None:
    parser, services = build_parser(), compose["services"]
    ours = [name for name, service in services.items() if service["image"].startswith("pd-cluster:")]
    for name in ours:
        parser.parse_args(services[name]["command"])
    assert {*ours} - {"pool"} == {"prefill", "decode", "router"}
    assert {*services} - {*ours} == {"prometheus", "grafana"}


def test_the_profile_brings_a_pool_and_nodes_that_use_it() -> None:
    plain = load_compose(PD_CLUSTER_KEY="secret")
    assert "pool" not in plain["services"]
    assert "--connector=nixl" in plain["services"]["decode"]["command"]
    assert plain["services"]["prefill"]["build"]["args"]["EXTRAS"] == "kubernetes,otel"
    pooled = load_compose(PD_CLUSTER_KEY="secret", COMPOSE_PROFILES="lmcache")
    services = pooled["services"]
    assert services["prefill"]["build"]["args"]["EXTRAS"] == "kubernetes,otel,lmcache"
    assert services["prefill"]["image"] == services["pool"]["image"] != plain["services"]["prefill"]["image"]
    for node in ("prefill", "decode"):
        assert {"--connector=lmcache", "--pool-url=lm://pool:6500"} <= set(services[node]["command"])
    assert {"--host=0.0.0.0", "--port=6500", "--max-gb=4"} <= set(services["pool"]["command"])
    assert (services["pool"]["networks"], "ports" in services["pool"]) == (["kv"], False)
    assert "6500" in services["pool"]["healthcheck"]["test"][-1]


def test_only_this_machine_reaches_published_ports_and_nodes_publish_none(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    for node in ("prefill", "decode"):
        assert "ports" not in services[node]
        assert set(services[node]["networks"]) == {"cluster", "kv"}


def test_only_nodes_and_pool_are_on_the_kv_network(compose: dict[str, Any]) -> None:
    """It leads nowhere else, and UCX listens on it, since it listens where the advertised name is."""
    services = compose["services"]
    assert compose["networks"]["kv"] == {"internal": True}
    on_it = {name for name, service in services.items() if "kv" in service["networks"]}
    assert on_it == {"prefill", "decode", "pool"} & services.keys()
    for node in ("prefill", "decode"):
        assert services[node]["networks"]["kv"] == {"aliases": [f"{node}.kv"]}
        assert f"--advertise-host={node}.kv" in services[node]["command"]
        assert "--kv-ports=45000-45099" in services[node]["command"]


def test_services_agree_on_names_ports_and_files(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert "--prefill=http://prefill:8100" in services["router"]["command"]
    assert "--decode=http://decode:8100" in services["router"]["command"]
    for name in ("prefill", "decode"):
        assert {"--port=8100", f"--advertise-host={name}.kv"} <= set(services[name]["command"])
        assert services[name]["environment"]["PD_HEALTH_URL"].endswith(":8100/health")
        drain = next(argument for argument in services[name]["command"] if argument.startswith("--drain-s="))
        assert float(services[name]["stop_grace_period"][:-1]) > float(drain.split("=")[1])
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for static in job["static_configs"] for target in static["targets"]}
    assert targets == {"prefill:8100", "decode:8100", "router:8000"}
    mounted = [volume.split(":")[0] for service in services.values() for volume in service.get("volumes", [])]
    assert all((DEPLOY / path).resolve().is_file() for path in mounted if path.startswith("."))


def test_images_of_others_are_pinned(compose: dict[str, Any]) -> None:
    images = [compose["services"][name]["image"] for name in ("prometheus", "grafana")]
    assert all(image.rpartition(":")[2][-1].isdigit() and image.count(":") == 1 for image in images)
