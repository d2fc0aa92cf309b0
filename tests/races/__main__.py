"""`python -m tests.races [PATHS]`: names the tests that depend on how fast the machine is.

Exit status 1: there is one that `excused.toml` does not list, or an excuse for none.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import TYPE_CHECKING

from tests.races import excused
from tests.races.rules import search
from tests.races.sources import ROOT, Sources

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.races", description=__doc__)
    parser.add_argument("paths", nargs="*", help="only files under one of these, as tests/engine")
    parser.add_argument("--counts", action="store_true", help="numbers by folder and rule alone")
    options = parser.parse_args(arguments)
    found = search(Sources(ROOT))
    remaining, unused = excused.left(found, excused.read(excused.LIST.read_text()))
    paths = tuple(path.removeprefix("./").rstrip("/") for path in options.paths)
    shown = [one for one in remaining if not paths or one.path.startswith(paths)]
    if not options.counts:
        for one in shown:
            sys.stdout.write(f"{one.path}:{one.line}: {one.rule}: {one.function}: {one.text}\n")
    for (folder, rule), count in sorted(Counter((folder_of(one.path), one.rule) for one in shown).items()):
        sys.stdout.write(f"{count:4} {folder} {rule}\n")
    for excuse in unused:
        sys.stdout.write(f"excuses nothing: {excuse}\n")
    return 1 if shown or unused else 0


def folder_of(path: str) -> str:
    return "/".join(path.split("/")[:2]) if path.count("/") > 1 else "tests"


if __name__ == "__main__":
    sys.exit(main())
