"""The table of the tests in `CONTRIBUTING.md`: what each folder tests, what it takes, when its slow tests ran last.

The seconds and the runs are what runs of the tests have written (`tests/recorded_runs.py`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from docs.generate.document import ROOT, code, table
from tests.recorded_runs import folder_of, seconds_by_file, slow_runs

if TYPE_CHECKING:
    from collections.abc import Mapping

DOCUMENT = "CONTRIBUTING.md"
FOLDERS = {
    "tests": ("rules of the repository, lint, the tests' own machinery", ""),
    "tests/balancing": ("decisions about roles, and their loop beside faults", ""),
    "tests/benchmarks": ("the measuring programs", ""),
    "tests/conformance": ("every connector's promises", "ranked pools, simulated ranks"),
    "tests/connectors": ("wire, lease, load, their simulation", "longer simulations, ends of Mooncake"),
    "tests/deploy": ("chart, images, workflow", "a built image, the smoke test"),
    "tests/docs": ("pages, examples, the site", ""),
    "tests/engine": ("the step loop over a real worker", "the other half of prompts' outputs"),
    "tests/http": ("connections, frames, dialects", "stock clients, their types"),
    "tests/integration": ("whole clusters: parity, faults, drains, pools", "open loop, ranks, gateways, other clients"),
    "tests/kernels": ("kernels beside their references", "more shapes in Triton's interpreter"),
    "tests/launch": ("flags, preflight, `up`, processes", "a wheel, Mooncake and a key under `up`"),
    "tests/models": ("families, configs, fingerprints", "more families of transformers"),
    "tests/mutation": ("planted bugs are found", "a sample of mutants"),
    "tests/planning": ("the simulator, tables of steps, plans", ""),
    "tests/ray_cluster": ("the Ray controller", "further faults, a local `ray up`"),
    "tests/router": ("the router over fake nodes", "a cut after each frame, long simulations"),
    "tests/scheduling": ("queues, memory, planner: tables, state machine, random walk", "more seeds"),
    "tests/security": ("strangers, forged tickets, fuzzing, listening sockets", "soak, chaos, storms"),
    "tests/server": ("endpoints and fields over a fake engine", "published templates, bounds of time"),
    "tests/worker": ("steps beside transformers", "more variants"),
    "tests/world": ("bodies of real clients", "real tokenizers, clients, weights"),
}
"""Folder -> what its tests are about; what its slow ones add."""


def seconds() -> str:
    """Raises ValueError for a folder that FOLDERS does not name, or names in vain."""
    there = {folder_of(str(path.relative_to(ROOT))) for path in (ROOT / "tests").rglob("test_*.py")}
    if there != FOLDERS.keys():
        raise ValueError(f"name in FOLDERS: {sorted(there ^ FOLDERS.keys())}")
    took: dict[str, float] = defaultdict(float)
    for file, took_s in seconds_by_file().items():
        took[folder_of(file)] += took_s
    rows = [(code(folder), what, f"{took[folder]:.0f}") for folder, (what, _) in FOLDERS.items()]
    return table(("folder", "what it tests", "s"), [*rows, ("all", "", f"{sum(took.values()):.0f}")])


def slow() -> str:
    """When each folder's slow tests ran last, at which commit."""
    runs = slow_runs()
    rows = [(code(folder), more, _last(runs.get(folder))) for folder, (_, more) in FOLDERS.items() if more]
    return table(("folder", "what `slow` adds", "ran last"), rows)


def _last(run: Mapping[str, Any] | None) -> str:
    if run is None:
        return ""
    ends = ", ".join(f"{run[name]} {name}" for name in ("passed", "failed", "skipped") if run[name])
    return f"{run['on']}, {run['commit']}: {ends}, {run['seconds'] / 60:.0f} min"


PARTS = {"seconds": seconds, "slow": slow}
