"""An executor's phases: their order, what each needs of the one before, and what a failure leaves behind."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from benchmarks.shapes import CONFIGS
from pd_cluster.config import CacheConfig, ModelConfig, NodeConfig, SchedulerConfig
from pd_cluster.errors import StartupError
from pd_cluster.models.registry import resolve_spec
from pd_cluster.worker.cuda_graphs.graph_sizes import decode_sizes, step_sizes
from pd_cluster.worker.cuda_graphs.set_up import (
    DRAFT_GRAPH_BYTES,
    STATE_GRAPH_BYTES,
    capturable,
    captured_bytes,
    captures_steps,
)
from pd_cluster.worker.device_executor import DeviceExecutor, DeviceLoaded, run_phases
from pd_cluster.worker.grammars import Grammars
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.kernel_selection import attention_by_group
from pd_cluster.worker.kv_cache import KVCache, host_units
from pd_cluster.worker.memory_measurement import measure_free_bytes
from pd_cluster.worker.model_runner import ModelRunner
from pd_cluster.worker.state import Weights
from pd_connectors.protocol.layout import BlockLayout, KVGroup, KVKind
from pd_connectors.protocol.slabs import KvSlabs
from pd_kernels.attention import AttentionShape
from pd_kernels.backends import TORCH
from pd_kernels.torch_attention import TorchAttention
from tests.connectors.layouts import full_layout
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.driver import Driver, make_executor, random_prompts
from tests.worker.repeated_graphs import ReferenceAttention, Repeater, captured_as_reference
from tests.worker.test_model_files import QWEN3_EXPERTS, spec_of

if TYPE_CHECKING:
    from tests.worker.conftest import ModelStore

PHASES = ("load", "free_kv_bytes", "allocate", "warm_up")


class Phases:
    """An executor that notes its phases. One of them may fail."""

    layout = full_layout(16, 2, 3, 16)
    block_size = 16

    def __init__(self, fails: str = "", free_blocks: int = 5) -> None:
        self.fails, self.free_blocks = fails, free_blocks
        self.calls: list[Any] = []

    def _note(self, phase: str, *arguments: int) -> None:
        self.calls.append((phase, *arguments))
        if phase == self.fails:
            raise StartupError(f"{phase} failed")

    def load(self) -> Phases:
        self._note("load")
        return self

    def free_kv_bytes(self) -> int:
        self._note("free_kv_bytes")
        return self.free_blocks * self.layout.block_bytes + 7

    def allocate(self, slabs: KvSlabs, num_host_blocks: int, num_later: int) -> Phases:
        self._note("allocate", slabs.num_blocks(0), num_host_blocks, num_later)
        return self

    def warm_up(self) -> Phases:
        self._note("warm_up")
        return self

    def close(self) -> None:
        self.calls.append(("close",))


def start(phases: Phases, config: CacheConfig, lines: list[str] | None = None) -> Any:
    lines = [] if lines is None else lines
    return run_phases(cast("Any", phases), config, lines.append)


def test_phases_run_once_and_in_order() -> None:
    executor, lines = Phases(), list[str]()
    assert start(executor, CacheConfig(), lines) is executor
    assert executor.calls == [("load",), ("free_kv_bytes",), ("allocate", 5, 0, 0), ("warm_up",)]
    assert lines == ["cache 5 blocks of 16 tokens in float32", "warm-up"]


def test_nothing_is_measured_when_the_blocks_are_configured() -> None:
    executor = Phases()
    block_gb = executor.layout.block_bytes / 1e9
    start(executor, CacheConfig(num_blocks=9, swap_gb=3.5 * block_gb))
    assert executor.calls == [("load",), ("allocate", 9, 3, 0), ("warm_up",)]


@pytest.mark.parametrize(("swap", "host", "blocks"), [(3.5, 10.2, (3, 7)), (3.5, 2, (3, 0)), (0, 6.1, (0, 6))])
def test_preempted_sequences_have_a_part_of_the_host_memory(swap: float, host: float, blocks: tuple[int, int]) -> None:
    executor = Phases()
    block_gb = executor.layout.block_bytes / 1e9
    start(executor, CacheConfig(num_blocks=9, swap_gb=swap * block_gb, host_cache_gb=host * block_gb))
    assert executor.calls[1] == ("allocate", 9, *blocks)


@pytest.mark.parametrize(
    ("swap", "host", "blocks", "flag"),
    [
        (0.9, 0, (), "--swap-gb"),
        (1, 0, (1, 0), ""),
        (0, 1.9, (), "--host-cache-gb"),
        (0, 2, (0, 2), ""),
        (1, 1.9, (), "--host-cache-gb"),
        (2, 0.1, (2, 0), ""),
    ],
)
def test_host_memory_that_nothing_could_use_is_refused(
    swap: float, host: float, blocks: tuple[int, ...], flag: str
) -> None:
    """It was taken, and did nothing. A cache needs two blocks, of which it copies one ahead."""
    executor = Phases()
    block_gb = executor.layout.block_bytes / 1e9
    config = CacheConfig(num_blocks=9, swap_gb=swap * block_gb, host_cache_gb=host * block_gb)
    if flag:
        with pytest.raises(StartupError, match=rf"^{flag} .*give at least 0\.001, or 0$"):
            start(executor, config)
        assert executor.calls[-1] == ("close",)
    else:
        start(executor, config)
        assert executor.calls[1] == ("allocate", 9, *blocks)


def test_host_memory_without_room_for_a_state_is_refused_with_what_one_takes() -> None:
    groups = (
        KVGroup(KVKind.FULL, (0,), (2, 1, 2, 16, 8), "float32", 16),
        KVGroup(KVKind.STATE, (1,), (2, 5000), "float32", 16),
    )
    layout = BlockLayout(groups, 1)
    slabs = KvSlabs(9, groups[1].block_bytes, (20, 1))
    unit_gb = (40 * groups[0].block_bytes + groups[1].block_bytes) / 1e9
    assert host_units(CacheConfig(swap_gb=unit_gb, host_cache_gb=2 * unit_gb), layout, slabs) == (1, 1)
    with pytest.raises(
        StartupError, match=r"^--swap-gb 1e-05: .* a state and twice its bytes of keys and values, 1 of each"
    ):
        host_units(CacheConfig(swap_gb=1e-5), layout, slabs)
    with pytest.raises(
        StartupError, match=r"^--host-cache-gb .*, 2 of each, take 0\.2 MB: give at least 0\.001, or 0$"
    ):
        host_units(CacheConfig(host_cache_gb=1.9 * unit_gb), layout, slabs)


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_that_fails_closes_the_executor(phase: str) -> None:
    executor = Phases(fails=phase)
    with pytest.raises(StartupError, match=f"^{phase} failed$"):
        start(executor, CacheConfig())
    assert [call[0] for call in executor.calls] == [*PHASES[: PHASES.index(phase) + 1], "close"]


@pytest.mark.parametrize("free_blocks", [-3, 0, 1])
def test_a_cache_of_less_than_two_blocks_is_refused_before_it_is_allocated(free_blocks: int) -> None:
    executor = Phases(free_blocks=free_blocks)
    with pytest.raises(StartupError, match=rf"room for {free_blocks} blocks of 0\.0 MB"):
        start(executor, CacheConfig())
    assert executor.calls[-1] == ("close",)


def test_groups_share_the_memory_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full block is as large as four of a window, which has a quarter of the layers."""
    full = KVGroup(KVKind.FULL, (1, 2, 3, 4), (2, 4, 2, 16, 16), "float32", 16)
    window = KVGroup(KVKind.WINDOW, (0,), (2, 1, 2, 16, 16), "float32", 16, 500)
    layout = BlockLayout((window, full))
    monkeypatch.setattr(Phases, "layout", layout)
    slab = KvSlabs.of_blocks(layout, 1).slab_bytes
    executor, lines = Phases(free_blocks=5 * slab // layout.block_bytes), list[str]()
    start(executor, CacheConfig(), lines)
    assert executor.calls[2] == ("allocate", 20, 0, 0)
    assert lines[0] == (
        "cache 5 slabs of 0.0 MB in float32, each 4 blocks of 16 tokens (window 500) or 1 blocks of 16 tokens (full)"
    )
    executor = Phases()
    start(executor, CacheConfig(num_blocks=8))
    assert executor.calls[1] == ("allocate", 40, 0, 0), "two slabs hold 8 blocks of the window, eight of the other"
    for few in (1, 2):
        with pytest.raises(StartupError, match=r"give it more memory"):
            start(Phases(free_blocks=few * slab // layout.block_bytes), CacheConfig())


@pytest.mark.parametrize(
    "function", ["device_plan._make_reduce", "device_executor.load_model", "device_executor.run_first_steps"]
)
def test_a_start_that_fails_leaves_nothing_behind(
    models: ModelStore, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """Neither threads, nor memory of the weights or the cache."""
    released: list[Grammars] = []
    memory: list[weakref.ref[Any]] = []

    def fail(*arguments: Any) -> None:
        for runner in arguments:
            if isinstance(runner, ModelRunner):
                memory.extend(map(weakref.ref, (runner._model, runner.cache.tensors[0])))
        raise StartupError("too bad")

    close = Grammars.close

    def noted(grammars: Grammars) -> None:
        released.append(grammars)
        close(grammars)

    model = ModelConfig(model=str(models.get("llama").directory), device="cpu")
    with monkeypatch.context() as patch:
        patch.setattr(f"pd_cluster.worker.{function}", fail)
        patch.setattr(Grammars, "close", noted)
        with pytest.raises(StartupError, match="too bad"):
            DeviceExecutor.started(NodeConfig(model=model, cache=CacheConfig(num_blocks=4)), lambda _: None)
    assert len(released) == 1
    gc.collect()
    assert [one() for one in memory] == [None] * len(memory)


def test_what_only_measured_needs_no_search_for_garbage(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU its buffers would count as used, and a search could free them during a capture."""
    buffers: list[weakref.ref[HostBuffer]] = []
    make = HostBuffer.__init__

    def note(self: HostBuffer, *arguments: Any) -> None:
        buffers.append(weakref.ref(self))
        make(self, *arguments)

    monkeypatch.setattr(HostBuffer, "__init__", note)
    gc.collect()
    gc.disable()
    try:
        executor = make_executor(models.get("qwen3").directory, num_blocks=6)
        executor._make_runner(executor._cache, 32)
        assert [buffer() is not None for buffer in buffers[:-1]] == [False] * (len(buffers) - 2) + [True]
        assert buffers[-1]() is None
    finally:
        gc.enable()
    executor.close()


def test_the_sizes_that_warm_up_captured_serve_steps(models: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with functions that are called again in place of graphs."""

    def attentions(*arguments: Any) -> tuple[ReferenceAttention, ...]:
        return tuple(map(captured_as_reference, attention_by_group(*arguments)))

    saved, repeater = models.get("qwen3"), Repeater(100)
    limits = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40, max_graph_batch=4, max_graph_tokens=28)
    model, cache = ModelConfig(model=str(saved.directory), device="cpu"), CacheConfig(num_blocks=64)
    config = NodeConfig(model=model, cache=cache, scheduler=limits)
    plain = DeviceExecutor.started(config, lambda _: None)
    for name, value in (
        ("device_plan.attention_by_group", attentions),
        ("device_executor.captures_steps", lambda *arguments: True),
        ("cuda_graphs.set_up.CudaRecorder", lambda *arguments: repeater),
        ("cuda_graphs.set_up.choose_products", lambda *arguments: None),
    ):
        monkeypatch.setattr(f"pd_cluster.worker.{name}", value)
    executor = DeviceExecutor.started(config, lambda _: None)
    sizes = executor._graph_sizes.sizes
    assert sizes[:3] == tuple(reversed(decode_sizes(4))), "the largest first"
    assert set(sizes[3:]) == set(step_sizes(28, 6))
    outputs = []
    for worker in (plain, executor):
        driver = Driver(worker, budget=40)
        for prompt in random_prompts((5, 16, 31, 20), VOCAB_SIZE):
            driver.add(prompt)
        outputs.append(driver.run())
    assert outputs[0] == outputs[1] == [saved.generate(one.prompt, 12) for one in driver.sequences]
    assert repeater.num_replays >= 10


def test_steps_are_captured_if_attention_of_every_group_can_be() -> None:
    plain = TorchAttention(AttentionShape(4, 2, 16, 16, num_layers=3, dtype=torch.float32))
    able, limits, cuda = ReferenceAttention(plain), SchedulerConfig(), torch.device("cuda")
    assert captures_steps(limits, [able, able], cuda)
    assert not captures_steps(limits, [able, plain], cuda)
    assert not captures_steps(limits, [able], torch.device("cpu"))
    assert not captures_steps(replace(limits, cuda_graphs=False), [able], cuda)


def test_steps_with_experts_are_captured_if_their_kernel_can_be(tmp_path: Path) -> None:
    limits, lines = SchedulerConfig(), list[str]()
    dense, mixture = spec_of(tmp_path), spec_of(tmp_path, **QWEN3_EXPERTS)
    assert capturable(limits, dense, TORCH, lines.append) is limits
    assert capturable(limits, mixture, replace(TORCH, captures_experts=True), lines.append) is limits
    assert not lines
    uncaptured = capturable(limits, mixture, TORCH, lines.append)
    assert uncaptured == replace(limits, cuda_graphs=False, async_scheduling="off")
    assert (limits.depth_on("cuda"), uncaptured.depth_on("cuda")) == (2, 1)
    assert lines == [
        "no captured steps: the experts of Qwen3MoeForCausalLM are computed by a kernel that waits for the host"
    ]


def test_steps_with_states_are_captured_if_their_kernel_can_be() -> None:
    limits, lines = SchedulerConfig(), list[str]()
    spec = resolve_spec(Path(), CONFIGS["qwen3.8-27b-fp8"])
    assert capturable(limits, spec, replace(TORCH, captures_state=True), lines.append) is limits
    assert not lines
    assert not capturable(limits, spec, TORCH, lines.append).cuda_graphs
    assert lines == [
        "no captured steps: the states of Qwen3_5ForCausalLM are computed by a kernel that waits for the host"
    ]


@pytest.mark.parametrize(
    ("free", "captures", "most_drafts", "states", "left"),
    [
        (9e9, False, 0, None, 9e9), (9e9, True, 0, None, 7e9), (1e9, True, 0, None, 0.0),
        (9e9, True, 4, None, 7e9 - DRAFT_GRAPH_BYTES - 5e7), (9e9, True, 0, "some", 7e9 - STATE_GRAPH_BYTES),
    ],
)  # fmt: skip
def test_captured_steps_leave_less_for_the_cache(
    monkeypatch: pytest.MonkeyPatch, free: float, captures: bool, most_drafts: int, states: str | None, left: float
) -> None:
    """By a GB and 2,000 rows of logits in float32: 80 of seven decode graphs, and four times max_num_seqs.

    Drafts: four times 25 rows more, on a node that has some. Its states or stages may forbid them.
    """
    limits = SchedulerConfig(max_num_seqs=480, max_num_batched_tokens=2000, max_graph_batch=25, speculation="lookup")
    plan = SimpleNamespace(
        config=NodeConfig(scheduler=limits), device=torch.device("cuda"), layout=Phases.layout, attentions=(),
        model=SimpleNamespace(vocab_size=125_000, dtype="float32"), owned=None, place=None, most_drafts=most_drafts,
        state_views=states,
    )  # fmt: skip
    monkeypatch.setattr("pd_cluster.worker.memory_measurement.measure_free_bytes", lambda *arguments: free)
    monkeypatch.setattr("pd_cluster.worker.memory_measurement.captures_steps", lambda *arguments: captures)
    weights = Weights()
    assert DeviceLoaded(cast("Any", plan), weights).free_kv_bytes() == left


def test_captured_steps_take_no_more_than_is_kept_for_them() -> None:
    """Of steps and draws, 8B on an H200, where 256 sequences may run: 1.97 GB, and with drafts 2.45."""
    limits, row_bytes = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048), 151_936 * 2
    plain, drafted = (captured_bytes(limits, row_bytes, has_drafts=has_drafts) for has_drafts in (False, True))
    assert 1.97e9 < plain < 2.1e9
    assert 2.45e9 < drafted < plain + 0.65e9


@pytest.mark.parametrize("states", [(), (KVGroup(KVKind.STATE, (9,), (1, 1 << 20), "float32", 64),)], ids=len)
def test_what_weights_and_the_largest_step_leave_is_free(
    monkeypatch: pytest.MonkeyPatch, states: tuple[KVGroup, ...]
) -> None:
    """A GPU of 80 GB; the weights take 16 GB; the largest step takes 3 GB more beside its own small cache."""
    layout, scratch = BlockLayout((*Phases.layout.groups, *states), 1), list[KVCache]()
    figures: dict[str, Any] = {
        "memory_allocated": 16e9, "memory_reserved": 17e9, "mem_get_info": (60e9, 80e9), "empty_cache": None,
        "reset_peak_memory_stats": None, "synchronize": None,
    }  # fmt: skip
    for name, value in figures.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda *device, value=value: value)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda device: 19e9 + scratch[0].memory.nbytes)
    free = [measure_free_bytes(layout, 100, scratch.append, share, torch.device("cpu")) for share in (0.5, 0.9, 0.999)]
    assert free == pytest.approx([(limit - 3) * 1e9 for limit in (0.5 * 80 - 17.7, 0.9 * 80 - 17.7, 60)])
    if states:
        assert [cache.slabs.num_slabs for cache in scratch] == [2] * 3, "one state, of all rows"
    else:
        assert [cache.slabs.num_blocks(0) for cache in scratch] == [8] * 3, "of a budget of 100 tokens, and one more"
