"""The sockets' directory ends with its node, and what killed nodes left behind ends with the next one's start."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from pd_cluster.launch.socket_dir import PREFIX, socket_directory

if TYPE_CHECKING:
    from pathlib import Path

HOLDER = """
import sys
from pathlib import Path
from pd_cluster.launch.socket_dir import socket_directory
with socket_directory(Path(sys.argv[1])) as path:
    sys.stdout.write(f"{path}\\n")
    sys.stdout.flush()
    sys.stdin.readline()
"""


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_it_is_private_and_goes_with_its_block(tmp_path: Path) -> None:
    with socket_directory(tmp_path) as path:
        assert path.stat().st_mode & 0o777 == 0o700
        bind(path / "engine")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_node_left_is_removed_and_what_lives_stays(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    held = tmp_path / holder.stdout.readline().strip()
    bind(held / "engine")
    with socket_directory(tmp_path) as mine, socket_directory(tmp_path) as other:
        assert sorted(tmp_path.iterdir()) == sorted([held, mine, other])
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdin.close()
    holder.stdout.close()
    assert held.exists()
    with socket_directory(tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine]


def test_nothing_but_sockets_is_ever_removed(tmp_path: Path) -> None:
    precious = tmp_path / f"{PREFIX}mine"
    precious.mkdir()
    (precious / "thesis").write_text("years")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = tmp_path / f"{PREFIX}link"
    link.symlink_to(elsewhere)
    with socket_directory(tmp_path):
        pass
    assert (precious / "thesis").read_text() == "years"
    assert link.is_symlink()
    assert elsewhere.is_dir()
