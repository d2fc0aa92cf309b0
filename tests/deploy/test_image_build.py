"""The image, built for real and run: buildah, without a daemon and without a registry.

The base image is a minimal Debian with Python; PYTHON_IMAGE=... takes the one that is meant, where a registry has it.
TORCH_INDEX=... is where CPU builds of torch come from, as for make. What pip is configured to use here is used there.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.deploy.chart import CHART, ROOT
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster import Launcher

TOOLS = ("buildah", "debootstrap")
BUILD_DEADLINE_S = 1200.0
RUN_DEADLINE_S = 120.0
BASE, IMAGE = "localhost/python", "localhost/pd-cluster:test"
BASE_PACKAGES = "python3,python3-venv,python-is-python3,ca-certificates"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.integration,
    pytest.mark.timeout(2 * BUILD_DEADLINE_S),
    pytest.mark.skipif(
        not all(map(shutil.which, TOOLS)) or os.geteuid() != 0, reason=f"needs root and {' and '.join(TOOLS)}"
    ),
]


class Buildah:
    """Images and containers in a directory of their own. No call leaves a process behind."""

    def __init__(self, directory: Path) -> None:
        storage = directory / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "vfs"\ngraphroot = "{directory}/images"\nrunroot = "{directory}/run"\n'
        )
        self._policy = directory / "policy.json"
        self._policy.write_text(json.dumps({"default": [{"type": "insecureAcceptAnything"}]}))
        self.environment = {"CONTAINERS_STORAGE_CONF": str(storage), "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *arguments: str, deadline_s: float = RUN_DEADLINE_S) -> str:
        """Its standard output. An AssertionError holds the rest when it fails."""
        done = subprocess.run(
            ["buildah", *arguments], capture_output=True, text=True, timeout=deadline_s, cwd=ROOT,
            env={**os.environ, **self.environment},
        )  # fmt: skip
        assert done.returncode == 0, f"buildah {' '.join(arguments)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout.strip()

    def signed(self, action: str, *arguments: str, deadline_s: float = BUILD_DEADLINE_S) -> str:
        return self(action, "--signature-policy", str(self._policy), *arguments, deadline_s=deadline_s)


def make_base(buildah: Buildah, directory: Path) -> str:
    """A Debian with `python` and venv, as an image. Its name."""
    root = directory / "base"
    command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", str(root)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S)
    assert made.returncode == 0, made.stdout[-4000:]
    container = buildah.signed("from", "scratch")
    buildah("copy", "--quiet", container, str(root), "/", deadline_s=BUILD_DEADLINE_S)
    buildah.signed("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(root)
    return BASE


def pip_mounts(directory: Path) -> list[str]:
    """Flags that give the build this machine's pip configuration, and the files that it names."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    options = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = ast.literal_eval(value)
    config = directory / "pip.conf"
    config.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in options.items()))
    words = [word for value in options.values() for word in str(value).split()]
    indexes = {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
    mounts = {path for path in indexes | {Path(word) for word in words if word.startswith("/")} if path.exists()}
    return [f"--volume={config}:/etc/pip.conf:ro", *(f"--volume={path}:{path}:ro" for path in sorted(mounts))]


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """With IMAGE built."""
    directory = tmp_path_factory.mktemp("buildah")
    buildah = Buildah(directory)
    try:
        base = os.environ.get("PYTHON_IMAGE") or make_base(buildah, directory)
        index = [f"--build-arg=TORCH_INDEX={os.environ['TORCH_INDEX']}"] if os.environ.get("TORCH_INDEX") else []
        common = [
            "--format=docker", f"--build-arg=PYTHON_IMAGE={base}", *index, *pip_mounts(directory),
            "--file=deploy/Dockerfile", "--ignorefile=deploy/Dockerfile.dockerignore",
        ]  # fmt: skip
        buildah.signed("bud", *common, f"--tag={IMAGE}", ".")
        yield buildah
    finally:
        buildah("rm", "--all")
        buildah("rmi", "--all", "--force")
        shutil.rmtree(directory)


@pytest.fixture(scope="module")
def container(buildah: Buildah) -> str:
    return buildah.signed("from", IMAGE)


def test_image_names_its_user_and_its_health_check(buildah: Buildah) -> None:
    config = json.loads(buildah("inspect", "--type=image", IMAGE))["Docker"]["config"]
    assert (config["User"], config["Entrypoint"], config["StopSignal"]) == ("10001:10001", ["pd-cluster"], "SIGTERM")
    assert "PD_HEALTH_URL" in config["Healthcheck"]["Test"][-1]


def test_it_runs_as_an_unprivileged_user_without_write_access(buildah: Buildah, container: str) -> None:
    assert buildah("run", container, "--", "id", "-u") == "10001"
    script = "touch /opt/pd-cluster/x 2>/dev/null || touch /models/x; ls /src /models /opt/pd-cluster/x 2>/dev/null"
    assert buildah("run", container, "--", "sh", "-c", f"{script} || true").split() == ["/models:", "x"]


def test_the_extras_are_there(buildah: Buildah, container: str) -> None:
    names = "lightkube, grpc, google.protobuf, llguidance, opentelemetry.exporter.otlp.proto.http.trace_exporter"
    buildah("run", container, "--", "python", "-c", f"import {names}")


def test_preflight_passes_inside(buildah: Buildah, container: str) -> None:
    """Imports, a measured NIXL transfer between two processes, the model: `pd-cluster check` fails when one does."""
    told = buildah("run", container, "--", "pd-cluster", "check", f"--port={free_port()}")
    assert "MB/s between two processes" in told


def test_a_cluster_inside_answers_and_ends_in_good_order(buildah: Buildah, container: str, launcher: Launcher) -> None:
    up = ["buildah", "run", container, "--", "pd-cluster", "up", f"--port={(port := free_port())}", "--num-threads=1"]
    running = launcher.start("image", up, buildah.environment)
    running.wait_line("Ctrl-C stops everything", RUN_DEADLINE_S)
    url = f"http://127.0.0.1:{port}"
    asked = subprocess.run(
        [sys.executable, str(CHART / "files" / "ask.py"), url, "Oskar 2210"],
        capture_output=True, text=True, timeout=RUN_DEADLINE_S,
    )  # fmt: skip
    assert asked.returncode == 0, asked.stderr
    check = json.loads(buildah("inspect", "--type=image", IMAGE))["Docker"]["config"]["Healthcheck"]["Test"][1:]
    buildah("run", f"--env=PD_HEALTH_URL={url}/health", container, "--", *check)
    command = ["/opt/pd-cluster/bin/python", "/opt/pd-cluster/bin/pd-cluster", "up"]
    (first,) = [process for process in running.family() if process.cmdline()[:3] == command]
    first.send_signal(signal.SIGTERM)  # what the kubelet does; buildah itself would kill
    assert running.wait(RUN_DEADLINE_S) == 0, running.output
