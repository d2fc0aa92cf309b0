"""Nodes with drafters, with the real worker, and the requests that tests send to them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.protocol.messages import AddRequest, FinishReason, NeedsPrefill, TicketOpened, TokensOut, Work
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.drafters import ScriptedDrafter, lookup_drafter
from tests.engine.test_core_pipeline import CONFIG, Bench, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.drafts import Drafter
    from pd_connectors.base import Connector
    from pd_connectors.protocol.messages import SampledToken

LOOKUP = "lookup"  # a drafter's kind beside KINDS: the product's
SILENT = "silent"  # one that knows nothing: all drafts are tokens that grammars force
Answers = dict[tuple[str, int], list["SampledToken"]]


@dataclass
class Answered:
    """What clients have seen of a run, and what it has left in the cache."""

    answers: Answers
    reasons: dict[tuple[str, int], FinishReason]
    hashes: list[set[bytes]]
    free: int  # in units
    num_steps: int

    @property
    def ids(self) -> dict[tuple[str, int], list[int]]:
        return {key: [token.token_id for token in tokens] for key, tokens in self.answers.items()}


class Told(Bench):
    """A bench that keeps tokens whole, and lets D ask for a prefill of the same node."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.told: Answers = {}
        self.asked: dict[str, AddRequest] = {}  # D-first requests

    def _collect(self) -> None:
        kept = []
        for message in self.mailbox.outbox:
            if isinstance(message, NeedsPrefill) and message.request_id in self.asked:
                asked = self.asked[message.request_id]
                name = f"p{message.request_id[1:]}"
                self.send(msgspec.structs.replace(asked, request_id=name, work=Work.PREFILL))
                continue
            kept.append(message)
            if isinstance(message, TokensOut):
                for part in message.sequences:
                    self.told.setdefault((message.request_id, part.index), []).extend(part.tokens)
        self.mailbox.outbox[:] = kept
        super()._collect()

    def answered(self) -> Answered:
        self.run()
        blocks = self.core._blocks
        blocks.check()
        hashes = [set(pool.cache._by_hash) for pool in blocks.pools]
        return Answered(self.told, self.reasons, hashes, blocks.stats().free, self.core._stats.num_steps)


@dataclass
class Node:
    """One executor, and benches on it. `answers` by prompt: what a drafter knows."""

    executor: DeviceExecutor
    connector: Connector
    answers: list[list[int]] = field(default_factory=list)

    def bench(self, kind: str = "", mode: str = "off", **more: Any) -> Told:
        drafter: Drafter | None = None
        if kind:
            known = self.answers if kind != SILENT else []
            drafter = lookup_drafter() if kind == LOOKUP else ScriptedDrafter.of(known, kind)
        return Told(self.executor, self.connector, mode, drafter=drafter, **more)


def node_of(num_blocks: int) -> Iterator[Node]:
    executor = DeviceExecutor.started(
        replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=num_blocks)), lambda _: None
    )
    for connector in make_connector(executor):
        yield Node(executor, connector)
    executor.close()


@pytest.fixture(scope="module")
def roomy() -> Iterator[Node]:
    yield from node_of(96)


@pytest.fixture(scope="module")
def small() -> Iterator[Node]:
    yield from node_of(14)


@dataclass(frozen=True)
class Wanted:
    """The requests of one file, sent at once. Their names end with their numbers."""

    prompts: Sequence[list[int]]
    samplings: Sequence[SamplingParams]

    def send(self, bench: Bench, work: Work = Work.GENERATE, name: str = "r") -> None:
        for index, (prompt, sampling) in enumerate(zip(self.prompts, self.samplings, strict=True)):
            bench.send(AddRequest(f"{name}{index}", list(prompt), sampling, work))

    def answered(self, *nodes: Node) -> Answered:
        """By the first of the nodes, without a drafter. Drafters of all know the answers from then on."""
        bench = nodes[0].bench()
        self.send(bench)
        found = bench.answered()
        for node in nodes:
            node.answers = [[*self.prompts[int(name[1:])], *ids] for (name, _), ids in found.ids.items()]
        return found

    def hand_over(self, bench: Told) -> None:
        """Let each request d be answered with the prefill of its request p."""

        def take_over(message: TicketOpened) -> None:
            index = int(message.request_id[1:])
            asked = list(self.prompts[index]), self.samplings[index]
            bench.send(AddRequest(f"d{index}", *asked, Work.TAKE_OVER, message.ticket))

        bench.on_ticket = take_over
        self.send(bench, Work.PREFILL, "p")


def expect_same(
    found: Answered, single: Answered, name: str = "r", *, logprobs: bool = True, tolerance: float = 1e-4
) -> None:
    """Ends, tokens and their log-probabilities."""
    assert found.ids.keys() == {(name + key[1:], index) for key, index in single.ids}
    for (key, index), tokens in single.answers.items():
        own = found.answers[name + key[1:], index]
        assert [token.token_id for token in own] == [token.token_id for token in tokens], key
        assert found.reasons[name + key[1:], index] is single.reasons[key, index]
        for token, other in zip(own, tokens, strict=True):
            assert token.logprob == pytest.approx(other.logprob, abs=tolerance)
            assert [top.token_id for top in token.top] == [top.token_id for top in other.top]


def num_drafts(bench: Bench) -> int:
    assert bench.stats is not None
    return int(bench.stats.counters["spec_decode_num_draft_tokens_total"])


def expect_handoff(bench: Told, single: Answered, kind: str) -> None:
    found = bench.answered()
    assert bench.stats is not None
    assert bench.stats.counters["prefills_remote_total"] == len({name for name, _ in single.ids})
    found.answers = {key: tokens for key, tokens in found.answers.items() if key[0][0] == "d"}
    expect_same(found, single, "d")
    assert num_drafts(bench) > (0 if kind == LOOKUP else 30)  # how many are worth it follows from the machine's times
