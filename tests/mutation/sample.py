"""Which mutants run. Drawn by seed from their names, so that a change elsewhere in a file changes no draw."""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.mutation.operators import Mutant


def draw(mutants: Iterable[Mutant], number: int, seed: int) -> list[Mutant]:
    """`number` of one file's (all, if there are no more), each operator in turn. In the order of their lines."""
    by_operator: defaultdict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(mutants, key=lambda mutant: _lot(mutant, seed)):
        by_operator[mutant.operator].append(mutant)
    queues = [by_operator[operator] for operator in sorted(by_operator)]
    drawn: list[Mutant] = []
    turn = 0
    while len(drawn) < number and any(turn < len(queue) for queue in queues):
        drawn += [queue[turn] for queue in queues if turn < len(queue)][: number - len(drawn)]
        turn += 1
    return sorted(drawn, key=lambda mutant: (mutant.lineno, mutant.start, mutant.text))


def _lot(mutant: Mutant, seed: int) -> bytes:
    return blake2b("\0".join((str(seed), *mutant.key)).encode(), digest_size=16).digest()
