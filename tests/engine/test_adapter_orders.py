"""The engine with adapters: answers of a base model with each of them merged, and what orders to load and unload do."""

from __future__ import annotations

import shutil
import threading
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from pd_cluster.config import LoraConfig
from pd_cluster.protocol.messages import Abort, AddRequest, FromEngine, RequestFailed, TicketOpened, Work
from pd_cluster.protocol.orders import AdapterLoaded, LoadAdapter, UnloadAdapter
from pd_cluster.worker.adapter_store import AdapterStore
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_connectors.protocol.adapters import ON_FILE
from pd_connectors.protocol.cache_space import cache_space
from tests.deadlines import HANG_S, wait_until
from tests.drafters import lookup_drafter
from tests.engine.drafting_node import LOOKUP, Node, Told
from tests.engine.test_core_pipeline import ONE_LAYERED, PROMPTS, SAMPLINGS, make_connector
from tests.shallow_model import ONE_LAYER, shallow_model
from tests.worker.adapted import MadeAdapter, make_adapter, served_parts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LORA = LoraConfig(lora_slots=2, max_lora_rank=20)
RANKS = (20, 4, 9)
Ids = dict[tuple[str, int], list[int]]


class AdaptedBench(Told):
    """Keeps what is told of adapters, and failures."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"lora": LORA, **more})
        self.said: list[FromEngine] = []

    def _collect(self) -> None:
        kept = []
        for message in self.mailbox.outbox:
            if isinstance(message, AdapterLoaded | RequestFailed):
                self.said.append(message)
                if isinstance(message, RequestFailed):
                    self.open.discard(message.request_id)
            else:
                kept.append(message)
        self.mailbox.outbox[:] = kept
        super()._collect()

    def until(self, num: int) -> list[FromEngine]:
        """Turn until so many messages were told since the last call."""
        while len(self.said) < num:
            if not self.core.turn():
                self._collect()
                if len(self.said) < num:
                    assert self.mailbox.bell.wait(HANG_S)
                    self.mailbox.bell.clear()
            self._collect()
        said, self.said = self.said, []
        return said

    def load(self, *adapters: MadeAdapter) -> None:
        for adapter in adapters:
            self.send(LoadAdapter(adapter.digest, str(adapter.path)))
        told = self.until(len(adapters))
        assert {(one.digest, one.error) for one in told if isinstance(one, AdapterLoaded)} == {  # in any order
            (adapter.digest, "") for adapter in adapters
        }


@dataclass
class Adapted:
    """An executor of a small cache, three adapters, and the answers of base models with these merged."""

    node: Node
    adapters: list[MadeAdapter]
    expected: list[Ids]  # of the base, then of each adapter

    def bench(self, mode: str = "on", **more: Any) -> AdaptedBench:
        drafter = lookup_drafter() if more.pop("kind", "") else None
        return AdaptedBench(self.node.executor, self.node.connector, mode, drafter=drafter, **more)


def asked(adapter: str, index: int, request: int, work: Work = Work.GENERATE) -> AddRequest:
    name = f"{'p' if work is Work.PREFILL else 'r'}{index}-{request}"
    prompt, sampling = list(PROMPTS[request]), SAMPLINGS[request]
    return AddRequest(name, prompt, sampling, work, adapter=adapter, salt=cache_space(adapter, ""))


def answers_of(directory: Path) -> Ids:
    """By requests of the base model in a directory, without adapters."""
    model, cache = replace(ONE_LAYERED.model, model=str(directory)), replace(ONE_LAYERED.cache, num_blocks=64)
    config = replace(ONE_LAYERED, model=model, cache=cache)
    executor = DeviceExecutor.started(config, lambda _: None)
    found: Ids = {}
    for connector in make_connector(executor):
        bench = Told(executor, connector, "off")
        for request in range(len(PROMPTS)):
            bench.send(asked("", 0, request))
        found = bench.answered().ids
    executor.close()
    return found


def merge(adapter: MadeAdapter, directory: Path, model: str) -> Path:
    """A copy of the model with the adapter in its weights."""
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    for name, change in adapter.changes.items():
        weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + change
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    root = tmp_path_factory.mktemp("adapted")
    executor = DeviceExecutor.started(replace(ONE_LAYERED, lora=LORA), lambda _: None)
    parts = served_parts(executor)
    adapters = [make_adapter(root / str(rank), parts, dict.fromkeys(parts, rank).__getitem__, rank) for rank in RANKS]
    merged = [merge(adapter, root / f"merged-{adapter.digest}", shallow_model(ONE_LAYER)) for adapter in adapters]
    expected = [answers_of(path) for path in (Path(shallow_model(ONE_LAYER)), *merged)]
    for connector in make_connector(executor):
        yield Adapted(Node(executor, connector), adapters, expected)
    executor.close()


def expect_answers(bench: AdaptedBench, adapted: Adapted, pairs: Sequence[tuple[int, int]]) -> None:
    """To each (request, adapter)."""
    assert bench.answered().ids == {
        (f"r{number}-{request}", index): ids
        for request, number in pairs
        for (name, index), ids in adapted.expected[number].items()
        if name == f"r0-{request}"
    }


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("off", {}), ("on", {}), ("on", {"kind": LOOKUP}), ("on", {"prefix_caching": False}),
        ("on", {"lora": replace(LORA, lora_host_gb=0.001)}),
    ],
    ids=["off", "on", "drafts", "no hits", "files again"],
)  # fmt: skip
def test_each_request_is_answered_by_its_adapter(adapted: Adapted, mode: str, more: dict[str, Any]) -> None:
    """Preempted, swapped, n > 1, with hits: three adapters and the base in two slots and 14 blocks."""
    bench = adapted.bench(mode, **more)
    bench.load(*adapted.adapters)
    digests = ["", *(adapter.digest for adapter in adapted.adapters)]
    pairs = list(product((0, 2, 3, 4), range(len(digests))))  # those that hold their slots for long
    for request, index in pairs:
        bench.send(asked(digests[index], index, request))
    expect_answers(bench, adapted, pairs)
    assert bench.core._scheduler.counters["preemptions_swap_total"] > 0


def test_a_prompt_is_handed_over_with_its_adapter(adapted: Adapted) -> None:
    bench, by_name = adapted.bench(), dict[str, AddRequest]()
    bench.load(*adapted.adapters)

    def take_over(message: TicketOpened) -> None:
        prefill = by_name[message.request_id]
        name = f"r{message.request_id[1:]}"
        bench.send(msgspec.structs.replace(prefill, request_id=name, work=Work.TAKE_OVER, ticket=message.ticket))

    bench.on_ticket = take_over
    for each, (which, adapter) in product((0, 2, 3), enumerate(adapted.adapters, 1)):
        message = asked(adapter.digest, which, each, Work.PREFILL)
        by_name[message.request_id] = message
        bench.send(message)
        bench.run()  # the cache has no room for more leases and their readers
    found = {key: ids for key, ids in bench.answered().ids.items() if key[0].startswith("r")}
    for (name, index), ids in found.items():
        number, request = name[1:].split("-")
        assert ids == adapted.expected[int(number)][(f"r0-{request}", index)], name
    assert len(found) == 3 * (1 + 3 + 1)


def test_what_is_not_loaded_is_refused(adapted: Adapted) -> None:
    bench, first = adapted.bench(), adapted.adapters[0]
    bench.send(asked(first.digest, 1, 0))
    (refused,) = bench.until(1)
    assert isinstance(refused, RequestFailed)
    assert refused.error == "AdapterAbsent", "a router goes on to a node that has it"
    bench.send(UnloadAdapter(first.digest))
    bench.core.turn()
    assert not bench.core._places.in_host


def test_another_name_of_the_base_model_is_a_warning(adapted: Adapted, caplog: pytest.LogCaptureFixture) -> None:
    adapted.bench().load(adapted.adapters[0])
    assert "the adapter was trained for some/base" in caplog.text


def test_other_files_are_named_and_nothing_is_kept(adapted: Adapted) -> None:
    bench, (first, second, _) = adapted.bench(), adapted.adapters
    bench.send(LoadAdapter(first.digest, str(second.path)))
    (told,) = bench.until(1)
    assert told == AdapterLoaded(
        first.digest, f"{second.path} has other files: their digest is {second.digest}, not {first.digest}"
    )
    assert not bench.core._places.in_host
    store = adapted.node.executor._weights.adapters
    assert store is not None
    assert first.digest not in store._held


def test_an_adapter_that_host_memory_never_holds_is_refused(adapted: Adapted) -> None:
    bench, first = adapted.bench(lora=replace(LORA, lora_host_gb=1e-6)), adapted.adapters[0]
    bench.send(LoadAdapter(first.digest, str(first.path)))
    (told,) = bench.until(1)
    assert isinstance(told, AdapterLoaded)
    assert told.error.endswith("bytes, and --lora-host-gb allows 1000")


def test_an_unload_lets_running_requests_end(adapted: Adapted) -> None:
    """New ones are refused at once; after the last one the adapter is forgotten, and can be loaded."""
    bench, first = adapted.bench("off"), adapted.adapters[0]
    bench.load(first)
    bench.send(asked(first.digest, 1, 0))
    while not bench.told:
        bench.core.turn()
        bench._collect()
    bench.send(UnloadAdapter(first.digest))
    bench.send(asked(first.digest, 1, 1))
    (refused,) = bench.until(1)
    assert isinstance(refused, RequestFailed)
    assert bench.answered().ids[("r1-0", 0)] == adapted.expected[1][("r0-0", 0)]
    bench.core.turn()
    assert not bench.core._places.in_host
    assert bench.said == []
    bench.load(first)


def test_a_load_ends_an_unload_that_waits_for_requests(adapted: Adapted) -> None:
    """A long answer must not keep a node without the adapter that a name means again."""
    bench, first = adapted.bench("off"), adapted.adapters[0]
    bench.load(first)
    bench.send(asked(first.digest, 1, 0))
    while not bench.told:
        bench.core.turn()
        bench._collect()
    bench.send(UnloadAdapter(first.digest))
    bench.load(first)
    bench.send(asked(first.digest, 1, 1))
    ids = bench.answered().ids
    for request in (0, 1):
        assert ids[(f"r1-{request}", 0)] == adapted.expected[1][(f"r0-{request}", 0)]
    assert bench.said == []
    assert list(bench.core._places.in_host) == [first.digest]


def test_a_load_while_an_unloaded_one_is_still_read(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, begun = AdapterStore.begin, list[tuple[Any, ...]]()
    monkeypatch.setattr(AdapterStore, "begin", lambda *args: begun.append(args))
    bench, first = adapted.bench(), adapted.adapters[0]
    for order in (LoadAdapter(first.digest, str(first.path)), UnloadAdapter(first.digest)):
        bench.send(order)
    bench.core.turn()
    bench.send(LoadAdapter(first.digest, str(first.path)))
    bench.core.turn()
    (once,) = begun
    begin(*once)
    assert bench.until(1) == [AdapterLoaded(first.digest)]
    bench.send(asked(first.digest, 1, 3))
    assert bench.answered().ids[("r1-3", 0)] == adapted.expected[1][("r0-3", 0)]


def test_files_are_read_again_for_one_request_at_a_time(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else clients that leave begin a read each, of the bytes of all adapters together."""
    bench, (first, second, _) = adapted.bench(), adapted.adapters
    bench.load(first, second)
    places, begin, begun = bench.core._places, AdapterStore.begin, list[tuple[Any, ...]]()
    monkeypatch.setattr(AdapterStore, "begin", lambda *args: begun.append(args))
    places.in_host |= {first.digest: False, second.digest: False}
    bench.send(asked(first.digest, 1, 0))
    bench.core.turn()
    assert len(begun) == 1
    bench.send(Abort("r1-0"))
    bench.send(asked(second.digest, 2, 3))
    for _ in range(3):
        bench.core.turn()
    assert [args[1] for args in begun] == [first.digest]
    monkeypatch.undo()
    begin(*begun[0])
    assert bench.answered().ids[("r2-3", 0)] == adapted.expected[2][("r0-3", 0)]


def test_files_are_not_read_while_host_memory_is_full_of_what_waits(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, (first, second, _) = adapted.bench(), adapted.adapters
    bench.load(first, second)
    orders, places, begun = bench.core._adapters, bench.core._places, list[tuple[Any, ...]]()
    monkeypatch.setattr(AdapterStore, "begin", lambda *args: begun.append(args))
    places.in_host[second.digest] = False
    places.num_live[first.digest], places.wanted = 1, second.digest
    orders._most = max(orders._num_bytes.values())
    orders.read_wanted()
    assert not begun
    places.num_live[first.digest] = 0
    orders.read_wanted()
    assert len(begun) == 1


def test_an_unload_while_it_is_read(adapted: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, read = threading.Event(), AdapterStore._read

    def gated(store: AdapterStore, digest: str, path: str) -> Any:
        assert gate.wait(HANG_S)
        return read(store, digest, path)

    monkeypatch.setattr(AdapterStore, "_read", gated)
    bench, first = adapted.bench(), adapted.adapters[0]
    bench.send(LoadAdapter(first.digest, str(first.path)))
    bench.send(UnloadAdapter(first.digest))
    bench.core.turn()
    store = adapted.node.executor._weights.adapters
    assert store is not None
    gate.set()
    wait_until(lambda: bench.core.turn() or not bench.core._adapters._reading)
    assert first.digest not in store._held
    assert not bench.core._places.in_host
    bench._collect()
    assert bench.said == [], "the order is not under way any more"


def test_requests_end_if_the_files_are_others_when_they_are_read_again(adapted: Adapted, tmp_path: Path) -> None:
    bench, (first, second, third) = adapted.bench(lora=replace(LORA, lora_host_gb=0.001)), adapted.adapters
    moved = replace(second, path=Path(shutil.copytree(second.path, tmp_path / "moved")))
    bench.load(moved)
    bench.load(first, third)
    assert bench.core._places.tiers[second.digest] == ON_FILE
    shutil.copytree(third.path, moved.path, dirs_exist_ok=True)
    bench.send(asked(second.digest, 2, 0))
    bench.send(asked(first.digest, 1, 3))
    (failed,) = bench.until(1)
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.error) == ("r2-0", "AdapterAbsent")
    assert bench.answered().ids[("r1-3", 0)] == adapted.expected[1][("r0-3", 0)]


def test_files_are_read_again_where_the_newest_order_has_them(adapted: Adapted, tmp_path: Path) -> None:
    bench, (first, second, third) = adapted.bench(lora=replace(LORA, lora_host_gb=0.001)), adapted.adapters
    old, new = (replace(second, path=Path(shutil.copytree(second.path, tmp_path / name))) for name in ("old", "new"))
    bench.load(old)
    bench.load(first, third)
    assert bench.core._places.tiers[second.digest] == ON_FILE
    shutil.rmtree(old.path)
    bench.load(new)
    bench.send(asked(second.digest, 2, 3))
    assert bench.answered().ids[("r2-3", 0)] == adapted.expected[2][("r0-3", 0)]


@pytest.mark.parametrize("gone", ["old", "new", "old new"])
def test_the_same_files_under_two_names_are_read_again_where_one_still_has_them(
    adapted: Adapted, tmp_path: Path, gone: str
) -> None:
    """The engine knows contents: it is not told of the unload of one name while another one has the same."""
    bench, (first, second, third) = adapted.bench(lora=replace(LORA, lora_host_gb=0.001)), adapted.adapters
    for name in ("old", "new"):
        bench.load(replace(second, path=Path(shutil.copytree(second.path, tmp_path / name))))
    bench.load(first, third)
    assert bench.core._places.tiers[second.digest] == ON_FILE
    for name in gone.split():
        shutil.rmtree(tmp_path / name)
    bench.send(asked(second.digest, 2, 3))
    if gone == "old new":
        (failed,) = bench.until(1)
        assert isinstance(failed, RequestFailed)
        assert (failed.request_id, failed.error) == ("r2-3", "AdapterAbsent")
    else:
        assert bench.answered().ids[("r2-3", 0)] == adapted.expected[2][("r0-3", 0)]


def test_an_order_is_not_refused_for_the_files_of_the_one_before(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begin, begun = AdapterStore.begin, list[tuple[Any, ...]]()
    monkeypatch.setattr(AdapterStore, "begin", lambda *args: begun.append(args))
    bench, first = adapted.bench(), adapted.adapters[0]
    bench.send(LoadAdapter(first.digest, str(tmp_path / "gone"), 1))
    bench.send(UnloadAdapter(first.digest))
    bench.send(LoadAdapter(first.digest, str(first.path), 2))
    bench.core.turn()
    monkeypatch.undo()
    begin(*begun[0])
    assert bench.until(1) == [AdapterLoaded(first.digest, "", 2)]
    bench.send(asked(first.digest, 1, 3))
    assert bench.answered().ids[("r1-3", 0)] == adapted.expected[1][("r0-3", 0)]


def test_an_order_that_fails_says_what_is_wrong_with_its_own_files(adapted: Adapted, tmp_path: Path) -> None:
    """Not with those of the order before, which are tried, too."""
    bench, first = adapted.bench(), adapted.adapters[0]
    for name in ("old", "new"):
        bench.send(LoadAdapter(first.digest, str(tmp_path / name)))
    (told,) = bench.until(1)
    assert isinstance(told, AdapterLoaded)
    assert str(tmp_path / "new") in told.error


def test_without_slots_adapters_are_refused(adapted: Adapted) -> None:
    bench, first = adapted.bench(lora=LoraConfig()), adapted.adapters[0]
    bench.send(LoadAdapter(first.digest, str(first.path)))
    assert bench.until(1) == [AdapterLoaded(first.digest, "this node serves no adapters: --lora-slots is 0")]
