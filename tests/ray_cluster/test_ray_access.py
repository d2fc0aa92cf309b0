"""Token authentication before anything is connected."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import ray

from pd_cluster.errors import StartupError
from pd_cluster.launch.cli import main
from pd_cluster.launch.on_ray import connect
from pd_cluster.launch.on_ray.connect import check_address, connected, prepare_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_mode_is_set_explicitly(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    prepare_environment(environ, tmp_path, joins=False)  # Ray makes a token for a cluster of its own
    assert environ["RAY_AUTH_MODE"] == "token"
    assert environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_joining_needs_a_token(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"needs its token: put it into ~/\.ray/auth_token"):
        prepare_environment({}, tmp_path, joins=True)


@pytest.mark.parametrize("where", ["environment", "named file", "file of the user"])
def test_each_of_rays_places_for_a_token_will_do(tmp_path: Path, where: str) -> None:
    file = tmp_path / ".ray" / "auth_token"
    if where != "environment":
        file.parent.mkdir()
        file.write_text("t")
    given = {"environment": {"RAY_AUTH_TOKEN": "t"}, "named file": {"RAY_AUTH_TOKEN_PATH": str(file)}}
    home = tmp_path if where == "file of the user" else tmp_path / "no_home"
    environ = given.get(where, {})
    prepare_environment(environ, home, joins=True)
    assert environ["RAY_AUTH_MODE"] == "token"


def test_a_mode_without_authentication_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="RAY_AUTH_MODE is 'disabled'"):
        prepare_environment({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "t"}, tmp_path, joins=True)


def test_a_token_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"there is no file .*missing"):
        prepare_environment({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "missing")}, tmp_path, joins=False)


def test_the_command_line_says_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["ray", "status", "--address=auto"]) == 2
    assert "joining a Ray cluster needs its token" in capsys.readouterr().err
    assert main(["ray", "scale"]) == 2
    assert "name a role to scale" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["ray", "scale", "--decode=-1"])


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", "host:port", ":1"])
def test_an_address_that_cannot_be_one_is_named(address: str) -> None:
    with pytest.raises(StartupError, match="bad Ray address"):
        check_address(address)


def test_an_address_without_a_listener_is_refused_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(StartupError, match=r"no Ray cluster answers at 127\.0\.0\.1"):
            check_address(f"127.0.0.1:{taken.getsockname()[1]}")


def _unused(*_: object, **__: object) -> None:
    raise AssertionError("Ray would start a worker")


def test_a_ray_that_does_not_start_ends_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nMore")

    monkeypatch.setenv("RAY_AUTH_MODE", "token")  # given back after it
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setattr(ray, "init", fails)
    told = r"^cannot reach a Ray on this machine: The current node[^\n]*startup\.$"
    with pytest.raises(StartupError, match=told), connected("one", ""):
        pass


def test_a_running_controller_tells_the_mode_without_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is on Ray's head, and that one's mode counts. `ray.get` stands for an answer at once."""
    told = ["token", "disabled"]
    asked = SimpleNamespace(authentication_mode=SimpleNamespace(remote=lambda: told.pop(0)))
    monkeypatch.setattr(connect, "find_controller", {"pd": asked}.__getitem__)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(ray, "remote", _unused)
    connect._check_authentication("a:1", "pd", sends_key=False)
    with pytest.raises(StartupError, match="a:1 runs without token authentication"):
        connect._check_authentication("a:1", "pd", sends_key=False)
    assert not told


def _tell_by_tasks(monkeypatch: pytest.MonkeyPatch, find: Callable[[str], object]) -> None:
    """Tasks on the head tell a mode with a token, then one without."""
    told = ["disabled", "Token"]
    task = SimpleNamespace(remote=lambda: told.pop())
    monkeypatch.setattr(connect, "find_controller", find)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    monkeypatch.setattr(ray, "remote", lambda **wanted: lambda function: task)


@pytest.mark.parametrize("why", [StartupError("none"), ray.exceptions.GetTimeoutError(), None])
def test_without_an_answer_of_a_controller_a_task_tells_the_mode(
    why: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(name: str) -> object:
        if why:
            raise why
        return SimpleNamespace()  # of an earlier version

    _tell_by_tasks(monkeypatch, find)
    connect._check_authentication("a:1", "pd", sends_key=False)
    with pytest.raises(StartupError, match="without token authentication"):
        connect._check_authentication("a:1", "pd", sends_key=False)


def test_a_mistake_in_asking_a_controller_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    _tell_by_tasks(monkeypatch, lambda name: SimpleNamespace(authentication_mode=SimpleNamespace()))
    with pytest.raises(AttributeError, match="remote"):
        connect._check_authentication("a:1", "pd", sends_key=False)


def test_no_controller_is_believed_before_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokens, any client may start an actor of its name."""
    _tell_by_tasks(monkeypatch, _unused)
    connect._check_authentication("a:1", "pd", sends_key=True)
    with pytest.raises(StartupError, match="without token authentication"):
        connect._check_authentication("a:1", "pd", sends_key=True)
