"""Random orders to load and unload adapters beside requests: each answer is its adapter's, and nothing is left."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pd_cluster.protocol.messages import Abort, RequestFailed
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter, UnloadAdapter
from tests.deadlines import wait_until
from tests.drafters import lookup_drafter
from tests.engine.test_adapter_orders import LORA, Adapted, AdaptedBench, adapted, asked  # noqa: F401 (a fixture)
from tests.engine.test_core_pipeline import PROMPTS

pytestmark = pytest.mark.long
NUM_ACTS = 120


class Walk:
    """One node, and what it was asked for. Host memory holds all adapters, or one or two."""

    def __init__(self, adapted: Adapted, rng: random.Random, paths: list[list[Path]]) -> None:  # noqa: F811
        self.adapted, self.rng, self.paths = adapted, rng, paths
        lora = replace(LORA, lora_host_gb=rng.choice((4.0, 0.001)))
        self.bench = AdaptedBench(
            adapted.node.executor, adapted.node.connector, rng.choice(("on", "off")), lora=lora,
            drafter=lookup_drafter() if rng.random() < 0.5 else None,
        )  # fmt: skip
        self.num_asked = self.num_orders = 0
        self.aborted = set[str]()

    def act(self) -> None:
        rng, bench, kind = self.rng, self.bench, self.rng.random()
        index = rng.randrange(len(self.paths))
        digest = self.adapted.adapters[index].digest
        if kind < 0.2:
            self.num_orders += 1
            bench.send(LoadAdapter(digest, str(rng.choice(self.paths[index])), self.num_orders))
        elif kind < 0.3:
            bench.send(UnloadAdapter(digest))
        elif kind < 0.6:
            self.num_asked += 1
            index, digest = rng.choice(((index + 1, digest), (index + 1, digest), (0, "")))
            message = asked(digest, index, rng.randrange(len(PROMPTS)))
            bench.send(msgspec.structs.replace(message, request_id=f"{message.request_id}-{self.num_asked}"))
        elif kind < 0.65 and bench.open:
            self.aborted.add(name := rng.choice(sorted(bench.open)))
            bench.send(Abort(name))
        for _ in range(rng.randrange(5)):
            bench.core.turn()
            bench._collect()

    def end(self) -> None:
        """Every request ends, with the tokens of its adapter; then nothing is left of what was unloaded."""
        bench = self.bench
        for adapter in self.adapted.adapters:
            bench.send(UnloadAdapter(adapter.digest))
        ids = bench.answered().ids
        orders, places = bench.core._adapters, bench.core._places
        wait_until(lambda: bench.core.turn() or not orders._reading)
        bench._collect()
        loaded = [one for one in bench.said if isinstance(one, AdapterLoaded)]
        assert not any(one.error for one in loaded)
        assert len({one.number for one in loaded}) == len(loaded), "one answer to each order"
        failed = {one.request_id: one.error for one in bench.said if isinstance(one, RequestFailed)}
        assert set(failed.values()) <= {"AdapterAbsent"}
        for (name, sequence), tokens in ids.items():
            index, request, _ = name[1:].split("-")
            expected = self.adapted.expected[int(index)][f"r0-{request}", sequence]
            assert tokens == (expected[: len(tokens)] if name in self.aborted | failed.keys() else expected), name
        store = self.adapted.node.executor._weights.adapters
        assert store is not None
        assert (store._held, orders._orders, orders._num_bytes, places.in_host) == ({}, {}, {}, {})
        assert (sorted(places._free), places._ready, +places.num_live) == ([0, 1], set(), {})


@pytest.mark.parametrize("seed", range(2))
def test_orders_beside_requests(adapted: Adapted, tmp_path: Path, seed: int) -> None:  # noqa: F811
    paths = [
        [adapter.path, Path(shutil.copytree(adapter.path, tmp_path / adapter.digest))] for adapter in adapted.adapters
    ]
    walk = Walk(adapted, random.Random(seed), paths)
    for _ in range(NUM_ACTS):
        walk.act()
    walk.end()
