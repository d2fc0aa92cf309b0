"""The states of an executor: ways there and back, what each owns, and what is left of a state that was left."""

from __future__ import annotations

import gc
import os
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.scheduling.batch import Batch
from pd_cluster.worker.device_executor import DeviceDescribed, DeviceExecutor
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.rank import RankProcess
from pd_cluster.worker.rank_frames import RankStart
from pd_cluster.worker.ranks import Ranks
from pd_cluster.worker.state import LeftState, StateLeft
from pd_connectors.protocol.slabs import KvSlabs
from tests.deadlines import wait_equal
from tests.worker.driver import Driver, random_prompts
from tests.worker.test_ranked_executor import PLAIN, ROOT, OverlappedDriver, make_sequences
from tests.worker.test_ranked_executor import make_config as ranked_config
from tests.worker.weighed_rank import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_BLOCKS, NUM_HOST_BLOCKS = 40, 3


def make_config(directory: Path) -> NodeConfig:
    return NodeConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32", num_threads=1),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64),
    )


@pytest.fixture
def described(demo_directory: Path) -> DeviceDescribed:
    return DeviceDescribed.of(make_config(demo_directory), lambda _: None)


@pytest.fixture
def without_search() -> Iterator[None]:
    """On a GPU, memory that waits for a search for garbage is not free; ranks exempt their objects from it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def serve(executor: DeviceExecutor) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The tokens of some prompts, and the logits of all steps."""
    logits: list[torch.Tensor] = []
    executor.watch_logits(lambda step: logits.append(step.clone()))
    driver = Driver(executor, budget=40)
    for prompt in random_prompts((5, 16, 31, 20), executor.model.vocab_size):
        driver.add(prompt)
    tokens = driver.run()
    executor.watch_logits(None)
    return tokens, logits


def held(served: tuple[list[list[int]], list[torch.Tensor]]) -> int:
    """Bytes of the logits that a test keeps."""
    return sum(logits.untyped_storage().nbytes() for logits in served[1])


def allocate(loaded: Any, num_blocks: int = NUM_BLOCKS, num_host_blocks: int = 0) -> Any:
    return loaded.allocate(KvSlabs.of_blocks(loaded.layout, num_blocks), num_host_blocks)


def go(state: Any, way: str) -> Any:
    """Take a state to the next one by one of its methods."""
    return allocate(state) if way == "allocate" else getattr(state, way)()


def ready(loaded: Any) -> Any:
    return allocate(loaded, NUM_BLOCKS, NUM_HOST_BLOCKS).warm_up()


@pytest.mark.usefixtures("without_search")
def test_a_device_goes_and_comes_back_and_serves_the_same(described: DeviceDescribed) -> None:
    described_bytes = resident_bytes()
    loaded = described.load()
    loaded_bytes = resident_bytes()
    assert loaded_bytes > described_bytes + 400_000
    executor = ready(loaded)
    expected = serve(executor)
    assert expected[1]
    for unloads in (False, True, True, False):
        cache, model = (weakref.ref(one) for one in (executor._cache.tensors[0], executor._weights.model))
        loaded = executor.sleep()
        assert cache() is None
        assert resident_bytes() == loaded_bytes + held(expected)
        if unloads:
            again = loaded.unload()
            assert model() is None
            assert resident_bytes() == described_bytes + held(expected)
            loaded = again.load()
        executor = ready(loaded)
        assert (executor.slabs.num_blocks(0), executor.num_host_blocks) == (NUM_BLOCKS, NUM_HOST_BLOCKS)
        assert not executor._cache.tensors[0].any()
        tokens, logits = serve(executor)
        assert tokens == expected[0]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(logits, expected[1], strict=True))
        del logits
    executor.close()


@pytest.mark.usefixtures("without_search")
def test_a_cache_of_another_size_needs_no_new_weights(described: DeviceDescribed) -> None:
    cached = allocate(described.load(), 4)
    tensor, model = weakref.ref(cached._cache.tensors[0]), weakref.ref(cached._weights.model)
    loaded = cached.free()
    assert tensor() is None
    executor = allocate(loaded, 5, 2).warm_up()
    assert (executor.slabs.num_blocks(0), executor.num_host_blocks, executor.model.max_model_len) == (5, 2, 80)
    assert model() is executor._weights.model
    assert allocate(executor.sleep(), 6).warm_up().model.max_model_len == 96, "not the shorter one of before"


def test_a_state_that_was_left_is_not_used(described: DeviceDescribed) -> None:
    loaded = described.load()
    cached = allocate(loaded, 4)
    executor = cached.warm_up()
    launch = executor.launch
    again = executor.sleep()
    with pytest.raises(StateLeft):
        launch(Batch(0))
    for left, names in (
        (described, "load"), (loaded, "free_kv_bytes allocate unload"), (cached, "warm_up free"),
        (executor, "sleep draw_late clear launch cache check ready connect start_profile watch_logits model slabs"),
    ):  # fmt: skip
        left.close()
        for name in names.split():
            with pytest.raises(StateLeft, match="the executor has left this state"):
                getattr(left, name)
        assert not vars(left)
    with pytest.raises(AttributeError):
        again.nothing  # noqa: B018
    again.close()


def test_all_is_released_once_by_whatever_state_is_closed(
    demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Grammars] = []
    close = Grammars.close

    def noted(grammars: Grammars) -> None:
        closed.append(grammars)
        close(grammars)

    monkeypatch.setattr(Grammars, "close", noted)
    for num_ways in range(6):
        state: Any = DeviceDescribed.of(make_config(demo_directory), lambda _: None)
        states, released = [state], list[str]()
        for way in ("load", "allocate", "warm_up", "sleep", "unload")[:num_ways]:
            state = go(state, way)
            states.append(state)
            if way == "load":
                state._weights.owned.callback(released.append, "weights")
        for left in states[:-1]:
            left.close()
        assert (len(closed), len(released)) == (0, num_ways == 5), "the weights are released when they go"
        for _ in range(2):
            state.close()
        assert (len(closed), len(released)) == (1, num_ways > 0)
        closed.clear()


@pytest.mark.parametrize(
    ("phase", "function"),
    [
        ("load", "device_executor.load_model"),
        ("allocate", "device_executor.KVCache.allocate"),
        ("warm_up", "device_executor.run_first_steps"),
        ("warm_up", "device_executor.DeviceExecutor.measure"),
    ],
)
def test_a_transition_that_fails_leaves_its_state_as_it_was(
    described: DeviceDescribed, monkeypatch: pytest.MonkeyPatch, phase: str, function: str
) -> None:
    def fail(*arguments: object) -> None:
        raise StartupError("too bad")

    state: Any = described
    for way in ("load", "allocate", "warm_up"):
        if way == phase:
            with monkeypatch.context() as patch:
                patch.setattr(f"pd_cluster.worker.{function}", fail)
                with pytest.raises(StartupError, match="too bad"):
                    go(state, way)
            assert not isinstance(state, LeftState)
        state = go(state, way)
    assert serve(state)[0]
    state.close()


@pytest.mark.usefixtures("without_search")
@pytest.mark.parametrize(
    ("function", "error"),
    [
        ("device_executor.run_first_steps", StartupError),
        ("device_executor.captures_steps", RuntimeError),  # the StartupError has it as its cause
        ("device_executor.DeviceExecutor.measure", StartupError),
    ],
)
def test_the_cache_is_free_in_the_handler_of_a_warm_up_that_failed(
    described: DeviceDescribed, monkeypatch: pytest.MonkeyPatch, function: str, error: type[Exception]
) -> None:
    def fail(*arguments: object) -> None:
        held = memory()
        raise error(f"no room beside {held is not None}")

    cached = allocate(described.load())
    memory = weakref.ref(cached._cache.memory)
    with monkeypatch.context() as patch:
        patch.setattr(f"pd_cluster.worker.{function}", fail)
        try:
            cached.warm_up()
        except StartupError:
            patch.undo()
            loaded = cached.free()
            assert memory() is None
            executor = allocate(loaded, 4).warm_up()
    executor.close()


@pytest.mark.usefixtures("without_search")
def test_an_allocation_that_fails_for_want_of_host_memory_leaves_none(
    described: DeviceDescribed, monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros, given, made, emptied = torch.zeros, list[Any](), list[Any](), list[int]()

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = zeros(*arguments, **options)
        made.append(weakref.ref(tensor))
        return tensor

    def no_room(*arguments: Any) -> None:
        raise MemoryError("no room")

    loaded = described.load()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(sum(one() is not None for one in made)))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", noted)
        patch.setattr("pd_cluster.worker.host_memory.ctypes.memset", no_room)
        try:
            allocate(loaded, NUM_BLOCKS, NUM_HOST_BLOCKS)
        except StartupError:
            patch.undo()
            assert [one() for one in made] == [None]
            given.append(allocate(loaded, 4))
    assert emptied == [0, 0], "memory goes back to the device before the next attempt"
    given.pop().close()


def test_a_rank_that_sleeps_closes_the_part_of_the_connector() -> None:
    """Its reader, and its port by the reader's handler, would hold the old cache."""
    calls: list[str] = []

    def note(name: str, result: Any = None) -> Any:
        def call(*_: object) -> Any:
            calls.append(name)
            return result

        return call

    sockets = SimpleNamespace(report=lambda _: None)
    process = RankProcess(RankStart(NodeConfig(), 1, "", 0), cast("Any", sockets))
    process._state = SimpleNamespace(sleep=note("sleep", "loaded"))
    process._pending.append(cast("Any", SimpleNamespace(result=note("step"))))
    process._reader = cast("Any", SimpleNamespace(close=note("reader")))
    process._port.set_handler(note("message"))
    process._move("sleep", ())
    assert calls == ["step", "reader", "sleep"]
    assert process._state == "loaded"
    process._port.deliver(b"to the reader of the next cache")
    assert calls == ["step", "reader", "sleep"], "kept until there is one"
    process._close_reader()


class WeighedRanks(Ranks):
    module = "tests.worker.weighed_rank"


@pytest.mark.integration
@pytest.mark.usefixtures("without_search")
def test_ranks_go_and_come_back_and_draw_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    losses: list[Any] = []
    ranks = WeighedRanks(ranked_config(2), f"ipc://{tmp_path}/r", losses.append)

    def resident() -> tuple[int, ...]:
        """Gloo's thread may hold the tensors of a rank's last collective for a moment longer."""
        with ranks.phase("resident") as others:
            own = resident_bytes()
        return own, *others

    left_bytes: list[int] = []  # what rank 0 is to hold when it gives free memory to its device

    def wait_for_free() -> None:
        if left_bytes:
            wanted = left_bytes.pop()
            assert resident_bytes() < wanted + 50_000, "no more than the tensors of Gloo's last sum"
            wait_equal(resident_bytes, wanted)

    monkeypatch.setattr(torch.cuda, "empty_cache", wait_for_free)

    described = DeviceDescribed.over(ranks, lambda _: None)
    described_bytes = resident()
    loaded = described.load()
    loaded_bytes = resident()
    assert all(own > before + 1_000_000 for own, before in zip(loaded_bytes, described_bytes, strict=True))
    executor = allocate(loaded, 80).warm_up()

    def draw() -> list[list[int]]:
        runs = OverlappedDriver(executor).run(make_sequences(PLAIN))
        return [[token.token_id for token in tokens] for tokens in runs]

    expected = draw()
    for unloads in (False, True):
        left_bytes.append(loaded_bytes[0])
        left, loaded = executor, executor.sleep()
        assert left_bytes == []
        wait_equal(resident, loaded_bytes)
        with pytest.raises(StateLeft):
            left.launch(Batch(0))
        if unloads:
            left_bytes.append(described_bytes[0])
            again = loaded.unload()
            assert left_bytes == []
            wait_equal(resident, described_bytes)
            loaded = again.load()
        loaded = allocate(loaded, 7).free()
        wait_equal(resident, loaded_bytes)
        executor = allocate(loaded, 80).warm_up()
        assert draw() == expected
    assert losses == []
    loaded = executor.sleep()
    with pytest.raises(StartupError, match="cannot allocate"):
        allocate(loaded, 10**12)
    for _ in range(2):
        loaded.close()
    assert None not in [process.returncode for process in ranks.link._processes.values()]
