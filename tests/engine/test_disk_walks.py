"""The tier on disk under random requests: threads and steps never have a host block at once, and no token is altered.

The simulated worker checks every token of KV that a step reads. `SideDisk` fills and copies blocks as late as threads
may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engine.side_disk import SideDisk
from tests.scheduling.kv_groups import SETS
from tests.scheduling.test_host_tier_walks import walk

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.scheduling.test_scheduler_machine import SchedulerMachine


# Of each set those of which the most blocks come from files. With states fewer boundaries are hits
SEEDS = {"full": (0, 2), "full+window": (0,), "full+window+state": (3, 5, 8), "latent+state": (8,)}


def walks(kv: str, seeds: Sequence[int]) -> None:
    disks: list[SideDisk] = []

    def watch(machine: SchedulerMachine, rng: random.Random) -> Callable[[], None]:
        world, start_step, teardown = machine.world, machine.world.start_step, machine.teardown
        world.blocks.host.grow(world.blocks.host.num_blocks + rng.randint(4, 12))
        disk = SideDisk(world, rng)
        tier = disk.tier()
        world.start_step = lambda: disk.watch(start_step())  # type: ignore[method-assign]
        disks.append(disk)

        def turn() -> None:
            disk.advance()
            tier.turn(len(world.plans), len(world.plans) - len(world._running))

        def rest() -> None:
            world.settle()
            while tier._reads or tier._writes:
                disk.advance(1.0)
                tier.turn(len(world.plans), len(world.plans))
            teardown()

        machine.teardown = rest  # type: ignore[method-assign]
        return turn

    for seed in seeds:
        walk(seed, kv, 150, watch)
    assert sum(disk.num_landed for disk in disks) > 10


@pytest.mark.long_cases
@pytest.mark.parametrize("kv", SEEDS)
def test_threads_and_steps_share_no_host_block(kv: str) -> None:
    walks(kv, SEEDS[kv])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv", SETS)
def test_threads_and_steps_share_no_host_block_in_many_walks(kv: str) -> None:
    walks(kv, range(60))
