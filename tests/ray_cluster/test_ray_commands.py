"""What `up` and `scale` tell while they wait."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.launch.on_ray import commands
from pd_cluster.launch.on_ray.cluster import reason
from pd_cluster.launch.on_ray.controller import ClusterStatus, UnitStatus
from pd_cluster.launch.on_ray.unit import UnitPhase

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_S = 60.0


def status(phase: UnitPhase, *problems: str, whole: bool = False, failures: int = 0) -> ClusterStatus:
    unit = UnitStatus(phase, 0.0, "a", "h", url="http://h:1", detail="for 1 CPU", name="decode-1", role="decode")
    return ClusterStatus("pd", {"decode": 1, "router": 1}, False, whole, (unit,), {"decode": failures}, problems)


class Told:
    """A controller that tells one status after the other."""

    def __init__(self, *told: ClusterStatus) -> None:
        self._told: Iterator[ClusterStatus] = iter(told)

    def status(self) -> ClusterStatus:
        return next(self._told)


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(method: Any, *arguments: Any, deadline_s: float = 0.0) -> Any:
        return method(*arguments)

    monkeypatch.setattr(commands, "_ask", ask)
    monkeypatch.setattr(commands, "POLL_S", 0.0)


def test_what_is_new_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = status(UnitPhase.WAITING, "old", "new")
    whole = status(UnitPhase.READY, "new", "newer", whole=True)  # "old" is no longer kept
    assert commands._wait_whole(Told(waiting, waiting, whole), DEADLINE_S, threading.Event(), ["old"]) is whole
    assert capsys.readouterr().out.splitlines() == [
        "decode-1: waiting for 1 CPU", "new", "decode-1: ready on http://h:1", "newer",
    ]  # fmt: skip


def test_what_never_comes_up_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    failing = status(UnitPhase.STARTING, failures=commands.MAX_FAILURES)
    assert commands._wait_whole(Told(failing), DEADLINE_S, threading.Event()) is None
    assert capsys.readouterr().out.splitlines()[-1] == "3 processes in a row did not become ready: decode"


def test_nor_is_anything_longer_than_the_user_likes() -> None:
    stop = threading.Event()
    assert commands._wait_whole(Told(status(UnitPhase.STARTING)), 0.0, stop) is None
    stop.set()
    assert commands._wait_whole(Told(status(UnitPhase.STARTING)), DEADLINE_S, stop) is None


def test_the_table_tells_a_doubt_and_how_long_each_unit_has_been_silent() -> None:
    told = status(UnitPhase.READY)
    units = tuple(replace(told.units[0], name=f"decode-{i}", silent_s=s) for i, s in enumerate((4.9, 7.2)))
    lines = commands.table(replace(told, units=units, doubt="only 1 of 4 units answer this controller"))
    assert lines[2].split() == ["decode-0", "ready", "http://h:1", "-", "a", "h"]
    assert lines[3].startswith("decode-1  ready, silent for 7 s  http://h:1")
    assert lines[4].startswith("doubt: only 1 of 4 units answer this controller; silent units are kept")
    assert commands.table(told)[-1].startswith("decode-1")


def test_of_rays_words_the_reason_is_told() -> None:
    text = "The actor died unexpectedly before finishing this task.\n\tclass_name: UnitActor\nits node has died\n"
    assert reason(RuntimeError(text)) == "its node has died"
    assert reason(TimeoutError()) == "TimeoutError"
