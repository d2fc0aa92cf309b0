"""What host memory is free, by files of a machine and its control groups, and the lines that refuse a start."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pd_cluster.worker.host_room import free_host_bytes, host_problem

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9


def write(root: Path, files: dict[str, object]) -> None:
    """Fake files of /proc and /sys under `root`."""
    for name, text in {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable: 50000000 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))


def test_a_machine_without_control_groups_has_what_is_available(tmp_path: Path) -> None:
    write(tmp_path, {})
    assert free_host_bytes(tmp_path) == 51_200_000_000


@pytest.mark.parametrize(
    ("limits", "free"),
    [
        ({"a/b": ("max", 3), "a": ("max", 3)}, 51_200_000_000),
        ({"a/b": (20 * GB, 5 * GB), "a": ("max", 9)}, 15 * GB),
        ({"a/b": (20 * GB, 5 * GB), "a": (8 * GB, 6 * GB)}, 2 * GB),  # that of the group above
        ({".": (9 * GB, GB)}, 8 * GB),  # a container sees its own group as the root, under a path of the host
        ({"a/b": (5 * GB, 6 * GB)}, 0),
    ],
)
def test_the_least_room_of_all_groups_counts(tmp_path: Path, limits: dict[str, tuple[object, int]], free: int) -> None:
    files: dict[str, object] = {"proc/self/cgroup": "0::/a/b\n"}
    for group, (limit, use) in limits.items():
        files |= {f"sys/fs/cgroup/{group}/memory.max": f"{limit}\n", f"sys/fs/cgroup/{group}/memory.current": use}
    write(tmp_path, files)
    assert free_host_bytes(tmp_path) == free


def test_pages_of_files_are_given_up_for_blocks(tmp_path: Path) -> None:
    """After a start they hold the weights."""
    own = "sys/fs/cgroup/a/memory."
    write(tmp_path, {
        "proc/self/cgroup": "0::/a\n", own + "max": 30 * GB, own + "current": 29 * GB,
        own + "stat": f"anon 5\ninactive_file {12 * GB}\nactive_file {4 * GB}\n",
    })  # fmt: skip
    assert free_host_bytes(tmp_path) == 17 * GB


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    own = "sys/fs/cgroup/memory/x/memory."
    write(tmp_path, {
        "proc/self/cgroup": "9:cpu:/x\n4:memory:/x\n0::/\n", own + "limit_in_bytes": 12 * GB,
        own + "usage_in_bytes": 4 * GB, own + "stat": f"inactive_file 7\ntotal_inactive_file {GB}\n",
    })  # fmt: skip
    assert free_host_bytes(tmp_path) == 9 * GB


def test_this_machine_has_some() -> None:
    assert free_host_bytes() > 0


def test_the_lines() -> None:
    assert host_problem("--host-cache-gb", 0, 8, 0) == ""
    assert host_problem("--host-cache-gb", 60, 1, 64 * GB) == ""
    assert host_problem("--host-cache-gb", 60, 2, 64 * GB) == (
        "--host-cache-gb 60 for each of 2 ranks: this machine, or its control group, has 64.0 GB free, and 4 GB of it "
        "stay free; give at most 30.0"
    )
    assert host_problem("--swap-gb", 0.5, 1, GB).endswith("has 1.0 GB free, and 4 GB of it stay free; give at most 0.0")
