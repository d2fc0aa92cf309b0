"""The tier in host memory under random requests: each gets its own tokens, whatever moment side copies take.

The simulated worker runs side copies as late, or as early, as streams allow, and until then their targets hold garbage
(`side_stream`). It checks every token of KV that a step reads.
"""

from __future__ import annotations

import random
from collections import Counter
from math import inf
from typing import TYPE_CHECKING

import pytest

from pd_cluster.errors import InvalidRequest, Overloaded
from pd_cluster.protocol.messages import Work
from pd_cluster.protocol.sampling_params import BeamParams
from tests.scheduling.kv_groups import SETS
from tests.scheduling.simulation import begun, message, prompt
from tests.scheduling.test_scheduler_machine import SchedulerMachine
from tests.scheduling.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_HEADS, NUM_TAILS = 3, 4
# Of each set those that together have hits, evictions and swaps. With states fewer boundaries are hits
SEEDS = {
    "full": (0, 1), "full+window": (1,), "full+window+state": (2, 4), "latent+state": (0, 4), "full+2 windows": (0,),
    "uneven": (1,), "uneven sizes": (1, 3), "window": (1,), "full+state": (1, 4), "full+far state": (5, 6),
    "full+pair of states": (0, 2), "full+half state": (1, 3),
}  # fmt: skip


def arrive(machine: SchedulerMachine, rng: random.Random) -> None:
    """A prompt with one of a few heads and tails, of a tenant or of none."""
    world, number = machine.world, machine.num_requests
    machine.num_requests += 1
    tokens = prompt(rng.choice([16, 32, 48, 64]), rng.randrange(NUM_HEADS))
    tokens += [token % 7 + 1 for token in prompt(rng.randint(1, 40), rng.randrange(NUM_TAILS))]
    work = rng.choice([Work.GENERATE] * 6 + [Work.PREFILL, Work.TAKE_OVER])
    width = 2 if work is Work.GENERATE and rng.random() < 0.1 else 0
    asked = message(
        f"t{number}", tokens, work=work, max_tokens=rng.randint(1, 30), n=rng.choice([1, 1, 1, 2]),
        salt=rng.choice(["", "", "one", "other"]), priority=int(rng.random() < 0.2), group=rng.choice(["", "a", "b"]),
        beams=BeamParams(width=2) if width else None, seed=rng.randrange(4),
    )  # fmt: skip
    if work is Work.GENERATE and not width and rng.random() < 0.2:
        asked = begun(asked, rng.randint(1, 5))
    try:
        world.submit(asked)
    except (InvalidRequest, Overloaded):
        assert f"t{number}" not in world.clients


def walk(
    seed: int,
    kv: str,
    num_steps: int,
    watch: Callable[[SchedulerMachine, random.Random], Callable[[], None]] | None = None,
) -> Counter[str]:
    """Requests, ends and resets of all kinds over a small cache with a tier. Returns the tier's counters.

    `watch`: gets the machine, and returns what is called before each step.
    """
    rng = random.Random(f"{seed}/{kv}")
    machine = SchedulerMachine()
    machine.boot(
        num_blocks=rng.randint(8, 18), num_host_blocks=rng.choice([0, 4, 16, 60]), max_num_seqs=rng.randint(1, 5),
        budget=rng.choice([16, 24, 64]), prefix_caching=True, depth=rng.randint(1, 2), limit=rng.choice([0, 0, 20]),
        keys_per_token=0, lateness=rng.choice([0.0, 0.3]), unreadiness=rng.choice([0.0, 0.3]), kv=kv, host_cache=True,
        num_bent=rng.choice([-1, 1]),
    )  # fmt: skip
    world = machine.world
    world.worker.side.rng = rng
    host = world.blocks.host
    world.blocks.copies.most_loads, world.blocks.copies.most_saves = rng.choice([1, 2, 256]), rng.choice([1, 2, 128])
    block_s = (0.0, 0.0, 1e-4)[seed % 3]  # computing takes 3.3e-4 s, and a step 4e-3
    host.gb_s = host._pools[0].group.block_bytes / block_s / 1e9 if block_s else inf
    before_step = watch(machine, rng) if watch is not None else lambda: None
    for _ in range(num_steps):
        pick = rng.randrange(8)
        match rng.choices(range(10), [24, 60, 2, 10, 6, 10, 3, 5, 10, 1])[0]:
            case 0:
                arrive(machine, rng)
            case 1:
                for _ in range(rng.randint(1, 8)):
                    before_step()
                    machine.step(1)
            case 2:
                machine.abort(pick, rng.choice([None, 0, 1]))
            case 3:
                machine.reserve(pick, rng.random() < 0.5)
            case 4:
                machine.first_tokens_come(pick)
            case 5:
                machine.load_ends(pick, rng.random() < 0.7)
            case 6:
                machine.bytes_land(pick)
            case 7:
                machine.fall_back(pick)
            case 8:
                machine.lease_ends(pick)
            case 9 if rng.random() < 0.3:
                world.blocks.forget_unused()
            case 9:
                world.blocks.host.grow(world.blocks.host.num_blocks + rng.randint(0, 6))
        machine.accounts_balance()
    machine.teardown()
    assert world.worker.side.num_loaded == world.blocks.host.num_loaded
    totals = Counter({name: int(count) for name, count in world.blocks.host.counters.items()})
    totals["victims"] = world.num_victims
    totals["swaps"] = int(world.scheduler.counters["preemptions_swap_total"])
    return totals


@pytest.mark.parametrize("has_stream", [False, True])
def test_a_prompt_is_loaded_where_that_is_sooner_than_computing_it(*, has_stream: bool) -> None:
    """Six blocks take 1.5 ms and beside a stream 3.0; computing them 2.1. Steps of loads say nothing of computing."""
    world = World(num_blocks=20, num_host_blocks=40, host_cache=True, max_num_seqs=2)
    for family in range(4):
        world.submit(message(f"r{family}", prompt(97, family), max_tokens=1))
        world.run_until_idle()
    host = world.blocks.host
    assert host.num_saved
    host.gb_s = world.blocks.pools[0].group.block_bytes / 0.25e-3 / 1e9
    if has_stream:
        world.submit(message("stream", prompt(5, 7), max_tokens=40, ignore_eos=True))
        for _ in range(3):
            world.start_step()
    world.submit(message("again", prompt(97, 0), max_tokens=1))
    batches = [world.start_step() for _ in range(3)]
    assert bool(host.num_loaded) == (not has_stream)
    assert any(batch.copies.may_outlast for batch in batches) == (not has_stream), "saves are shorter than a step"
    world.run_until_idle()
    world.check_empty()


def walks(kv: str, seeds: Sequence[int]) -> None:
    totals = Counter[str]()
    for seed in seeds:
        totals += walk(seed, kv, num_steps=150)
    assert all(totals[name] for name in ("host_cache_hit_tokens_total", "host_cache_evicted_unsaved_blocks_total"))
    assert totals["swaps"]
    assert bool(totals["victims"]) == (len(SETS[kv].kinds) == 1), "groups that share memory have no victims"


@pytest.mark.long
@pytest.mark.parametrize("kv", SETS)
def test_no_order_of_side_copies_changes_a_token(kv: str) -> None:
    walks(kv, SEEDS[kv])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv", SETS)
def test_no_order_of_side_copies_changes_a_token_in_many_walks(kv: str) -> None:
    walks(kv, range(84))
