"""An adapter under grammars, beams, drafts, known tokens, tiers and files: answers of the model that has it merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.config import LoraConfig
from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.orders import LoadAdapter
from pd_cluster.protocol.sampling_params import BeamParams, SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.protocol.cache_space import cache_space
from tests.drafters import lookup_drafter
from tests.engine.drafting_node import Node, Told
from tests.engine.host_nodes import serve
from tests.engine.test_adapter_orders import LORA, AdaptedBench, merge
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, make_connector
from tests.engine.test_disk_tier import HOST_GB, DiskedBench
from tests.shallow_model import shallow_model
from tests.worker.adapted import MadeAdapter, make_adapter, served_parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.long
RANK = 8
CACHE = replace(CONFIG.cache, num_blocks=14, swap_gb=HOST_GB, host_cache_gb=HOST_GB)
BEAMS = BeamParams(width=2, length_penalty=1.0, early_stopping=False)
GRAMMAR = 'start: "{\\"" /[a-z]{3,9}/ "\\":" /[0-9]{1,6}/ "}"'
WAYS = {
    "plain": SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
    "drawn": SamplingParams(max_tokens=12, temperature=0.9, seed=3, n=2),
    "grammar": SamplingParams(max_tokens=12, temperature=0.8, seed=4, grammar=GRAMMAR),
    "beams": SamplingParams(max_tokens=6, temperature=0.0, n=2, beams=BEAMS, ignore_eos=True),
}
Ids = dict[tuple[str, int], list[int]]


@dataclass
class Ways:
    """A node with one adapter, what a node with the adapter in its weights answers, and what the base answers."""

    node: Node
    adapter: MadeAdapter
    merged: Ids
    base: Ids

    def loaded(self, bench: AdaptedBench) -> AdaptedBench:
        bench.send(LoadAdapter(self.adapter.digest, str(self.adapter.path)))
        bench.until(1)
        return bench

    def base_named(self, letter: str) -> Ids:
        """Names begin with this letter."""
        return {(f"{letter}{name[1:]}", index): ids for (name, index), ids in self.base.items()}

    def requests(self) -> list[AddRequest]:
        return [replaced(one, self.adapter.digest, "r") for one in requests()]


def requests() -> list[AddRequest]:
    """Each way of answering, of each of two prompts."""
    return [
        AddRequest(f"r{way}-{number}", list(PROMPTS[number]), sampling)
        for way, sampling in WAYS.items()
        for number in (0, 2)
    ]


def requests_of_the_base() -> list[AddRequest]:
    return [replaced(one, "", "b") for one in requests()]


def replaced(asked: AddRequest, digest: str, prefix: str) -> AddRequest:
    return AddRequest(
        prefix + asked.request_id[1:],
        asked.prompt_token_ids,
        asked.sampling,
        adapter=digest,
        salt=cache_space(digest, ""),
    )


def executor_of(directory: str, lora: LoraConfig) -> DeviceExecutor:
    config = replace(CONFIG, model=replace(CONFIG.model, model=directory), cache=CACHE, lora=lora)
    return DeviceExecutor.started(config, lambda _: None)


def answers_of(directory: str) -> Ids:
    executor, found = executor_of(directory, LoraConfig()), Ids()
    for connector in make_connector(executor):
        found = answered(Told(executor, connector, "off"), requests())
    executor.close()
    return found


def answered(bench: Told, asked: list[AddRequest]) -> Ids:
    return serve(bench, asked, wave=6).ids


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    root, executor = tmp_path_factory.mktemp("ways"), executor_of(shallow_model(), LORA)
    parts = served_parts(executor)
    adapter = make_adapter(root / "one", parts, dict.fromkeys(parts, RANK).__getitem__, RANK)
    merged = answers_of(str(merge(adapter, root / "merged", shallow_model())))
    base = answers_of(shallow_model())
    for way in WAYS:
        assert any(merged[key] != base[key] for key in base if way in key[0]), (
            "it would not be seen if it were left out"
        )
    for connector in make_connector(executor):
        yield Ways(Node(executor, connector), adapter, merged, base)
    executor.close()


@pytest.mark.parametrize(("mode", "drafts"), [("off", False), ("on", True)], ids=["steps", "overlapped, drafts"])
def test_answers_beside_those_of_the_base(ways: Ways, mode: str, drafts: bool) -> None:
    """Preempted and swapped: 14 blocks. Of equal prompts the base and the adapter find no KV of each other."""
    drafter = lookup_drafter() if drafts else None
    bench = ways.loaded(AdaptedBench(ways.node.executor, ways.node.connector, mode, drafter=drafter, lora=LORA))
    asked = [one for pair in zip(ways.requests(), requests_of_the_base(), strict=True) for one in pair]
    assert answered(bench, asked) == ways.merged | ways.base_named("b")


def test_answers_that_go_on(ways: Ways) -> None:
    bench = ways.loaded(AdaptedBench(ways.node.executor, ways.node.connector, "on", lora=LORA))
    asked, expected = [], Ids()
    for one in ways.requests():
        if one.sampling.beams is None and not one.sampling.grammar:
            whole = [ways.merged[one.request_id, index] for index in range(one.sampling.n)]
            known = tuple(tuple(ids[: min(5, len(ids) - 1)]) for ids in whole)
            more: dict[str, Any] = {"adapter": one.adapter, "salt": one.salt, "known": known}
            asked.append(AddRequest(one.request_id, one.prompt_token_ids, one.sampling, **more))
            expected |= {(one.request_id, index): ids[len(known[index]) :] for index, ids in enumerate(whole)}
    assert answered(bench, asked) == expected


def test_kv_of_the_adapter_from_host_memory_and_from_files(ways: Ways, tmp_path: Path) -> None:
    """The second boot finds the files of the first; the base finds none of the adapter's."""
    for is_second in (False, True):
        bench = FiledBench(ways.node, tmp_path, "on")
        ways.loaded(bench)
        assert bench.serve(ways.requests(), wave=1 if is_second else 6).ids == ways.merged
        if is_second:
            assert bench.counter("host_cache_hit_tokens_total") > 0
            assert bench.counter("disk_read_bytes_total") > 0
        # In the first boot these take the blocks of the adapter's prompts, which leave for host memory and files
        assert bench.serve(requests_of_the_base()).ids == ways.merged | ways.base_named("b")
        bench.close()


class FiledBench(DiskedBench, AdaptedBench):
    """A node with adapters, host memory and files."""
