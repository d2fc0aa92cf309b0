"""Commands in environments as containers and services have them: each starts, or says in one line what to do."""

from __future__ import annotations

import getpass
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pd_cluster.errors import StartupError
from pd_cluster.launch import environment
from pd_cluster.launch.cli import main
from pd_connectors.protocol.keys import load_cluster_key
from tests.cluster import READY_DEADLINE_S
from tests.deadlines import HANG_S

NO_HOME = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CONFIG_HOME", "PD_CLUSTER_KEY", "HF_HOME")
# Each line is a command that ends by itself: what it must say, and with which status
COMMANDS = {
    "mixed --device cpu --port 0": (2, "$PD_CLUSTER_KEY"),
    "prefill --device cpu --port 0 --model ~/nothing": (2, "$PD_CLUSTER_KEY"),
    "router --port 0 --mixed http://127.0.0.1:1": (2, "$PD_CLUSTER_KEY"),
    "nodes list --router http://127.0.0.1:1": (1, "no answer from a router"),
    "nodes drain x --router http://127.0.0.1:1": (2, "$PD_CLUSTER_KEY"),
    "bench serve --url http://127.0.0.1:1": (2, "http://127.0.0.1:1"),
    "keys new a'b": (2, "keys new"),
}


def run(command: list[str], before: str = "", **settings: object) -> subprocess.CompletedProcess[str]:
    """`pd-cluster` with these arguments, after the lines of shell in `before`."""
    words = [sys.executable, "-m", "pd_cluster.launch.cli", *command]
    shell = ["bash", "-c", f'{before}\nexec "$@"', "bash", *words]
    return subprocess.run(  # type: ignore[call-overload,no-any-return]
        shell, capture_output=True, text=True, encoding="utf-8", timeout=READY_DEADLINE_S, **settings
    )


def without_home(**more: str) -> dict[str, str]:
    """The environment of a user id without an entry: such an id is simulated in `unmapped`."""
    return {name: value for name, value in os.environ.items() if name not in NO_HOME} | more


def can_unshare() -> bool:
    try:
        return subprocess.run(["unshare", "-U", "--map-user=54321", "true"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


UNMAPPED = "unshare -U --map-user=54321 --map-group=54321"


EACH = """
import os, sys
from pd_cluster.bench import serve, serve_turns
from pd_cluster.engine.process import spawn_engine
from pd_cluster.launch import node_commands, node_process, preflight
from pd_cluster.launch.cli import main
from pd_router import app
for number, command in enumerate(sys.argv[1:]):
    if (child := os.fork()) == 0:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{name}", os.O_CREAT | os.O_WRONLY), fd)
        sys.exit(main(command.split()))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.integration
def test_a_user_without_an_entry_and_a_home(tmp_path: Path) -> None:
    """Case 18 of the public cases. Each command is a process, and what all import is imported once."""
    if not can_unshare():
        pytest.skip("unshare -U --map-user does not work here")
    words = [*UNMAPPED.split(), sys.executable, "-c", EACH, *COMMANDS]
    done = subprocess.run(
        words, capture_output=True, text=True, env=without_home(), cwd=tmp_path, timeout=READY_DEADLINE_S
    )
    statuses = list(map(int, done.stdout.split()))
    assert (len(statuses), done.stderr) == (len(COMMANDS), "")
    for number, (command, (status, words_said)) in enumerate(COMMANDS.items()):
        said = (tmp_path / f"{number}.err").read_text()
        assert (statuses[number], "Traceback" in said) == (status, False), f"{command}: {said}"
        assert words_said in said, command
        assert len(said.splitlines()) == 1, f"{command}: {said}"
    assert not (tmp_path / "~").exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("ulimit -n 40", "40 open files are allowed and 128 needed: raise the limit (ulimit -Hn)"),
        ("mkdir gone; cd gone; rmdir ../gone", "the working directory is gone"),
        ("export LC_ALL=C PYTHONUTF8=0 TMPDIR=$PWD/ä; mkdir ä", "this locale has no letters for"),
    ],
)
def test_what_cannot_be_mended_is_one_line(before: str, said: str, tmp_path: Path) -> None:
    done = run(["mixed", "--device=cpu", "--port=0", "--model=/nothing"], before, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.integration
@pytest.mark.parametrize(
    "before",
    [
        "export LC_ALL=POSIX PYTHONWARNINGS=error; ulimit -Sn 40",
        "export LC_ALL=xx_YY.UTF-8 TMPDIR=/nothing; exec 0<&-",
        "export PYTHONIOENCODING=ascii; umask 777",
    ],
)
def test_what_can_be_mended_is(before: str, tmp_path: Path) -> None:
    """As far as the model, which is not there: its path has letters and blanks that no locale need have.

    What is in one row is mended in places that do not know of each other.
    """
    (tmp_path / "ä b").mkdir()
    done = run(
        ["mixed", "--device=cpu", "--port=0", "--model=./größe"], before, cwd=tmp_path / "ä b",
        env={**os.environ, "PD_CLUSTER_KEY": "k"},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "neither a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_key_says_what_to_set_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NO_HOME:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(ValueError, match="set \\$PD_CLUSTER_KEY"):
        load_cluster_key()
    blocked = Path(__file__) / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(blocked))
    with pytest.raises(OSError, match="set \\$PD_CLUSTER_KEY"):
        load_cluster_key()


def test_light_commands_need_no_place_to_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: 1 / 0)
    assert main(["keys", "new", "mine"]) == 0
    assert "mine" in capsys.readouterr().out


def test_no_temporary_directory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(StartupError, match="set \\$TMPDIR: No usable"):
        environment.prepare({})


def test_a_user_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (KeyError("uid not found"), OSError("no username set")):

        def unknown(error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(getpass, "getuser", unknown)
        environ: dict[str, str] = {}
        environment.name_user(environ)
        assert environ == {"LOGNAME": f"uid-{os.getuid()}"}


def test_caches_go_where_they_can_be_written(tmp_path: Path) -> None:
    """What is set stays; a home that can only be read keeps its downloads."""
    home, environ = tmp_path / "home", {"TRITON_CACHE_DIR": "/mine"}
    home.mkdir()
    environment.name_caches(environ, home, tmp_path)
    assert environ == {"TRITON_CACHE_DIR": "/mine"}
    own = tmp_path / f"pd-cluster-{os.getuid()}"
    environment.name_caches(environ, tmp_path / "missing", tmp_path)
    assert environ == {"TRITON_CACHE_DIR": "/mine", "MPLCONFIGDIR": str(own / "matplotlib")}
    assert own.stat().st_mode & 0o777 == 0o700
    environ = {}
    environment.name_caches(environ, Path("~"), tmp_path)
    assert environ == {
        "TRITON_CACHE_DIR": str(own / "triton"),
        "MPLCONFIGDIR": str(own / "matplotlib"),
        "HF_HOME": str(own / "huggingface"),
    }


@pytest.mark.parametrize("what", ["writable", "file", "link"])
def test_no_cache_is_read_from_a_directory_of_others(what: str, tmp_path: Path) -> None:
    taken = tmp_path / f"pd-cluster-{os.getuid()}"
    if what == "file":
        taken.touch()
    elif what == "link":
        taken.symlink_to(tmp_path)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    assert environment.own_directory(tmp_path) != taken


@pytest.mark.long
def test_closed_streams_are_opened_again() -> None:
    """A child shows it: this process needs its own."""
    code = (
        "import os, sys; from pd_cluster.launch.environment import open_streams; open_streams();"
        "assert os.dup(0) > 2; print('x'); sys.stdout.flush(); sys.stdin.read(); open(sys.argv[1], 'w').write('done')"
    )
    told = subprocess.run(
        ["bash", "-c", 'exec "$@" 0<&- 1>&-', "bash", sys.executable, "-c", code, "/dev/stderr"],
        stderr=subprocess.PIPE, text=True, timeout=HANG_S,
    )  # fmt: skip
    assert told.stderr == "done"


def test_streams_write_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    environment.open_streams()
    sys.stdout.write("größe")
    sys.stdout.flush()
    assert raw.getvalue() == b"gr\\xf6\\xdfe"


def test_no_process_imports_from_the_directory_where_it_is_started() -> None:
    """`zmq.py` of a user would be imported instead of the package: each command of the package says -P."""
    root = Path(__file__).parents[2]
    for package in ("pd_cluster", "router", "connectors"):
        for path in (root / package).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                if 'sys.executable, "' in line:
                    assert 'sys.executable, "-P", "' in line, f"{path}: {line}"


def test_light_commands_refuse_what_the_locale_has_no_letters_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pd-cluster", "nodes", "list", "--router", "http://x/\udcc3"])
    assert main(sys.argv[1:]) == 2
    assert "set LC_ALL=C.UTF-8" in capsys.readouterr().err
