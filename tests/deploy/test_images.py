"""The Dockerfile (hadolint) and the compose file; no image is built here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_cluster.launch.cli import build_parser
from tests.deploy.chart import ROOT

DEPLOY = ROOT / "deploy"
HADOLINT = Path(sys.executable).parent / "hadolint"


def hadolint(dockerfile: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HADOLINT, "--no-color", str(dockerfile)], capture_output=True, text=True, timeout=60, cwd=dockerfile.parent
    )


def test_dockerfile_is_clean() -> None:
    done = hadolint(DEPLOY / "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_would_object(tmp_path: Path) -> None:
    worse = tmp_path / "Dockerfile"
    worse.write_text((DEPLOY / "Dockerfile").read_text().replace(" AS build-base", ":latest AS build-base").replace(
        "ARG PYTHON_IMAGE=python:3.12.12-slim-bookworm\n", "").replace("${PYTHON_IMAGE}", "python"))  # fmt: skip
    assert "DL3007" in hadolint(worse).stdout


def test_image_runs_as_nobody_and_knows_both_variants() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    final = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert "USER 10001:10001" in final
    assert any(line.startswith("HEALTHCHECK") for line in final)
    for variant in ("cpu", "cuda"):
        assert any(line.endswith(f" AS torch-{variant}") for line in lines)
        assert any(line.endswith(f" AS runtime-{variant}") for line in lines)


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


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def test_our_command_line_takes_every_service(compose: dict[str, Any]) -> None:
    parser = build_parser()
    for name in ("prefill", "decode", "router"):
        arguments = [argument.replace("${MODEL:-}", "") for argument in compose["services"][name]["command"]]
        parser.parse_args(arguments)
    assert set(compose["services"]) == {"prefill", "decode", "router", "prometheus", "grafana"}


def test_only_this_machine_reaches_published_ports_and_nodes_publish_none(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    for node in ("prefill", "decode"):
        assert "ports" not in services[node]
        assert services[node]["networks"] == ["cluster"]


def test_services_agree_on_names_ports_and_files(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert "--prefill=http://prefill:8100" in services["router"]["command"]
    assert "--decode=http://decode:8100" in services["router"]["command"]
    for name in ("prefill", "decode"):
        assert {"--port=8100", f"--advertise-host={name}"} <= set(services[name]["command"])
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
