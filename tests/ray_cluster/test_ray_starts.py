"""Ray nodes of tests: one that Ray itself gives up begins anew once, and its logs are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster import LaunchFailed
from tests.ray_cluster import machines
from tests.ray_cluster.machines import Machines

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster import Launcher

pytestmark = pytest.mark.integration
STAND_IN = """#!/bin/bash
echo start >> {root}/starts
mkdir -p {root}/session_1/logs
echo "the raylet's end" > {root}/session_1/logs/raylet.out
[ $(wc -l < {root}/starts) -lt {first} ] && exit 1
echo "  ray start --address='192.0.2.9:6379'"
exec sleep 600
"""


def stand_in(root: Path, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Ray's command: it gives up before its `first` start."""
    path = root / "ray"
    path.write_text(STAND_IN.format(root=root, first=first))
    path.chmod(0o755)
    monkeypatch.setattr(machines, "RAY", path)


def test_a_head_that_gave_up_begins_anew(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(tmp_path, 2, monkeypatch)
    with Machines(launcher, tmp_path) as found:
        assert found.address == "192.0.2.9:6379"
        assert found.running == [found.head]
    assert "the raylet's end" in caplog.text


def test_a_head_that_gives_up_twice_fails_with_its_logs(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, 9, monkeypatch)
    with pytest.raises(LaunchFailed, match="the raylet's end"):
        Machines(launcher, tmp_path)
    assert (tmp_path / "starts").read_text().count("start") == 2
