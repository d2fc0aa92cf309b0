"""The decode node of a tiny model's streams dies: P computes what another one goes on with.

Qwen3-Next has states, which are not kept for the middle of an answer; Moonlight has latents.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.cluster import Launcher
from tests.integration.fault_cluster import DECODE_FLAGS, VOCABULARY, wait_clean
from tests.integration.number_model import save_tokenizer
from tests.integration.stream_cluster import PROMPTS, StreamCluster, kill
from tests.models.state_models import STATE_MODELS
from tests.worker.conftest import MODELS, save_model

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(300)]

NUM_STREAMS = 2 * len(PROMPTS)  # greedy and seeded
PREFILLED = 'pd_requests_total{endpoint="prefill",outcome="ok"}'


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["qwen3-next", "moonlight"])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def cluster(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StreamCluster]:
    directory, (kind, options) = tmp_path_factory.mktemp("model"), {**MODELS, **STATE_MODELS}[name]
    save_model(kind, directory, {**options, "vocab_size": VOCABULARY.stop})
    save_tokenizer(directory, VOCABULARY.stop)
    model = f"--model={directory}"
    with Launcher() as launcher:
        cluster = StreamCluster(
            launcher, 1, 2, [90] * len(PROMPTS), prefill_flags=(model,), decode_flags=(*DECODE_FLAGS, model),
            router_flags=("--prefill-on-decode=never", "--continue-wait-s=60"),
            directory=tmp_path_factory.mktemp("gates"), patient=True,  # else a decode node prefills what P should
        )  # fmt: skip
        asyncio.run(cluster.learn())
        yield cluster


async def test_streams_go_on_at_another_decode_node(cluster: StreamCluster) -> None:
    """90 tokens: an answer passes the end of a piece of 64 tokens before or after the cut."""
    (prefill,), (first, second) = cluster.prefills, cluster.decodes
    with cluster.spoken(first):
        calls = [cluster.call(number) for number in range(NUM_STREAMS)]
        await asyncio.gather(*(call.begun() for call in calls))
        before = await prefill.metric(PREFILLED)
        await kill(first)
        await asyncio.gather(*(cluster.check(number, call) for number, call in enumerate(calls)))
    assert await cluster.continued() >= 1
    await prefill.wait_more(PREFILLED, before)
    await asyncio.gather(*(wait_clean(node) for node in (prefill, second)))
