"""Where steps are captured: a step that is captured without its drafts is captured with them."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest

from pd_cluster.config import SchedulerConfig
from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.batch_builder import BatchBuilder
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, decode_sizes, draft_sizes, step_sizes
from tests.scheduling.simulation import message, prompt
from tests.scheduling.world import World


def sizes_of(limits: SchedulerConfig) -> GraphSizes:
    """As `capture_steps` captures them where there is memory."""
    most, budget, seqs = limits.most_captured_rows, limits.max_num_batched_tokens, limits.max_num_seqs
    limit = min(limits.max_graph_tokens, budget)
    steps = step_sizes(limit, seqs) if limit else []
    decodes = decode_sizes(min(limits.max_graph_batch, seqs))
    return GraphSizes([*decodes, *draft_sizes(min(most, budget), seqs), *steps])


def without_drafts(chunks: tuple[SequenceChunk, ...]) -> tuple[SequenceChunk, ...]:
    plain = [msgspec.structs.replace(one, num_tokens=one.num_tokens - len(one.drafts), drafts=()) for one in chunks]
    return tuple(sorted(plain, key=lambda one: one.num_tokens > 1))


def num_drafts_of_a_walk(seed: int) -> int:
    """Steps of a random node with random requests. -> the drafts that they had."""
    rng = random.Random(seed)
    seqs, budget = rng.choice([1, 3, 12, 24]), rng.choice([24, 40, 300])
    limits = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget,
        max_graph_batch=rng.choice([1, 5, 256]), max_graph_tokens=rng.choice([0, 16, 48, 2048]),
    )  # fmt: skip
    world = World(
        num_blocks=400, max_num_seqs=seqs, max_num_batched_tokens=budget, drafts=True, num_bent=0, depth=1 + seed % 2
    )
    drafting, sizes, num_drafts = world.scheduler._drafting, sizes_of(limits), 0
    assert drafting is not None
    drafting._costs = replace(drafting._costs, most_rows=limits.most_captured_rows)
    for step in range(60):
        for _ in range(seqs if not step else rng.random() < 0.3):
            name, length = f"{len(world.clients)}", rng.choice([2, 3, 15, rng.randint(2, 60)])
            n = rng.choice([1, 1, 1, min(2, seqs)])
            world.submit(message(name, prompt(length), max_tokens=rng.randint(1, 60), n=n, seed=rng.randrange(4)))
        chunks = world.start_step().chunks
        if sizes.choose(without_drafts(chunks)) is not None:
            assert sizes.choose(chunks) is not None, f"{limits}: {chunks}"
        num_drafts += sum(len(chunk.drafts) for chunk in chunks)
    return num_drafts


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 20, 10))
def test_drafts_turn_no_captured_step_into_a_launched_one(first: int) -> None:
    assert sum(map(num_drafts_of_a_walk, range(first, first + 10))) > 300, "and decodes alone have them"


def test_a_prompts_last_token_after_which_none_is_drawn_is_no_decode() -> None:
    decode = SequenceChunk(0, 5, 1, num_samples=1)
    assert BatchBuilder(step=0, budget=8, chunks=[decode, decode]).is_of_decodes
    assert not BatchBuilder(step=0, budget=8, chunks=[decode, SequenceChunk(1, 5, 1)]).is_of_decodes
