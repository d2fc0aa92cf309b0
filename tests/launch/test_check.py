"""`pd-cluster check`: findings on known facts."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pd_cluster.config import HandoffConfig, ModelConfig, NodeConfig
from pd_cluster.launch import check
from pd_cluster.launch.check import (
    Verdict,
    check_key,
    check_machine,
    check_model,
    check_port,
    check_transfer,
    read_listeners,
    read_transfer_result,
)
from pd_cluster.launch.cli import main
from pd_cluster.launch.link_side import LinkSide
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.preflight import MachineFacts
from pd_cluster.launch.sockets import listen, port_of
from pd_cluster.launch.transfer_check import _measure
from pd_cluster.launch.up_flags import POOL_CONNECTORS

if TYPE_CHECKING:
    from pathlib import Path

MEASURED = '{"bytes": %s, "seconds": 1.0, "device": "%%s", "listeners": [], "slow_cause": "separate namespaces"}'
SLOW, FAST = MEASURED % "4e8", MEASURED % "5e9"
HERE = LinkSide("boot-1", "pid:[1]", "GPU-a")


@pytest.mark.parametrize(
    ("status", "out", "err", "verdict", "says"),
    [
        (0, '{"bytes": 2000000000, "seconds": 0.5, "device": "cpu", "listeners": []}', "", Verdict.OK, "4 GB/s"),
        (0, f"noise\n{SLOW % 'cpu'}\n", "", Verdict.WARN, "0.4 GB/s"),
        (0, FAST % "cuda", "", Verdict.OK, "5 GB/s between two processes, cuda memory"),
        (0, (FAST % "cuda").replace("5e9", "4.9e9"), "", Verdict.WARN, "4.9 GB/s"),
        (0, FAST % "cpu", "", Verdict.OK, "5 GB/s"),
        (0, SLOW % "cuda", "", Verdict.WARN, "slow, likely because of: separate namespaces"),
        (0, '{"error": "warm-up: peer gone"}', "", Verdict.FAIL, "warm-up: peer gone"),
        (-11, "", "a\nlast words\n", Verdict.FAIL, "status -11: last words"),
        (0, "", "", Verdict.FAIL, "no output"),
    ],
)
def test_transfer_results(status: int, out: str, err: str, verdict: Verdict, says: str) -> None:
    finding = read_transfer_result("1.5.1", status, out, err)[0]
    assert finding.verdict is verdict
    assert says in finding.detail


def test_where_ucx_listens_is_told_and_an_open_network_is_a_warning() -> None:
    listeners = '[["127.0.0.1", 5], ["10.0.0.1", 45007], ["fd00::1", 6]]'
    out = f'{{"bytes": 1e9, "seconds": 1.0, "device": "cpu", "listeners": {listeners}}}'
    _, finding = read_transfer_result("1.5.1", 0, out, "")
    assert finding.verdict is Verdict.WARN
    assert "127.0.0.1:5, 10.0.0.1:45007, [fd00::1]:6" in finding.detail
    assert read_listeners([("127.0.0.1", 5), ("::1", 6)]).verdict is Verdict.OK


def test_an_address_of_no_interface_fails_before_anything_is_transferred() -> None:
    (finding,) = check_transfer("192.0.2.77", "")
    assert finding.verdict is Verdict.FAIL
    assert "UCX_NET_DEVICES" in finding.detail
    (finding,) = check_transfer("127.0.0.1", "45000")
    assert "LOW-HIGH" in finding.detail


@pytest.mark.parametrize("connector", POOL_CONNECTORS)
def test_a_pool_needs_its_package(connector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = NodeConfig(handoff=HandoffConfig(connector=connector))
    monkeypatch.setattr(MachineFacts, "has_module", lambda machine, name: True)
    assert check_machine(config).verdict is Verdict.OK
    monkeypatch.setattr(MachineFacts, "has_module", lambda machine, name: name != connector)
    missing = check_machine(config)
    assert (missing.verdict, f"pd-cluster[{connector}]" in missing.detail) == (Verdict.FAIL, True)


def test_an_unknown_connector_is_told() -> None:
    assert check_machine(NodeConfig(handoff=HandoffConfig(connector="foo"))).verdict is Verdict.FAIL
    assert check_machine(NodeConfig(handoff=HandoffConfig(connector="none"))).verdict is Verdict.OK


def test_ports() -> None:
    with contextlib.closing(listen("0.0.0.0", 0)) as listener:
        port = port_of(listener)
        assert check_port(port).verdict is Verdict.FAIL
    assert check_port(port).verdict is Verdict.OK


def test_keys(tmp_path: Path) -> None:
    path = tmp_path / "key"
    assert check_key(str(path), {}).verdict is Verdict.FAIL
    path.write_text("secret")
    path.chmod(0o644)
    assert check_key(str(path), {}).verdict is Verdict.WARN
    path.chmod(0o600)
    assert check_key(str(path), {}).verdict is Verdict.OK
    path.write_text("")
    assert "empty" in check_key(str(path), {}).detail


def test_the_environment_key_is_named_but_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "hush")
    assert check_key("", {"PD_CLUSTER_KEY": "hush"}).detail == "$PD_CLUSTER_KEY"


def test_models(tmp_path: Path) -> None:
    config = NodeConfig(model=ModelConfig(model=str(tmp_path)))
    assert check_model(config).verdict is Verdict.FAIL
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    assert "has no .safetensors file" in check_model(config).detail
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert "is not a safetensors file, or only a part of one" in check_model(config).detail
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    finding = check_model(config)
    assert finding.verdict is Verdict.OK
    architecture = json.loads((DEMO_MODEL / "config.json").read_text())["architectures"][0]
    assert architecture in finding.detail
    (tmp_path / "config.json").write_text("{")
    assert check_model(config).verdict is Verdict.FAIL


def test_the_status_is_that_of_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "x")
    monkeypatch.setattr(check, "DEFAULT_PORTS", ())

    def checked(*flags: str) -> tuple[int, str]:
        status = main(["check", "--connector=none", *flags])
        return status, " ".join(capsys.readouterr().out.replace("│", " ").split())

    status, out = checked(f"--model={DEMO_MODEL}")
    assert (status, "fail" in out) == (0, False)
    assert "max_num_seqs 8" in out, "what a node would serve at once"
    status, out = checked(f"--model={tmp_path}")
    assert (status, "fail" in out) == (1, True)


@pytest.mark.long
def test_the_check_is_of_a_node_with_these_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "x")
    monkeypatch.setattr(check, "DEFAULT_PORTS", ())
    monkeypatch.setenv("COLUMNS", "500")

    def checked(*flags: str) -> tuple[int, str]:
        return main(["check", "--connector=none", "--device=cpu", *flags]), capsys.readouterr().out

    node = checked("--model-impl=transformers", "--max-num-seqs=5", "--dtype=bfloat16")
    assert (node[0], "by transformers' modules" in node[1]) == (0, True)
    assert "max_num_seqs 5, max_num_batched_tokens 2048 (CPU), KV cache in bfloat16" in node[1]
    assert "KV cache in float8_e4m3fn" in checked("--kv-cache-dtype=fp8")[1]
    for flags, says in (
        (("--kv-cache-dtype=fp8", "--model-impl=transformers"), "fp8"),
        (("--max-model-len=99999999",), "exceeds the model's own limit"),
        (("--block-size=15",), "--block-size 15 is not a multiple of 16"),
    ):
        status, out = checked(*flags)
        assert (status, says in out) == (1, True), out
    assert checked("--max-num-seqs=9", "--max-num-batched-tokens=8")[0] == 2, "as for a node"


def test_a_machine_is_checked_before_the_model_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "x")
    monkeypatch.setattr(check, "DEFAULT_PORTS", ())
    monkeypatch.setattr(MachineFacts, "num_cuda_devices", lambda machine: 0)
    monkeypatch.setattr(check, "resolve_model", lambda model: pytest.fail("a download"))
    node = ["--connector=none", "--role=decode", "--model=no-org/no-model", "--max-model-len=32768", "--tp=8"]
    with contextlib.closing(listen("0.0.0.0", 0)) as listener:
        taken = port_of(listener)
        assert main(["check", "--skip-model", *node, f"--control-port={taken}"]) == 1
        assert f"port {taken}" in capsys.readouterr().out
    assert main(["check", "--skip-model", *node]) == 0
    assert "not checked" in capsys.readouterr().out


def test_a_node_that_must_have_a_gpu_is_no_node_on_the_cpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "x")
    monkeypatch.setattr(check, "DEFAULT_PORTS", ())
    monkeypatch.setattr(MachineFacts, "num_cuda_devices", lambda machine: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert main(["check", "--connector=none", "--device=cuda"]) == 1
    table = capsys.readouterr().out
    assert "--device cuda: " in table
    assert "node on cpu" not in table
    assert main(["prefill", "--device=cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pd-cluster: error: --device cuda: ")
    assert error.count("\n") == 1


@pytest.mark.integration
def test_a_real_transfer() -> None:
    pytest.importorskip("nixl_cu13")
    finding, network = check.check_transfer("127.0.0.1", "")
    assert network.verdict is Verdict.OK
    assert network.detail.startswith("UCX listens on 127.0.0.1:")
    assert finding.verdict is not Verdict.FAIL, finding.detail
    assert "GB/s between two processes" in finding.detail


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("stdin", [subprocess.PIPE, subprocess.DEVNULL])
def test_a_link_between_two_checks(tmp_path: Path, stdin: int) -> None:
    pytest.importorskip("nixl_cu13")
    command = [sys.executable, "-m", "pd_cluster.launch.cli", "check", "--offer-link", "--advertise-host=127.0.0.1"]
    offer = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)
    try:
        assert offer.stdout is not None
        link = tmp_path / "link"
        link.write_text(offer.stdout.readline())
        finding, _ = check.check_transfer("127.0.0.1", "", str(link))
        assert finding.verdict is not Verdict.FAIL, finding.detail
        assert "GB/s between two processes" in finding.detail
        if stdin == subprocess.DEVNULL:
            offer.send_signal(signal.SIGINT)
        offer.communicate(timeout=60)  # closes its standard input
        assert offer.returncode == 0
    finally:
        offer.kill()
        offer.wait()


@pytest.mark.parametrize("text", ["", "not hex", "00ff"])
def test_a_link_that_no_check_offered_is_refused(text: str) -> None:
    assert "the other side's line cannot be read" in _measure(text, "127.0.0.1", "")["error"]


@pytest.mark.parametrize(
    ("theirs", "cause"),
    [
        (LinkSide("boot-2", "pid:[1]", "GPU-b"), "two hosts"),
        (LinkSide("boot-1", "pid:[2]", "GPU-b"), "separate PID namespaces"),
        (LinkSide("boot-1", "pid:[1]", "GPU-c"), "does not show the other side's GPU GPU-c"),
        (LinkSide("boot-1", "pid:[1]", "GPU-b"), "cuda_ipc"),
    ],
)
def test_the_likely_cause_of_a_slow_link(theirs: LinkSide, cause: str) -> None:
    assert cause in HERE.slow_cause(theirs, ("GPU-a", "GPU-b"))


def test_host_memory_needs_no_nvlink() -> None:
    host = LinkSide("boot-1", "pid:[1]")
    assert host.slow_cause(host, ()) == "this machine is busy"
