"""`python -m benchmarks router_feed`: what many nodes and their feeds cost a router, in CPU time and memory.

Each node stores prompts of its own and, up to some step, one prompt that is looked up. Times are the least of many
calls, so another load of the machine disturbs them little.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
import tracemalloc
from functools import partial
from typing import TYPE_CHECKING

from pd_connectors.protocol.feed import DEVICE, HOST, FeedDelta, FeedMessage, FeedSnapshot, NodeLoad, StoredBlock
from pd_connectors.protocol.stream_codec import StreamParser, encode_message
from pd_connectors.protocol.text_chain import STEP_BYTES
from pd_router.config import RouterConfig
from pd_router.nodes.node_feed import NodeFeed
from pd_router.nodes.node_table import NodeTable
from pd_router.policy.candidates import to_generate
from pd_router.policy.cost_policy import CostPolicy
from pd_router.policy.prompt_facts import PromptFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BLOCK_TOKENS, NUM_CALLS = 128, 300


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks router_feed", description="The cost of nodes and their feeds."
    )
    parser.add_argument("--nodes", type=int, default=100, help="Number of nodes (default: %(default)s).")
    parser.add_argument("--blocks", type=int, default=5000, help="Named blocks of a node (default: %(default)s).")
    parser.add_argument("--steps", type=int, default=100, help="Steps of the prompt (default: %(default)s).")
    parser.add_argument("--host-share", type=float, default=0, help="Of them, those that the device has no more.")
    given = parser.parse_args(arguments)
    chain = [name() for _ in range(given.steps)]
    for title, shared in SHARED.items():
        for line in measure(given.nodes, given.blocks, chain, shared, given.host_share):
            sys.stdout.write(f"{title}: {line}\n")
    return 0


SHARED: dict[str, Callable[[int, int], int]] = {
    "no node has the prompt": lambda at, steps: 0,
    "each node has all of it": lambda at, steps: steps,
    "each node has another part": lambda at, steps: at % (steps + 1),
}
_draw = random.Random(1)


def name() -> int:
    return _draw.getrandbits(64)


def measure(
    num_nodes: int, num_blocks: int, chain: list[int], shared: Callable[[int, int], int], host_share: float = 0.0
) -> list[str]:
    """Lines of results."""
    urls = [f"http://node-{at}:1" for at in range(num_nodes)]
    settings = RouterConfig(prefill=tuple(urls[::2]), decode=tuple(urls[1::2]))
    table = NodeTable(settings, time.monotonic)
    index, nodes = table.prefixes, table.nodes
    feeds = [NodeFeed(index, node) for node in nodes]
    tracemalloc.start()
    for at, feed in enumerate(feeds):
        steps = [*chain[: shared(at, len(chain))]]
        steps += [name() for _ in range(num_blocks - len(steps))]
        tiers = [HOST if _draw.random() < host_share else DEVICE for _ in steps]
        blocks = tuple(
            StoredBlock(name(), step, BLOCK_TOKENS * (n + 1), tier)
            for n, (step, tier) in enumerate(zip(steps, tiers, strict=True))
        )
        take(feed, encode_message(FeedSnapshot(1, 0, NodeLoad(), blocks)))
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    lines = [f"memory of a node {memory / num_nodes / 1e6:.2f} MB"]
    lines.append(f"hits {least_s(lambda: index.hits(chain)) * 1e6:.0f} us")
    for node in nodes:
        table.set_up(node)
        table.set_models(node, frozenset({"model"}))
        node.view.receive(busy_load(), ())
    turns, policy = itertools.count(), CostPolicy(settings)

    def choice() -> None:
        cached = index.hits(chain)
        ready = index.hits_on_device(chain) if index.num_lower else cached
        lower = {node: num - ready.get(node, 0) for node, num in cached.items()} if index.num_lower else {}
        prompt = PromptFacts(STEP_BYTES * len(chain), cached=cached, lower=lower)
        policy.choose(prompt, to_generate(table, "model", prompt, settings, next(turns)), table.clock())

    lines.append(f"hits and a choice {least_s(choice) * 1e6:.0f} us")
    numbers = iter(range(1, 1 << 40))
    beat = least_s(lambda: take(feeds[0], encode_message(FeedDelta(next(numbers), NodeLoad(queued_tokens=1)))))
    lines.append(f"a message with a load {beat * 1e6:.0f} us")
    stored = tuple(StoredBlock(n, name(), 1) for n in range(100))
    evicted = tuple(block.block for block in stored)
    change = least_s(lambda: take(feeds[0], encode_message(FeedDelta(next(numbers), NodeLoad(), evicted, stored))))
    lines.append(f"a message with 100 blocks evicted and 100 stored {change * 1e6:.0f} us")
    slices = [least_s(partial(next, step, None), 1) for step in [feeds[-1].forget()] * (num_blocks // 1000 + 1)]
    lines.append(f"a node forgotten {sum(slices) * 1e6:.0f} us, the longest slice {max(slices) * 1e6:.0f}")
    return lines


def busy_load() -> NodeLoad:
    """Of a node with a queue so long that a choice looks at decode nodes too; paces within 20%."""
    tokens = 10_000 + _draw.randrange(20_000)
    return NodeLoad(
        queued_tokens=tokens, queued_keys=500 * tokens, num_running=_draw.randrange(40), num_slots=256,
        free_blocks=3000, num_blocks=5000, block_size=64, step_s=0.005, step_tokens=192,
        token_s=_draw.uniform(1.8e-5, 2.2e-5), key_s=1e-9,
    )  # fmt: skip


def take(feed: NodeFeed, data: bytes) -> None:
    parser: StreamParser[FeedMessage] = StreamParser(FeedMessage)
    for message in parser.feed(data):
        for _ in feed.apply(message):
            pass


def least_s(call: Callable[[], object], num_calls: int = NUM_CALLS) -> float:
    times = []
    for _ in range(num_calls):
        begun_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun_s)
    return min(times)
