"""Requests of adapters, while names get other adapters and nodes and routers are killed: each answer is of its own.

PD_ADAPTER_REQUESTS=10000 (how many), PD_CHAOS_CLIENTS=16, PD_CHAOS_SEED=1. The log tells the counts so far:

    PD_ADAPTER_REQUESTS=500 pytest tests/security/test_adapter_storm.py -m slow -s -o log_cli=true --log-cli-level=INFO

100 requests take 7 to 20 s on two cores.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.cluster import Launcher
from tests.connectors.store_server import StoreServer, needs_lmcache
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import RouterMember, fetch, start, until
from tests.integration.strong_adapters import strong_adapter
from tests.security.adapter_load import UNLOADED, AdapterLoad, texts_of
from tests.security.chaos_storm import DRAIN_S, Storm, StormNode
from tests.security.test_chaos import NETWORK, wait_clean
from tests.shallow_model import NUM_LAYERS, shallow_model

if TYPE_CHECKING:
    from pathlib import Path

NUM_REQUESTS = int(os.environ.get("PD_ADAPTER_REQUESTS", "300"))
CLIENTS = int(os.environ.get("PD_CHAOS_CLIENTS", "12"))
SEED = int(os.environ.get("PD_CHAOS_SEED", "1"))
CONTENTS = [f"c{number}" for number in range(6)]
NAMES = ("one", "two", "three")
COMMON = (
    f"--model={shallow_model()}", "--served-model-name=base", "--max-model-len=512", "--num-blocks=96",
    "--lease-ttl-s=2", "--load-deadline-s=8", "--min-remote-tokens=1", f"--drain-s={DRAIN_S:g}",
    "--max-num-batched-tokens=128", "--lora-slots=2", "--max-lora-rank=8", "--lora-host-gb=0.002",
)  # fmt: skip
ROUTER_FLAGS = (
    "--health-interval-s=1", "--health-timeout-s=3", f"--drain-s={DRAIN_S:g}", "--admin-endpoints=open",
)  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@needs_lmcache
@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.anyio
@pytest.mark.timeout(1200 + 2 * NUM_REQUESTS)
async def test_no_answer_is_of_another_adapter(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for seed, content in enumerate(CONTENTS):
        strong_adapter(tmp_path / "adapters" / content, seed, NUM_LAYERS)
    with Launcher() as launcher, StoreServer() as server:
        reference = StormNode(
            launcher, "reference", "mixed", *COMMON, "--lora-host-gb=1",
            "--lora", *(f"{content}={tmp_path}/adapters/{content}" for content in CONTENTS),
        )  # fmt: skip
        await asyncio.to_thread(start, [reference])
        rng = random.Random(SEED)
        prompts = [[rng.randrange(5, 3000) for _ in range(rng.choice((17, 60, 130, 250)))] for _ in range(16)]
        texts = await texts_of(reference.url, ["base", *CONTENTS], prompts)
        await asyncio.to_thread(reference.end)
        assert len({number for _, number in texts}) >= 4, "hardly any prompt tells adapters apart"
        roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
        tiers = ("--host-cache-gb=0.004", "--disk-cache-gb=0.02", "--connector=lmcache", f"--pool-url={server.url}")
        nodes = [
            StormNode(
                launcher, name, role, *COMMON, *tiers, f"--lora-dir={tmp_path}/adapters",
                f"--disk-cache-dir={tmp_path}/{name}", environment=NETWORK,
            )
            for name, role in roles.items()
        ]  # fmt: skip
        await asyncio.to_thread(start, nodes)
        routers = {
            name: await asyncio.to_thread(RouterMember, launcher, nodes[:2], nodes[2:], *ROUTER_FLAGS)
            for name in ("r0", "r1")
        }
        urls = {name: router.url for name, router in routers.items()}
        load = AdapterLoad(urls, texts, prompts, "base", NUM_REQUESTS, SEED)
        for name in NAMES:
            load.names.begin(name, UNLOADED)
        async with aiohttp.ClientSession() as session:
            await load.load_all(session, CONTENTS)
        storm = Storm(nodes, routers, load, SEED)
        async with asyncio.TaskGroup() as group:
            group.create_task(storm.rage(1e9))
            await load.run(CLIENTS, CONTENTS)
            storm.end()
        async with aiohttp.ClientSession() as session:
            await load.load_all(session, CONTENTS)
        leaked = await wait_clean(nodes, routers)
        listed: dict[str, Any] = {}

        async def agree() -> bool:
            listed.clear()
            for name, router in routers.items():
                for node in (await fetch(f"{router.url}/nodes")).json()["nodes"]:
                    found = {one: told["digest"] for one, told in node["adapters"].items()}
                    listed[f"{name} of {node['url']}"] = found
            values = list(listed.values())
            return all(one == values[0] and set(one) == set(NAMES) for one in values)

        await until(agree, "every node lists the same adapters", HANG_S, lambda: str(listed))
        with capsys.disabled():
            sys.stdout.write(f"\n{json.dumps(figures(load, storm, leaked))}\n")
        await use_all_names(nodes, prompts[0])
        await asyncio.gather(*(asyncio.to_thread(node.end) for node in nodes))
    assert load.wrong == []
    assert storm.ended == []
    assert leaked == {}


def figures(load: AdapterLoad, storm: Storm, leaked: dict[str, Any]) -> dict[str, Any]:
    faults = sum(not event.is_router for event in load.events), sum(event.is_router for event in load.events)
    return {
        **load.told, "ended": storm.ended, "faults of nodes, routers": faults, "leaked": leaked,
        "wrong": load.wrong[:20],
    }  # fmt: skip


async def use_all_names(nodes: list[StormNode], prompt: list[int]) -> None:
    """At once at each node: more than it has slots. One that was not given back would be one too few, or none."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    for node in nodes:
        answers = asyncio.gather(*(fetch(f"{node.url}/v1/completions", body | {"model": name}) for name in NAMES * 3))
        await asyncio.wait_for(answers, HANG_S)
        await wait_clean([node], {})
