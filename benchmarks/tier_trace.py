"""A slice of a trace, scaled down to a small memory: what an engine finds of it again, and what a simulation does.

Each block of the trace becomes BLOCK_TOKENS / scale tokens. So many prompts are open at once, in the trace's order: the
speed of a machine changes nothing but how far its prompts are when others come.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from benchmarks.routing_simulation.trace import BLOCK_TOKENS
from benchmarks.slo.device import DenseDevice
from benchmarks.tier_streams import OfflineClient
from pd_cluster.planning.simulated_node import Rule, SimulatedNode, VirtualTime
from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.sequence import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.offline import OfflineEngine
    from benchmarks.routing_simulation.trace import SimRequest
    from pd_connectors.protocol.layout import KVGroup
    from pd_connectors.protocol.slabs import KvSlabs

HIT_TOKENS = ("prefix_cache_hit_tokens_total", "host_cache_hit_tokens_total")  # in both tiers; of these in host memory


def scaled_prompts(requests: Sequence[SimRequest], scale: int, vocab_size: int) -> list[list[int]]:
    """Prompts that share what those of the trace share. The rest of each is its own."""
    size, vocabulary, texts = BLOCK_TOKENS // scale, range(vocab_size), dict[int, list[int]]()
    prompts = []
    for number, one in enumerate(requests):
        for block in one.blocks:
            if block not in texts:
                texts[block] = Random(block).choices(vocabulary, k=size)
        prompt = [token for block in one.blocks for token in texts[block]]
        rest = max(1, one.num_tokens // scale - len(prompt))
        prompts.append(prompt + Random(-1 - number).choices(vocabulary, k=rest))
    return prompts


def simulated_hits(
    prompts: Sequence[list[int]], num_open: int, groups: Sequence[KVGroup], slabs: KvSlabs, num_host_blocks: int
) -> list[float]:
    """HIT_TOKENS as shares of the prompts' tokens: of a prefill node, 8B on one H200."""
    blocks = BlockManager(groups, slabs, num_host_blocks=num_host_blocks, host_cache=True)
    world, numbers = VirtualTime(seed=0), iter(range(len(prompts)))
    node = SimulatedNode(world, Rule("tier", shortest=True), DenseDevice(), role="prefill", blocks=blocks)

    def send() -> None:
        if (number := next(numbers, None)) is not None:
            sampling = SamplingParams(max_tokens=1, ignore_eos=True)
            message = AddRequest(str(number), prompts[number], sampling, Work.GENERATE, received_s=world.now_s)
            node.on_token[message.request_id] = send
            node.scheduler.add(Request.from_message(message))
            node.wake()

    for _ in range(num_open):
        send()
    world.run()
    assert next(numbers, None) is None
    counters = node.scheduler.counters
    return [counters[name] / sum(map(len, prompts)) for name in HIT_TOKENS]


def live_hits(prompts: Sequence[list[int]], num_open: int, engine: OfflineEngine) -> list[float]:
    """The same of an engine, which has nothing cached."""
    client, before = OfflineClient(engine), engine.counters()
    for prompt in prompts:
        client.run_while(lambda: client.num_open >= num_open)
        client.send(prompt, 1)
    client.run_while(lambda: client.num_open > 0)
    after = engine.counters()
    return [(after[name] - before.get(name, 0.0)) / sum(map(len, prompts)) for name in HIT_TOKENS]
