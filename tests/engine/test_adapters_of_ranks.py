"""Several ranks read an adapter by themselves: an order ends with the last one, and counts what the worst one says."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.config import LoraConfig
from pd_cluster.engine.adapter_orders import AdapterOrders
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter, UnloadAdapter
from pd_cluster.scheduling.adapter_places import AdapterPlaces
from tests.engine.test_core_pipeline import FakeMailbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.errors import PdError

RANKS = 3


@dataclass
class RankedEngine:
    """The orders of an engine: the test says when each rank answers."""

    places: AdapterPlaces = field(default_factory=lambda: AdapterPlaces(2))
    mailbox: FakeMailbox = field(default_factory=FakeMailbox)
    reads: list[tuple[str, str, Callable[[str, str, int], None]]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        def fail(digest: str, error: PdError) -> None:
            self.failed.append(digest)

        executor: Any = SimpleNamespace(
            layout=SimpleNamespace(tp_size=RANKS), drop_adapter=self.dropped.append,
            read_adapter=lambda *order: self.reads.append(order),
        )  # fmt: skip
        config = LoraConfig(lora_slots=2, lora_host_gb=1e-6)
        mailbox: Any = self.mailbox
        self.orders = AdapterOrders(config, self.places, executor, mailbox, fail, lambda: 0.0)

    def told(self, *ends: tuple[str, int]) -> list[Any]:
        """What is said after each of the ranks' ends."""
        digest, _, done = self.reads[-1]
        for end in ends:
            assert not self.mailbox.outbox
            done(digest, *end)
            self.orders.turn()
        said, self.mailbox.outbox = self.mailbox.outbox, []
        return said


def test_the_last_rank_ends_an_order() -> None:
    engine = RankedEngine()
    engine.orders.take(LoadAdapter("a", "/a", 1))
    assert engine.told(("", 300), ("", 500)) == []
    assert engine.places.in_host == {}, "a step could be of a rank that has no such adapter"
    assert engine.told(("", 400)) == [AdapterLoaded("a", "", 1)]
    assert (engine.places.in_host, engine.orders._num_bytes) == ({"a": True}, {"a": 500})


@pytest.mark.parametrize("place", range(RANKS))
def test_one_rank_without_it_ends_it_on_all(place: int) -> None:
    engine = RankedEngine()
    engine.orders.take(LoadAdapter("a", "/a", 1))
    ends = [("", 300)] * RANKS
    ends[place] = ("no memory", 0)
    assert engine.told(*ends) == [AdapterLoaded("a", "no memory", 1)]
    assert (engine.dropped, engine.places.in_host, engine.orders._orders) == (["a"], {}, {})


def test_an_adapter_is_not_read_twice_at_once() -> None:
    """What the second read puts into host memory nothing would drop."""
    engine = RankedEngine()
    engine.orders.take(LoadAdapter("a", "/a", 1))
    assert engine.told(("", 300), ("", 300)) == []
    engine.orders.take(UnloadAdapter("a"))
    engine.orders.turn()
    engine.orders.take(LoadAdapter("a", "/b", 2))
    assert len(engine.reads) == 1
    assert engine.told(("", 300)) == [AdapterLoaded("a", "", 2)]


def test_what_was_unloaded_and_is_read_again_for_a_new_order_is_dropped_first() -> None:
    """One rank may have it, from the path before; the read from the new one would leave those pages pinned."""
    engine = RankedEngine()
    engine.orders.take(LoadAdapter("a", "/gone", 1))
    engine.orders.take(UnloadAdapter("a"))
    engine.orders.take(LoadAdapter("a", "/b", 2))
    assert engine.told(("", 300), ("", 300), ("there is no /gone", 0)) == []
    assert ([path for _, path, _ in engine.reads], engine.dropped) == (["/gone", "/b"], ["a"])
    assert engine.told(*[("", 300)] * RANKS) == [AdapterLoaded("a", "", 2)]


def test_a_failed_second_read_ends_the_requests_and_keeps_the_name() -> None:
    engine = RankedEngine()
    for digest in "ab":
        engine.orders.take(LoadAdapter(digest, f"/{digest}", 1))
        assert len(engine.told(*[("", 700)] * RANKS)) == 1
    assert engine.places.in_host == {"a": False, "b": True}
    engine.places.wanted = "a"
    engine.orders.read_wanted()
    assert engine.told(*[("", 700)] * (RANKS - 1), ("it has other files", 0)) == []
    assert (engine.failed, engine.places.in_host) == (["a"], {"a": False, "b": True})


def test_a_new_order_ends_an_unload_while_the_files_are_read_again() -> None:
    """What some ranks have read by then stays: a step that fills a slot from what one has not would fail on it."""
    engine = RankedEngine()
    for digest in "ab":
        engine.orders.take(LoadAdapter(digest, f"/{digest}", 1))
        engine.told(*[("", 700)] * RANKS)
    engine.places.wanted = "a"
    engine.orders.read_wanted()
    engine.told(("", 700))
    engine.dropped.clear()
    engine.orders.take(UnloadAdapter("a"))
    engine.orders.turn()
    engine.orders.take(LoadAdapter("a", "/a", 2))
    assert engine.told(*[("", 700)] * (RANKS - 1)) == [AdapterLoaded("a", "", 2)]
    assert engine.places.in_host == {"a": True, "b": False}
    assert engine.dropped == ["b"]
