"""Which files count, from made-up traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.files_to_open import SERVING, files_in_every_window, read_calls
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = {
    1: (0, "python -m pd_cluster.launch.cli up"),
    2: (1, "python -m pd_cluster.launch.cli prefill --port 1"),
    3: (2, "python -m pd_cluster.engine.process ipc:///a"),
    4: (1, "python -m pd_cluster.launch.cli decode --port 2"),
    5: (4, "python -m pd_cluster.engine.process ipc:///b"),
    6: (1, "python -m pd_cluster.launch.cli router --prefill x --decode y"),
}
CALLS = {
    3: ["9 pd_cluster/models/m.py Model.f", "10 a.py Pipe.retire", "11 b.py g", "14 a.py Pipe.retire",
        "29 pd_cluster/models/m.py Model.f", "30 a.py Pipe.retire", "31 b.py g"],
    5: ["9 early.py f", "12 c.py f", "13 timer.py f", "32 c.py g", "60 late.py f"],
}  # fmt: skip


def written(out: Path) -> Path:
    for number, (parent, command) in COMMANDS.items():
        lines = [f"{parent} {command}", *CALLS.get(number, [])]
        (out / f"{number}.calls").write_text("".join(line + "\n" for line in lines))
    return out


def test_files_that_ran_between_the_step_and_the_first_bytes_of_every_request(tmp_path: Path) -> None:
    calls = read_calls(written(tmp_path))
    assert set(calls) == set(SERVING)
    found = files_in_every_window(calls, [20, 50], "retire")
    assert found == {"P's engine": {"a.py", "b.py"}, "D's engine": {"c.py"}, "D": set(), "P": set(), "router": set()}


def test_a_function_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="launch not after it"):
        files_in_every_window(read_calls(written(tmp_path)), [20], "launch")
