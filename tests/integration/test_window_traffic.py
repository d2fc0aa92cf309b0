"""Conversations at a model with windows, in memory for one or two of them: answers are those of a node with room.

The traffic has the shape of a recorded chat: all begin alike, many go on where others ended, most are short and some
long. Caches evict, sequences are preempted, clients leave; at the end no node holds a block.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster import Launcher
from tests.integration.calls import Call, Outcome
from tests.integration.number_model import save_tokenizer
from tests.integration.system import ANSWER_DEADLINE_S, Path, running_system
from tests.worker.conftest import VOCAB_SIZE, ModelStore

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS, AT_ONCE = 120, 24
LONGEST, MOST_NEW = 440, 40  # tokens, of a prompt and of an answer: 30 blocks of a decode node's 36
LEAVER = {"max_tokens": 70, "stream": True}  # 32 blocks with the longest prompt
KINDS: Sequence[dict[str, Any]] = (
    *[{"temperature": 0}] * 3,
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "seed": 6, "n": 2},
    {"use_beam_search": True, "n": 3, "max_tokens": 16, "temperature": 0},
    {"temperature": 0} | LEAVER,
)
EVICTED, HITS = "pd_prefix_cache_evicted_blocks_total", "pd_prefix_cache_hit_tokens_total"
PREEMPTED = ("pd_preemptions_recompute_total", "pd_preemptions_swap_total")
WINDOW_BYTES, FULL_BYTES = (f'pd_kv_group_transfer_bytes_total{{group="{group}"}}' for group in (0, 1))


def make_bodies(seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)

    def some(count: float) -> list[int]:
        return draw.choices(range(3, VOCAB_SIZE), k=round(count))

    prompts: list[list[int]] = []
    beginning = some(20)
    for _ in range(NUM_REQUESTS):
        earlier = [one for one in prompts[-40:] if len(one) < LONGEST - 80]
        if earlier and draw.random() < 0.4:
            prompts.append(draw.choice(earlier) + some(draw.uniform(16, 80)))
        else:
            prompts.append(beginning + some(min(LONGEST - 20, draw.lognormvariate(4.8, 0.9))))
    common = {"ignore_eos": True}
    return [common | {"max_tokens": draw.randint(2, MOST_NEW), "prompt": one} | draw.choice(KINDS) for one in prompts]


def leaves(body: dict[str, Any]) -> bool:
    return "stream" in body


async def serve(url: str, bodies: Sequence[dict[str, Any]], routes: Sequence[str]) -> list[Outcome | None]:
    """The outcomes, AT_ONCE at a time in this order; None of clients that leave at the first token."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(body: dict[str, Any], route: str) -> Outcome | None:
        async with slots:
            call = Call(url, body, route, deadline_s=ANSWER_DEADLINE_S)  # many wait for few blocks
            if not leaves(body):
                return await call.outcome()
            await call.begun()
            await call.leave()
            return None

    return await asyncio.gather(*(one(*pair) for pair in zip(bodies, routes, strict=True)))


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_answers_in_little_memory_are_those_with_room(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    saved = ModelStore(tmp_path_factory.mktemp("models")).get(name)
    save_tokenizer(saved.directory)
    common = (f"--model={saved.directory}", "--block-size=16", "--max-num-batched-tokens=64")
    bodies = make_bodies(seed=1)
    staying = [body for body in bodies if not leaves(body)]
    with Launcher() as launcher:
        plain = launcher.node("mixed", *common, "--no-prefix-caching", "--kv-cache-gb=0.1")
        expected = iter(asyncio.run(serve(plain.url, staying, [""] * len(staying))))
    little = {"prefill": ["--num-blocks=60"], "decode": ["--num-blocks=36", "--swap-gb=0.001"]}
    with running_system(*common, "--max-num-seqs=12", "--load-deadline-s=300", role_flags=little) as system:
        routes = [random.Random(number).choice((Path.P_FIRST, Path.D_FIRST)).value for number in range(len(bodies))]
        for body, outcome in zip(bodies, asyncio.run(serve(system.router_url, bodies, routes)), strict=True):
            if outcome is not None:
                wanted = next(expected)
                assert wanted is not None
                outcome.check(wanted)
                assert outcome.headers["x-pd-decode"] == "decode", body
        system.settle()
        prefill, decode = system.metrics("prefill"), system.metrics("decode")
    assert prefill[HITS] > 0
    assert prefill[EVICTED] > 0
    assert decode[EVICTED] > 0
    assert sum(decode[name] for name in PREEMPTED) > 0, decode
    assert 0 < decode[WINDOW_BYTES] < 3 * decode[FULL_BYTES]  # whole prompts of six layers and one: 6 times
