"""The package as it is installed: its wheel, without extras, in an environment of its own, outside of a checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
INSTALL_S, START_S, ANSWER_S = 1200.0, 300.0, 120.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# What pip needs of this machine's environment: its index and certificates. No path of the checkout.
KEPT = re.compile(r"PIP_|HTTPS?_PROXY|NO_PROXY|SSL_CERT|REQUESTS_CA|PATH$|HOME$|LANG$|TMPDIR$", re.IGNORECASE)
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Mira", "Oskar"]}, "code": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["name", "code"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PERSON}}
QUESTION = "Mira 4831. Oskar 2210. Lena 7745. Oskar?"


def environ() -> dict[str, str]:
    names = {name: value for name, value in os.environ.items() if KEPT.match(name) and name != "PYTHONPATH"}
    return names | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy: setuptools leaves its `build` folder and lists in the tree."""
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("pd_cluster", "router", "connectors", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={place}", str(source)]
    subprocess.run(command, check=True, timeout=INSTALL_S, env=environ())
    (built,) = place.glob("*.whl")
    return built


@pytest.mark.slow
@pytest.mark.timeout(INSTALL_S)
def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Code and data alike: models, the dashboard's page, the marker of types."""
    held = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", "pd_cluster", "router", "connectors", "kernels"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    wanted = {re.sub(r"^(router|connectors|kernels)/", "", name) for name in tracked}
    assert {name for name in wanted if name.startswith("pd_")} - held == set()


def call(url: str, **body: Any) -> tuple[dict[str, Any], str, str]:
    """The first choice, and which nodes prefilled and decoded: two, or the decode node may read what it has cached."""
    content = json.dumps({"temperature": 0, "max_tokens": 64, **body}).encode()
    headers = {"Content-Type": "application/json", "x-pd-route": "p-first"}
    request = urllib.request.Request(url + "/v1/chat/completions", content, headers)
    with DIRECT.open(request, timeout=ANSWER_S) as answer:
        told = answer.headers
        return json.load(answer)["choices"][0], told.get("x-pd-prefill", ""), told.get("x-pd-decode", "")


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`pd-cluster` of an environment with the wheel and what it requires, at the tested versions.

    It is removed afterwards: pytest keeps folders of three runs, and an environment with a CUDA build has 5 GB.
    """
    place = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=INSTALL_S, env=environ())
    install = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, str(wheel)], check=True, timeout=INSTALL_S, env=environ())
    yield place / "bin" / "pd-cluster"
    shutil.rmtree(place)


@pytest.fixture(scope="module", params=["", "tool_model"])
def cluster(request: pytest.FixtureRequest, program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `pd-cluster up` with a model of the package, and with nothing else."""
    model = [f"--model={request.param}"] if request.param else []
    command = [str(program), "up", "--port=0", *model]
    place = tmp_path_factory.mktemp("elsewhere")
    with subprocess.Popen(command, cwd=place, env=environ(), stdout=subprocess.PIPE, text=True) as up:
        try:
            assert up.stdout is not None
            lines = []
            for line in up.stdout:
                lines.append(line)
                if line.startswith("ready: "):
                    break
            else:
                pytest.fail("".join(lines))
            yield line.split()[1]
        finally:
            up.send_signal(signal.SIGINT)
            up.communicate(timeout=START_S)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(2 * INSTALL_S)
def test_up_serves_through_prefill_and_decode(cluster: str) -> None:
    """A chat, a structured answer and a tool call, without an extra."""
    chat, prefill, decode = call(cluster, messages=[{"role": "user", "content": QUESTION}])
    assert chat["message"]["content"]
    assert prefill
    assert decode
    assert prefill != decode
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    said, prefill, decode = call(cluster, messages=[{"role": "user", "content": QUESTION}], response_format=form)
    assert prefill != decode
    assert set(json.loads(said["message"]["content"])) == {"name", "code"}
    if "tool_model" in json.dumps(models(cluster)):
        made, prefill, decode = call(
            cluster, messages=[{"role": "user", "content": QUESTION}], tools=[WEATHER], tool_choice="required"
        )
        assert prefill != decode
        (one,) = made["message"]["tool_calls"]
        assert one["function"]["name"] == "weather"
        assert set(json.loads(one["function"]["arguments"])) == {"name", "code"}


def models(url: str) -> Any:
    with DIRECT.open(f"{url}/v1/models", timeout=ANSWER_S) as answer:
        return json.load(answer)
