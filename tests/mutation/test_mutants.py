"""The mutation runner itself: what it plants, what it draws, and that a planted bug is found."""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.mutation import survivors
from tests.mutation.operators import Mutant, mutants
from tests.mutation.runner import End
from tests.mutation.sample import draw
from tests.mutation.targets import ROOT, TARGETS

if TYPE_CHECKING:
    from pathlib import Path

SOURCE = '''"""A module."""
LIMIT = 3


def take(self, a: int, b: int = 7) -> None:
    """Takes 3."""
    log.info("one %d", 1)
    assert a < b
    if not a and b <= 2:
        raise ValueError(f"{a + 1}")
    self.total += max(a, b)
    self.move(a, b)


class Box:
    size: int = 4

    def both(self, é: bool) -> bool:
        return é == True
'''


def changes(source: str) -> set[tuple[str, str, str]]:
    return {(mutant.function, mutant.operator, mutant.change) for mutant in mutants("m.py", source)}


def test_the_operators_are_these() -> None:
    assert changes(SOURCE) == {
        ("take", "return-early", "... -> return"),
        ("take", "negate", "not a and b <= 2 -> (not (not a and b <= 2))"),
        ("take", "and-or", "not a and b <= 2 -> (not a or b <= 2)"),
        ("take", "drop-operand", "not a and b <= 2 -> (b <= 2)"),
        ("take", "drop-operand", "not a and b <= 2 -> (not a)"),
        ("take", "delete-not", "not a -> (a)"),
        ("take", "boundary", "b <= 2 -> (b < 2)"),
        ("take", "constant", "2 -> (3)"),
        ("take", "drop-statement", 'raise ValueError(f"{a + 1}") -> pass'),
        ("take", "drop-statement", "self.total += max(a, b) -> pass"),
        ("take", "arithmetic", "self.total += max(a, b) -> self.total -= max(a, b)"),
        ("take", "extreme", "max -> min"),
        ("take", "drop-statement", "self.move(a, b) -> pass"),
        ("take", "swap-arguments", "self.move(a, b) -> self.move(b, a)"),
        ("Box.both", "comparison", "é == True -> (é != True)"),
        ("Box.both", "constant", "True -> False"),
    }


def test_each_is_one_change_and_compiles() -> None:
    for mutant in mutants("m.py", SOURCE):
        changed = mutant.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)), mutant
        assert changed.count("\n") <= SOURCE.count("\n")


def test_a_mutant_keeps_its_name_when_other_lines_change() -> None:
    before = {mutant.key for mutant in mutants("m.py", SOURCE)}
    longer = SOURCE.replace("class Box", "def other(x: int) -> int:\n    return x + 1\n\n\nclass Box")
    assert before < {mutant.key for mutant in mutants("m.py", longer)}


def test_the_draw_follows_the_seed_and_spreads_over_the_operators() -> None:
    every = mutants("m.py", SOURCE)
    assert draw(every, 9, seed=1) == draw(reversed(every), 9, seed=1)
    assert {mutant.operator for mutant in draw(every, 12, seed=1)} == {mutant.operator for mutant in every}
    assert any(draw(every, 9, seed=1) != draw(every, 9, seed=seed) for seed in (2, 3, 4))
    assert draw(every, 1000, seed=1) == sorted(every, key=lambda m: (m.lineno, m.start, m.text))
    assert set(draw(every, 5, seed=1)) < set(draw(every, 9, seed=1)), "a larger draw has the smaller one in it"


@pytest.mark.long
def test_every_target_and_its_tests_are_there() -> None:
    for target in TARGETS:
        assert len(mutants(target.file, target.source)) > 19
        assert not [test for test in target.tests if not (ROOT / test).exists()]
    assert TARGETS[0].module == "pd_connectors.lease"


def test_the_list_of_survivors_gives_a_reason_for_each() -> None:
    assert all(len(reason) > 20 for reason in survivors.read(survivors.LIST.read_text()).values())
    every = mutants("m.py", SOURCE)
    text = survivors.entries(every)
    with pytest.raises(ValueError, match="no reason"):
        survivors.read(text)
    told = survivors.read(text.replace('reason = ""', 'reason = "it is so"'))
    assert told.keys() == {mutant.key for mutant in every}
    one = survivors.entries(every[:1]).replace('""', '"it is so"')
    with pytest.raises(ValueError, match="listed twice"):
        survivors.read(one + "\n\n" + one)
    with pytest.raises(ValueError, match="unknown"):
        survivors.read(one + "\ncolour = 1")


PLANTING = """
import sys
from tests.mutation.runner import Limits, run_all
from tests.mutation.targets import Target

bodies = ("return x + x", "return x - x", "while True: pass", "return (")
sources = [f"def double(x):\\n    {body}\\n" for body in bodies]
ends = {}
target = Target("tests/mutation/planted.py", (sys.argv[1],))
run_all(target, sources, Limits(cpu_s=2.0, life_s=60.0), 2, lambda index, run: ends.__setitem__(index, run.end))
print(*(ends[index] for index in sorted(ends)))
"""


@pytest.mark.slow
def test_a_planted_bug_is_found_and_an_endless_one_is_stopped(tmp_path: Path) -> None:
    """In processes of their own, over a module that only they see."""
    test = tmp_path / "test_planted.py"
    test.write_text("from tests.mutation.planted import double\n\n\ndef test_it():\n    assert double(2) == 4\n")
    command = [sys.executable, "-c", PLANTING, str(test)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=True)
    assert run.stdout.split() == [End.SURVIVED, End.KILLED, End.STOPPED, End.KILLED], run.stderr
    assert not (ROOT / "tests/mutation/planted.py").exists()


def test_a_mutant_of_a_text_that_is_not_ascii_is_where_it_should_be() -> None:
    (mutant,) = [m for m in mutants("m.py", SOURCE) if m.change == "True -> False"]
    assert isinstance(mutant, Mutant)
    assert "return é == False" in mutant.apply(SOURCE)
