"""Hits in host memory alter no answer of a float8 cache, of two ranks or of windows, nor do handoffs over such caches.

The reference is the same executor without a cache of prefixes, one request after the other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.errors import PdError
from pd_cluster.protocol.messages import AddRequest, TicketOpened, Work
from pd_cluster.worker.device_executor import DeviceDescribed, DeviceExecutor, run_phases
from pd_cluster.worker.ranks import Ranks
from pd_connectors.protocol.layout import KVKind
from tests.engine.drafting_node import Node, expect_same, num_drafts
from tests.engine.host_nodes import expect_hits, serve, tenants_requests, tiered
from tests.engine.test_core_pipeline import CONFIG, make_connector
from tests.worker.forked_ranks import forked_ranks
from tests.worker.test_fp8_cache import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.drafting_node import Answered, Told
    from tests.worker.conftest import ModelStore

# Of the model, blocks on the device, GB of the tier: a few times as many blocks
VARIANTS: dict[str, tuple[dict[str, Any], int, float]] = {
    "fp8": ({"kv_cache_dtype": "fp8"}, 14, 0.001),
    "tp2": ({"tp": 2}, 14, 0.002),
    "windows": ({"model": "gemma3"}, 14, 0.002),
    "windows and sinks": ({"model": "gpt-oss"}, 14, 0.002),
}

SLOW = [pytest.mark.slow]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=SLOW * ("sinks" in name)) for name in VARIANTS])
def node(
    request: pytest.FixtureRequest, models: ModelStore, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Node]:
    options, num_blocks, host_gb = VARIANTS[request.param]
    if "model" in options:
        options = options | {"model": str(models.get(options["model"]).directory)}
    cache = replace(CONFIG.cache, num_blocks=num_blocks, swap_gb=host_gb, host_cache_gb=host_gb)
    config, losses = replace(CONFIG, model=replace(CONFIG.model, **options), cache=cache), list[PdError]()
    if config.model.tp == 1:
        executor = DeviceExecutor.started(config, lambda _: None)
    else:
        ranks = Ranks(config, f"ipc://{tmp_path_factory.mktemp('r')}/r", losses.append)
        with forked_ranks():
            executor = run_phases(DeviceDescribed.over(ranks, lambda _: None), config.cache, lambda _: None)
    windows = [group for group in executor.layout.groups if group.kind is KVKind.WINDOW]
    assert bool(windows) == request.param.startswith("windows")
    assert executor.num_host_blocks == executor.most_host_blocks > 14
    for connector in make_connector(executor):
        yield Node(executor, connector)
    executor.close()
    assert losses == []


def single_of(node: Node, asked: list[AddRequest]) -> Answered:
    """The drafters of the node know these answers from then on."""
    found = serve(node.bench(prefix_caching=False), asked, wave=1)
    node.answers = [[*one.prompt_token_ids, *found.ids[one.request_id, 0]] for one in asked]
    return found


def handed_over(bench: Told, asked: list[AddRequest], most: int) -> Answered:
    """The answers d to requests that the same node prefills: both halves share the small cache.

    A prefill is sent when those before it have left no lease, and fewer than `most` requests are open. More leases have
    all blocks while each of their readers waits for some: until it falls back, after `load_deadline_s`, 30 s.
    """
    own, unsent = {f"p{one.request_id[1:]}": one for one in asked}, deque[AddRequest]()

    def take_over(message: TicketOpened) -> None:
        one, name = own[message.request_id], f"d{message.request_id[1:]}"
        bench.send(msgspec.structs.replace(one, request_id=name, work=Work.TAKE_OVER, ticket=message.ticket))

    def prefill() -> None:
        is_free = not bench.core._blocks.is_lent and not any(name.startswith("p") for name in bench.open)
        if unsent and is_free and len(bench.open) < most:
            one = unsent.popleft()
            bench.send(msgspec.structs.replace(one, request_id=f"p{one.request_id[1:]}", work=Work.PREFILL))

    bench.on_ticket = take_over
    for first in range(0, len(asked), 8):  # each run has a deadline
        unsent += asked[first : first + 8]
        while unsent:
            prefill()
            bench.run(prefill)
    found = bench.answered()
    assert bench.stats is not None
    assert bench.stats.counters["prefills_remote_total"] == len(asked), "some fell back"
    found.answers = {key: tokens for key, tokens in found.answers.items() if key[0][0] == "d"}
    return found


def check(node: Node, asked: list[AddRequest], least_hits: int) -> None:
    single, is_fp8 = single_of(node, asked), node.executor.config.model.kv_cache_dtype == "fp8"
    # Other chunks round other numbers: drafts alone, without a tier, alter one of 500 answers by 0.0212
    tolerance = 1.5 * TOLERANCE if is_fp8 else 1e-4
    bench = tiered(node, "mixed", "on", node.executor.config.cache.host_cache_gb)
    expect_same(serve(bench, asked), single, tolerance=tolerance)
    expect_hits(bench, least_hits)
    assert num_drafts(bench) > 20
    bench = tiered(node, "", "on", node.executor.config.cache.host_cache_gb)
    expect_same(handed_over(bench, asked, 4), single, "d", tolerance=tolerance)
    expect_hits(bench, least_hits)


@pytest.mark.integration
def test_hits_and_handoffs_alter_no_answer(node: Node) -> None:
    """Beside drafts, with NaN in every host block at first."""
    check(node, tenants_requests(12, 1, 3, (48, 64), 12), 48)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hits_and_handoffs_alter_none_of_500_answers(node: Node) -> None:
    check(node, tenants_requests(500, 2, 4, (32, 48, 64), 24), 3000)
