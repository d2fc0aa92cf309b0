"""`python -m tests.mutation`: plants the mutants, shows what became of them by file and operator.

Exit status 1: one survived that survivors.toml does not list.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from typing import TYPE_CHECKING

from tests.mutation import survivors
from tests.mutation.operators import mutants
from tests.mutation.runner import End, Limits, diff, preload, run_all
from tests.mutation.sample import draw
from tests.mutation.targets import TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.mutation.operators import Mutant
    from tests.mutation.runner import Run
    from tests.mutation.targets import Target

DEFAULT_SEED = 1
DEFAULT_PER_FILE = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = _parser().parse_args(arguments)
    listed = survivors.read(survivors.LIST.read_text())
    preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by which the runs end too
    report = Report(listed, options.verbose)
    for target in TARGETS:
        if not options.file or any(name in target.file for name in options.file):
            drawn = draw(mutants(target.file, target.source), options.per_file, options.seed)
            report.test(
                target, [m for m in drawn if not options.operator or m.operator in options.operator], options.jobs
            )
    report.show()
    return 1 if report.unlisted else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("file", nargs="*", help="only targets with one of these in the name")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="which mutants are drawn")
    parser.add_argument("--per-file", type=int, default=DEFAULT_PER_FILE, help="how many of each file")
    parser.add_argument("--operator", action="append", help="only this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--verbose", action="store_true", help="name every mutant and the test that killed it")
    return parser


class Report:
    """What became of the mutants."""

    def __init__(self, listed: dict[tuple[str, ...], str], verbose: bool) -> None:
        self._listed = listed
        self._verbose = verbose
        self._counts: Counter[tuple[str, str]] = Counter()  # (file or operator, column)
        self._names: dict[str, None] = {}
        self._killed_listed: list[Mutant] = []
        self._cpu_s = 0.0
        self.unlisted: list[Mutant] = []

    def test(self, target: Target, drawn: Sequence[Mutant], jobs: int) -> None:
        """Run the target's tests without a mutant, then over each of `drawn`. Raises RuntimeError when they fail so."""
        source = target.source
        plain: list[Run] = []
        run_all(target, [source], Limits(), 1, lambda index, run: plain.append(run))
        if plain[0].end is not End.SURVIVED:
            raise RuntimeError(f"the tests of {target.file} fail without a mutant:\n{plain[0].output}")
        _say(f"{target.file}: {len(drawn)} mutants; its tests take {plain[0].cpu_s:.1f} s of CPU")
        sources = [mutant.apply(source) for mutant in drawn]
        run_all(target, sources, Limits.after(plain[0]), jobs, lambda index, run: self._take(drawn[index], run, source))

    def _take(self, mutant: Mutant, run: Run, source: str) -> None:
        self._cpu_s += run.cpu_s
        is_listed = mutant.key in self._listed
        column = run.end if run.end is not End.SURVIVED else "listed" if is_listed else "survived"
        for name in (mutant.file, f"  {mutant.operator}"):
            self._counts[name, "mutants"] += 1
            self._counts[name, column] += 1
            self._names[name] = None
        if self._verbose:
            failed = next((line for line in run.output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
            _say(f"{run.end} {mutant.file}:{mutant.lineno} {mutant.operator}: {mutant.change} {failed[:160]}")
        if run.end is End.STOPPED:
            _say(f"stopped after {run.cpu_s:.0f} s of CPU: {mutant.file}:{mutant.lineno} {mutant.change}")
        if run.end is not End.SURVIVED and is_listed:
            self._killed_listed.append(mutant)
        elif run.end is End.SURVIVED and not is_listed:
            self.unlisted.append(mutant)
            _say(f"SURVIVED {mutant.file}:{mutant.lineno} in {mutant.function} ({mutant.operator})")
            for line in diff(mutant, source):
                _say(f"    {line}")

    def show(self) -> None:
        """The table, what to add to the list, and what to take from it."""
        columns = ("mutants", "killed", "stopped", "listed", "survived")
        rows = sorted(self._names, key=lambda name: (name.startswith(" "), name))
        width = max(map(len, rows), default=0)
        _say("")
        _say(" " * width + "".join(column.rjust(10) for column in columns))
        for name in rows:
            _say(name.ljust(width) + "".join(str(self._counts[name, column]).rjust(10) for column in columns))
        totals = [sum(self._counts[name, column] for name in rows if not name.startswith(" ")) for column in columns]
        _say("together".ljust(width) + "".join(str(total).rjust(10) for total in totals))
        _say(f"{self._cpu_s / 60:.0f} minutes of CPU")
        for mutant in self._killed_listed:
            _say(f"listed as a survivor, but killed: {mutant.file}:{mutant.lineno} {mutant.change}")
        if self.unlisted:
            _say(f"\nno test finds these; kill them, or list them in {survivors.LIST.name} with a reason:\n")
            _say(survivors.entries(self.unlisted))


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
