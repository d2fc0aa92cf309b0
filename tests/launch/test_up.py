"""What `pd-cluster up` starts and keeps running, and that everything ends with it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from pd_cluster.launch.cli import build_parser, main
from pd_cluster.launch.flags import given_flags
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.node_plan import RolePlan, plan_nodes
from pd_cluster.launch.up import abilities, curl_line
from pd_cluster.launch.up_flags import OTHER_ROUTER_SETTINGS, ROUTER_SETTINGS
from pd_router.config import RouterConfig
from tests.connectors.mooncake_master import needs_mooncake
from tests.connectors.store_server import needs_lmcache
from tests.deadlines import HANG_S, wait_equal
from tests.patient_node import PATIENT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launched, Launcher


def test_what_the_cluster_must_be_able_to_do() -> None:
    plans = plan_nodes({"prefill": RolePlan(2), "decode": RolePlan(1), "mixed": RolePlan(1)}, [], [], 8)
    assert abilities(plans) == {
        "prefill": ["prefill-0", "prefill-1"], "decode": ["decode-0", "mixed-0"], "route": ["router"]
    }  # fmt: skip
    mixed = plan_nodes({"mixed": RolePlan(1)}, [], [], 8)
    assert abilities(mixed) == {"decode": ["mixed-0"], "route": ["router"]}


@pytest.mark.parametrize("demo", [True, False])
def test_the_curl_line_is_valid_shell(demo: bool) -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8000", "it's", demo))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["messages"][0]["role"] == "user"


def test_the_router_gets_its_own_flags_and_the_nodes_do_not() -> None:
    router = ["--route=d-first", "--prefill-on-decode=never", "--api-keys=keys", "--tls-cert=cert", "--tls-key=key"]
    namespace = build_parser().parse_args(["up", "--block-size=32", *router, "--allowed-origins=https://a"])
    assert given_flags(namespace, {"host", "port", *ROUTER_SETTINGS}) == [
        "--block-size=32",
        "--allowed-origins=https://a",
    ]
    assert sorted(given_flags(namespace, OTHER_ROUTER_SETTINGS, (RouterConfig,))) == sorted(router)


def test_what_up_tells_clients_of_keys_and_certificates() -> None:
    """The key is the shell's variable, so it is not in its history."""
    words = shlex.split(curl_line("https://a", "m", False, has_keys=True))
    assert words[words.index("Authorization: Bearer $KEY") - 1] == "-H"
    assert ' "Authorization: Bearer $KEY" ' in curl_line("https://a", "m", False, has_keys=True)


@pytest.mark.parametrize(("flag", "said"), [("--api-keys", "No such file"), ("--tls-cert", "cannot use --tls-cert")])
def test_files_of_the_router_are_read_before_anything_starts(
    flag: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--port=0", "--device=cpu", "--model=/no/such/model", f"{flag}={tmp_path / 'none'}"]) == 2
    assert said in capsys.readouterr().err


def test_a_balance_needs_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--port=0", "--device=cpu", "--balance", "--slo-ttft-ms=200"]) == 2
    assert "--balance needs --slo-ttft-ms and --slo-tpot-ms" in capsys.readouterr().err


@pytest.mark.integration
def test_up_keeps_a_balance_and_its_router_shows_the_reasons(launcher: Launcher) -> None:
    cluster = up(launcher, "--prefill=1", "--decode=1", "--balance", "--slo-ttft-ms=500", "--slo-tpot-ms=50")

    def word() -> dict[str, str]:
        told: dict[str, str] = httpx.get(f"{url_of(cluster)}/nodes", timeout=HANG_S).json()["balance"] or {}
        return told

    wait_equal(lambda: word().get("sender"), "balance")
    first = process_of(cluster, "balance")
    first.kill()
    cluster.wait_line("balance is back")
    assert process_of(cluster, "balance").pid != first.pid
    assert cluster.stop(signal.SIGINT) == 0
    assert cluster.leftovers() == []


ONE_NODE = ("--prefill=0", "--decode=0", "--mixed=1")


def up(launcher: Launcher, *more: str, real: bool = False) -> Launched:
    """Its nodes and its router are forked, unless `real`: a node takes 8 s of CPU else."""
    flags = ("--port=0", "--device=cpu", "--num-threads=1", "--max-model-len=512", "--kv-cache-gb=0.05")
    cluster = launcher.command("up", *flags, *more, environment=PATIENT, real=real)
    cluster.wait_line("Ctrl-C stops everything")
    return cluster


def url_of(cluster: Launched) -> str:
    return cluster.wait_line("ready: http://").split()[1]


def process_of(cluster: Launched, word: str) -> psutil.Process:
    """The child of `up` with this word in its command line."""
    [process] = [process for process in psutil.Process(cluster.pid).children() if word in process.cmdline()]
    cluster.family()
    return process


def ask(cluster: Launched) -> httpx.Response:
    """Send what `up` says to try."""
    words = shlex.split(cluster.wait_line("curl "))
    headers = {"Content-Type": "application/json"}
    return httpx.post(words[1], content=words[words.index("-d") + 1], headers=headers, timeout=HANG_S)


@pytest.mark.integration
def test_up_answers_and_heals_and_stops(launcher: Launcher) -> None:
    cluster = up(launcher)
    url = url_of(cluster)
    assert cluster.wait_line("curl ").split()[1].startswith(url)
    answer = ask(cluster)
    assert answer.json()["choices"][0]["message"]["content"] == "Oskar 2210"
    assert (answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]) == ("prefill-0", "decode-0")

    decode = process_of(cluster, "decode")
    assert os.getsid(decode.pid) == decode.pid, "Ctrl-C reaches `up` only"
    decode.children()[0].kill()
    process_of(cluster, "router").kill()
    assert httpx.get(f"{url}/nodes", timeout=HANG_S).status_code == 200, "it waited for the router"
    cluster.wait_line("router was killed by SIGKILL: restarting it in 0.5 s (restart 1)")
    cluster.wait_line("decode-0 exited with status 1: restarting it in 0.5 s (restart 1)")
    cluster.wait_line("decode-0 is back: it was down for ")
    one_each = {"prefill": 1, "decode": 1}
    wait_equal(lambda: httpx.get(f"{url}/health", timeout=HANG_S).json()["healthy"], one_each)  # it looks each 0.5 s
    answer = ask(cluster)
    assert answer.json()["choices"][0]["message"]["content"] == "Oskar 2210"
    assert (answer.headers["x-pd-prefill"], answer.headers["x-pd-decode"]) == ("prefill-0", "decode-0")

    process_of(cluster, "prefill").kill()
    cluster.wait_line("prefill-0 was killed by SIGKILL: restarting it in 0.5 s (restart 1)")
    assert cluster.stop(signal.SIGINT) == 0, "also while a process is being started again"
    assert cluster.lines[-1] == "stopped"
    assert cluster.leftovers() == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("connector", "scheme"),
    [
        pytest.param("lmcache", "lm", marks=needs_lmcache),
        pytest.param("mooncake", "mooncake", marks=[needs_mooncake, pytest.mark.slow]),
    ],
)
def test_up_brings_the_pool_that_its_nodes_need(launcher: Launcher, connector: str, scheme: str) -> None:
    cluster = up(launcher, *ONE_NODE, f"--connector={connector}", "--pool-gb=0.1", "--pool-segment-gb=0.05")
    assert cluster.wait_line(f"pool ready on {scheme}://127.0.0.1:").rpartition(":")[2].isdigit()

    def check() -> None:
        assert ask(cluster).json()["choices"][0]["message"]["content"] == "Oskar 2210"

    check()
    process_of(cluster, "pool").kill()
    cluster.wait_line("pool was killed by SIGKILL: restarting it")
    check()
    cluster.wait_line("pool is back")
    assert len({line.split("://")[1] for line in cluster.lines if "pool ready on" in line}) == 1, "at its old address"
    check()
    assert cluster.stop(signal.SIGINT) == 0
    assert cluster.leftovers() == []


@pytest.mark.slow
@pytest.mark.integration
def test_a_role_that_cannot_come_back_ends_the_cluster(launcher: Launcher, tmp_path: Path) -> None:
    """The delays add up to 15 s."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    cluster = up(launcher, f"--model={model}", real=True)
    (model / "model.safetensors").unlink()
    process_of(cluster, "decode").kill()
    assert cluster.wait(90.0) == 1
    reason = "decode-0 exited with status 2; decode-0 has failed to start 5 times in a row: stopping the cluster"
    assert reason in cluster.output
    assert cluster.leftovers() == []


@pytest.mark.slow
@pytest.mark.integration
def test_what_cannot_start_the_first_time_ends_up_at_once(launcher: Launcher) -> None:
    """The node's own checks are not `up`'s: here its address is none that this machine has."""
    environment = {"PD_ADVERTISE_HOST": "no such host"}
    flags = ("--port=0", "--device=cpu", "--kv-cache-gb=0.05")
    cluster = launcher.command("up", *flags, environment=environment, real=True)
    assert cluster.wait(60.0) == 2
    assert "restarting it" not in cluster.output
    assert cluster.leftovers() == []


@needs_mooncake
@pytest.mark.integration
def test_a_master_does_not_outlive_a_killed_pool(launcher: Launcher) -> None:
    pool = launcher.command("pool", "--connector=mooncake", "--port=0")
    pool.wait_line("pool ready on mooncake://127.0.0.1:")
    assert [process.name() for process in pool.family()] == ["mooncake_master"]
    pool.send(signal.SIGKILL)
    assert pool.wait() == -signal.SIGKILL
    assert pool.leftovers(HANG_S) == []
