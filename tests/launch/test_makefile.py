"""What `make` would install, and from where."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deadlines import HANG_S

ROOT = Path(__file__).parents[2]
INDEX = "http://index.invalid/cpu"

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def plan(tmp_path: Path, *arguments: str) -> list[str]:
    """The lines that `make` would run."""
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path}/venv", *arguments]
    outer = {"MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "PYTEST_ARGS", "WORKERS"}  # `make test` runs this
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=HANG_S)
    return run.stdout.splitlines()


def installs(lines: list[str]) -> list[str]:
    return [line for line in lines if "pip install" in line]


def test_a_torch_index_serves_torch_alone(tmp_path: Path) -> None:
    torch, package = installs(plan(tmp_path, f"TORCH_INDEX={INDEX}", f"{tmp_path}/venv/.installed"))
    assert torch.endswith(f"--no-deps --index-url {INDEX} torch"), "that index has few of torch's dependencies"
    assert INDEX not in package
    assert "PIP_BUILD_CONSTRAINT=constraints.txt" in package
    assert "-c constraints.txt" in package
    bare = installs(plan(tmp_path, "CONSTRAINTS=", f"{tmp_path}/venv/.installed"))[-1]
    assert "constraint" not in bare.lower().replace(str(tmp_path).lower(), "")


def test_what_bench_plots_with_comes_along(tmp_path: Path) -> None:
    for target in (".installed", ".installed-lmcache", ".installed-mooncake"):
        assert "bench" in installs(plan(tmp_path, f"{tmp_path}/venv/{target}"))[-1]


def test_the_tests_find_every_pool(tmp_path: Path) -> None:
    assert "[lmcache,mooncake,dev]" in installs(plan(tmp_path, f"{tmp_path}/venv/.installed-dev"))[-1]


@pytest.mark.parametrize("connector", ["lmcache", "mooncake", "nixl"])
def test_a_connector_brings_its_pool(tmp_path: Path, connector: str) -> None:
    lines = plan(tmp_path, "up", f"CONNECTOR={connector}")
    assert any(f"up --connector={connector}" in line for line in lines)
    assert any(f",{connector}]" in line for line in installs(lines)) == (connector != "nixl")


def test_all_tests_but_slow_ones_are_in_one_queue(tmp_path: Path) -> None:
    (line,) = (line for line in plan(tmp_path, "test", "PYTEST_ARGS=-k x", "WORKERS=4") if "-m pytest" in line)
    assert line.endswith('python -m pytest -n 4 -m "not slow" -k x')
    (line,) = (line for line in plan(tmp_path, "test-slow") if "-m pytest" in line)
    assert line.rstrip().endswith("-m slow --record-slow")


def test_build_and_run_time_requirements_are_pinned() -> None:
    lines = re.findall(
        r"^([A-Za-z0-9_.-]+)==([^\s;]+)(?:$|; python_version < .3.14.$)",
        (ROOT / "constraints.txt").read_text(),
        re.MULTILINE,
    )
    pins = dict(lines)
    assert len(pins) == len(lines), "a package is pinned twice"
    assert int(pins["setuptools"].split(".")[0]) >= 77, "what pyproject.toml's build asks for"
    assert {"torch", "numpy", "msgspec", "matplotlib"} <= pins.keys()
