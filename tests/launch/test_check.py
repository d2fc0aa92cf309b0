"""`pd-cluster check`: findings on known facts."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import TYPE_CHECKING

import pytest

from pd_cluster.launch import check
from pd_cluster.launch.check import (
    Verdict,
    check_connector,
    check_key,
    check_model,
    check_port,
    check_transfer,
    read_listeners,
    read_transfer_result,
    run_check,
)
from pd_cluster.launch.model_path import DEMO_MODEL
from pd_cluster.launch.preflight import MachineFacts
from pd_cluster.launch.sockets import listen, port_of
from pd_cluster.launch.up_flags import POOL_CONNECTORS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("status", "out", "err", "verdict", "says"),
    [
        (0, '{"bytes": 2000000000, "seconds": 0.5, "device": "cpu", "listeners": []}', "", Verdict.OK, "4000 MB/s"),
        (0, 'noise\n{"bytes": 1000, "seconds": 1e-3, "device": "cpu", "listeners": []}\n', "", Verdict.WARN, "1 MB/s"),
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
    out = f'{{"bytes": 1, "seconds": 1.0, "device": "cpu", "listeners": {listeners}}}'
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
    monkeypatch.setattr(MachineFacts, "has_module", lambda machine, name: True)
    assert check_connector(connector).verdict is Verdict.OK
    monkeypatch.setattr(MachineFacts, "has_module", lambda machine, name: name != connector)
    missing = check_connector(connector)
    assert (missing.verdict, f"pd-cluster[{connector}]" in missing.detail) == (Verdict.FAIL, True)


def test_an_unknown_connector_is_told() -> None:
    assert check_connector("foo").verdict is Verdict.FAIL
    assert check_connector("none").verdict is Verdict.OK


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
    assert check_model(str(tmp_path)).verdict is Verdict.FAIL
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    assert "has no .safetensors file" in check_model(str(tmp_path)).detail
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    finding = check_model(str(tmp_path))
    assert finding.verdict is Verdict.OK
    architecture = json.loads((DEMO_MODEL / "config.json").read_text())["architectures"][0]
    assert architecture in finding.detail
    (tmp_path / "config.json").write_text("{")
    assert check_model(str(tmp_path)).verdict is Verdict.FAIL


def test_the_status_is_that_of_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PD_CLUSTER_KEY", "x")
    monkeypatch.setattr(check, "DEFAULT_PORTS", ())
    given = {"connector": "none", "port": None, "cluster_key_file": ""}
    assert run_check(argparse.Namespace(model=str(DEMO_MODEL), **given)) == 0
    out = capsys.readouterr().out
    assert "fail" not in out
    assert "max_num_seqs" in out, "what a node would serve at once"
    assert run_check(argparse.Namespace(model=str(tmp_path), **given)) == 1
    assert "fail" in capsys.readouterr().out


@pytest.mark.integration
def test_a_real_transfer() -> None:
    pytest.importorskip("nixl_cu13")
    finding, network = check.check_transfer("127.0.0.1", "")
    assert network.verdict is Verdict.OK
    assert network.detail.startswith("UCX listens on 127.0.0.1:")
    assert finding.verdict is not Verdict.FAIL, finding.detail
    assert "MB/s between two processes" in finding.detail
