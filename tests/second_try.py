"""Runs pytest, and runs the tests that failed once more: `python -m tests.second_try ARGUMENTS`.

Two halves of the suite share two cores, so a test may fail because the machine was busy. If at most MOST tests failed,
only these run again, in a process of their own, and the run passes if they pass. They are named at the end: such a test
is a defect, of the test or of the product.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 4
FAILED = 1  # pytest's status when tests have failed


def run(cache: Path, *arguments: str) -> int:
    """The status of pytest with these arguments, which remembers failures in `cache`."""
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *arguments]
    return subprocess.run(command, check=False).returncode


def failures(cache: Path) -> list[str]:
    """The tests that failed in the last run with this cache."""
    path = cache / "v" / "cache" / "lastfailed"
    return list(json.loads(path.read_text())) if path.is_file() else []


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="pd-tests-") as directory:
        cache = Path(directory, "cache")
        status = run(cache, *arguments)
        failed = failures(cache)
        if status != FAILED or not 0 < len(failed) <= MOST:
            return status
        sys.stdout.write(f"\n{len(failed)} of the tests failed and run again, alone:\n")
        sys.stdout.flush()
        status = run(cache, "--last-failed", *arguments)
        if not status:
            sys.stdout.write("\nPASSED AT THE SECOND TRY ONLY, to be mended:\n" + "".join(f"  {one}\n" for one in failed))
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
