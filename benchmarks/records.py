"""The history of measurements: one JSON line for each run, in `benchmarks/results/`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pd_cluster.bench.report import SCHEMA, environment
from pd_cluster.errors import StartupError

RESULTS = Path("benchmarks/results")


def append_record(path: Path, kind: str, fields: dict[str, Any]) -> None:
    """Append one line: schema, kind, the machine and the commit, then `fields`. Raises StartupError."""
    record = {"schema": SCHEMA, "kind": kind, "environment": environment(), **fields}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StartupError(f"the record cannot be written: {error}") from error
