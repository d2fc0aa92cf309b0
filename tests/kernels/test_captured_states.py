"""States in captured steps with prompts: bit for bit those of the same steps as they are, in any padding.

Here a step's layer is called on the places of the captured step; on a GPU it is captured as a graph, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the kernels that are captured need triton")

from pd_cluster.models.gated_delta import GatedDelta
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, NewBlocks, SequenceChunk, SequenceStart, StateStep
from pd_cluster.worker.cuda_graphs.captured_step import MixedStep, ReplayOutputs
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, step_sizes
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder
from pd_cluster.worker.cuda_graphs.state_places import StateRoom
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.input_batch import InputBatch
from pd_cluster.worker.sampling_state import SamplingState
from pd_kernels.chunk_tiles import ChunkTiles
from pd_kernels.state import PIECE, StateCache
from pd_kernels.torch_state import TorchState
from pd_kernels.triton_pieces import most_pieces
from pd_kernels.triton_state import TritonState
from pd_kernels.values import StepSize
from tests.kernels.state_steps import Layer, make_cache, make_layer
from tests.worker.repeated_graphs import ReferenceReplayable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_kernels.state import StateOps, StatePlan

# Triton's interpreter on numpy
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
MAX_LEN, BLOCK_SIZE, NUM_SEQS, NO_SLOT = 4096, 64, 12, 0
PADDING_SLOTS = np.zeros((1, 1), np.int64)


class Part(NamedTuple):
    """One sequence's part in a step."""

    start: int
    num_tokens: int
    source: int
    slot: int
    saves: tuple[tuple[int, int], ...] = ()


DECODES = (Part(70, 1, 2, 2), Part(63, 1, 3, 13, ((64, 14),)), Part(0, 1, -1, 15))
STEPS = {
    "one prompt": (Part(0, 127, -1, 2),),
    "odd lengths": (Part(0, 3, -1, 2), Part(0, 65, -1, 3)),
    "goes on at a multiple of 64": (Part(64, 70, 2, 2), Part(128, 64, 3, 3)),
    "goes on from a hit": (Part(64, 30, 5, 15), Part(128, 2, 5, 16)),
    "goes on inside a piece": (Part(100, 40, 2, 2), Part(63, 2, 3, 3), Part(62, 66, 4, 4)),
    "beside decodes": (*DECODES, Part(0, 40, -1, 16), Part(62, 3, 4, 4)),
    "saves": (*DECODES, Part(0, 131, -1, 16, ((64, 17), (128, 18))), Part(100, 28, 4, 4, ((128, 19),))),
    "one token after more": (Part(0, 20, -1, 2), Part(90, 1, 3, 3), Part(127, 1, 4, 4, ((128, 17),))),
    "one token each": (*DECODES, Part(9, 1, 4, 4)),
}
USED, NUM_SLOTS = (2, 3, 4, 5), 20


def exact(parts: tuple[Part, ...]) -> StepSize:
    """The size without padding."""
    num_decodes = next((at for at, part in enumerate(parts) if part.num_tokens > 1), len(parts))
    num_chunks = max(1, len(parts) - num_decodes)
    return StepSize(sum(part.num_tokens for part in parts), len(parts), num_chunks, has_decodes=num_decodes > 0)


def roomy(parts: tuple[Part, ...]) -> StepSize:
    return StepSize(sum(part.num_tokens for part in parts) + 70, NUM_SEQS, 6, has_decodes=True)


class Packer:
    """Packs steps of new sequences."""

    def __init__(self) -> None:
        self._buffer = HostBuffer(DEVICE, 1 << 18)
        sampling = SamplingState(64, 99, (), self._buffer)
        self._rows = InputBatch(64, MAX_LEN, [BLOCK_SIZE], sampling, self._buffer, 99, DEVICE, has_states=True)
        self._number = 0

    def apply(self, parts: tuple[Part, ...]) -> tuple[SequenceChunk, ...]:
        """The chunks of a step; those that go on where they left their state do not name it."""
        starts, chunks = [], []
        for part in parts:
            self._number += 1
            end = part.start + part.num_tokens
            tables = NewBlocks(0, 0, tuple(range(1, 2 + end // BLOCK_SIZE))), NewBlocks(1, 0, (part.slot,))
            starts.append(SequenceStart(self._number, (7,) * end, end, tables, GREEDY, 0))
            states = StateStep(part.source, part.slot, part.saves)
            chunks.append(SequenceChunk(self._number, part.start, part.num_tokens, num_samples=1, states=states))
        self._rows.clear()
        self._rows.apply(Batch(0, tuple(starts)))
        return tuple(chunks)

    def plain(self, parts: tuple[Part, ...]) -> StatePlan:
        self._buffer.begin()
        plan = self._rows.build(self.apply(parts)).states
        self._buffer.flush()
        assert plan is not None
        return plan

    def place(self, step: MixedStep, parts: tuple[Part, ...]) -> None:
        """Put the inputs of a step where `planned` finds them."""
        chunks = self.apply(parts)
        self._buffer.begin()
        self._rows.build_replay(chunks, step, PADDING_SLOTS, None)
        self._buffer.flush()

    def place_padding(self, step: MixedStep) -> None:
        self._buffer.begin()
        step.pad(step.places(self._buffer.take_first(step.length)), 64, PADDING_SLOTS)
        self._buffer.flush()

    def planned(self, step: MixedStep) -> StatePlan:
        plan = step.states(step.places(self._buffer.first(step.length)))
        assert plan is not None
        return plan


def make_step(size: StepSize) -> MixedStep:
    attention = ReferenceReplayable(0, ChunkTiles(1 << 20, size.num_chunks), has_drafts=False)
    outputs = ReplayOutputs(torch.empty(size.num_rows, 99), torch.empty(size.num_rows, dtype=torch.int64))
    return MixedStep.of(size, (attention,), outputs, StateRoom.of(size, NO_SLOT))


@dataclass(frozen=True)
class Mixer:
    """A layer's mixer over random tokens."""

    layer: Layer
    delta: GatedDelta
    dtype: torch.dtype

    @classmethod
    def of(cls, layer: Layer, ops: StateOps, dtype: torch.dtype) -> Mixer:
        random = torch.Generator().manual_seed(3)
        log, bias = (torch.randn(layer.value_heads, generator=random).to(DEVICE) for _ in range(2))
        norm = torch.randn(layer.value_dim, generator=random).to(DEVICE, dtype)
        kernels = cast("Any", SimpleNamespace(state=ops))
        return cls(layer, GatedDelta(kernels, 1, layer.weight.to(DEVICE, dtype), log, bias, norm, 1e-6), dtype)

    def tokens(self, count: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both products of the layer with `count` tokens, and NaN up to `length`."""
        random, width = torch.Generator().manual_seed(4), self.layer.value_heads * self.layer.value_dim
        x = torch.full((length, self.layer.channels + width), torch.nan)
        gates = torch.full((length, 2 * self.layer.value_heads), torch.nan)
        for rows in (x, gates):
            rows[:count] = torch.randn((count, rows.shape[1]), generator=random)
        return x.to(DEVICE, self.dtype), gates.to(DEVICE, self.dtype)

    def cache(self) -> StateCache:
        """Slots without a state are NaN, that of padding too."""
        return StateCache(*(each.to(DEVICE) for each in make_cache(self.layer, NUM_SLOTS, USED, self.dtype)))

    def __call__(self, x: torch.Tensor, gates: torch.Tensor, plan: StatePlan, cache: StateCache) -> torch.Tensor:
        inputs = cast("Any", SimpleNamespace(states=plan))
        return cast("torch.Tensor", self.delta(x, cast("Any", None), inputs, cache, None, gates))

    def plain(self, packer: Packer, parts: tuple[Part, ...]) -> tuple[torch.Tensor, StateCache]:
        """What the step computes without a graph, and what it leaves."""
        count, cache = sum(part.num_tokens for part in parts), self.cache()
        return self(*self.tokens(count, count), packer.plain(parts), cache), cache


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """In all bits, those of NaN too."""
    kind = torch.int32 if found.dtype is torch.float32 else torch.int16
    assert torch.equal(found.contiguous().view(kind), expected.contiguous().view(kind))


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory that a kernel does not write is NaN, as that of an earlier step may be."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.slow_cases
@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("make_size", [exact, roomy])
@pytest.mark.parametrize("name", STEPS)
def test_a_captured_step_has_the_bits_of_the_step(name: str, make_size: Any) -> None:
    """Its results, the states that it writes and saves, and all other slots. Rows of padding are NaN."""
    packer, mixer, parts = Packer(), Mixer.of(make_layer(1, 2, 16, 16), TritonState(), torch.float32), STEPS[name]
    expected, left = mixer.plain(packer, parts)
    assert expected.isfinite().all()
    step, count = make_step(make_size(parts)), len(expected)
    packer.place(step, parts)
    cache = mixer.cache()
    found = mixer(*mixer.tokens(count, step.size.num_tokens), packer.planned(step), cache)
    assert_same(found[:count], expected)
    assert found[count:].isnan().all()
    for kept, wanted in zip(cache, left, strict=True):
        assert_same(kept, wanted)
        assert kept[NO_SLOT].isnan().all()


@pytest.mark.usefixtures("unwritten_is_nan")
def test_a_step_of_padding_alone_touches_no_slot() -> None:
    packer, mixer, step = Packer(), Mixer.of(make_layer(1, 2, 16, 16), TritonState(), torch.float32), roomy(())
    packer.place_padding(make_step(step))
    cache = mixer.cache()
    assert mixer(*mixer.tokens(0, step.num_tokens), packer.planned(make_step(step)), cache).isnan().all()
    for kept, before in zip(cache, mixer.cache(), strict=True):
        assert_same(kept, before)


def test_a_step_leaves_nothing_for_the_next_one() -> None:
    """A step with saves and many pieces, then one with fewer, in the same places. Libraries round as lengths go."""
    packer, mixer = Packer(), Mixer.of(make_layer(), TorchState(), torch.float32)
    step = make_step(StepSize(300, NUM_SEQS, 6, has_decodes=True))
    for name in ("saves", "one prompt", "beside decodes", "one token each"):
        expected, left = mixer.plain(packer, STEPS[name])
        packer.place(step, STEPS[name])
        cache, count = mixer.cache(), len(expected)
        found = mixer(*mixer.tokens(count, 300), packer.planned(step), cache)[:count]
        for kept, wanted in zip((found, *cache), (expected, *left), strict=True):
            torch.testing.assert_close(kept, wanted, equal_nan=True)


@st.composite
def any_steps(draw: st.DrawFn) -> tuple[Part, ...]:
    starts = st.one_of(st.integers(0, 300), st.sampled_from([0, 62, 63, 64, 127, 128]))
    lengths = st.one_of(st.just(2), st.integers(1, 200))
    decodes = [Part(draw(starts), 1, slot, slot) for slot in range(1, 1 + draw(st.integers(0, 40)))]
    prompts = []
    for at in range(draw(st.integers(0 if decodes else 1, 20))):
        start, count, slot = draw(starts), draw(lengths), 100 + 10 * at
        ends = range((start // PIECE + 1) * PIECE, start + count + 1, PIECE)
        saves = tuple((end, slot + 1 + index) for index, end in enumerate(ends) if draw(st.booleans()))
        prompts.append(Part(start, count, slot, slot, saves))
    return (*decodes, *prompts)


@settings(max_examples=80, deadline=None)
@given(any_steps())
def test_any_step_that_a_size_accepts_has_its_plan(parts: tuple[Part, ...]) -> None:
    """And room for its pieces, in the smallest size that can have the step, too."""
    packer = Packer()
    chosen = GraphSizes(step_sizes(2048, 64)).choose(packer.apply(parts))
    for size in {exact(parts), chosen or exact(parts)}:
        step, count = make_step(size), len(parts)
        expected = {
            name: found.tolist() for name, found in packer.plain(parts)._asdict().items() if torch.is_tensor(found)
        }
        packer.place(step, parts)  # on a GPU where the plan was
        plan, num_pieces = packer.planned(step), expected["piece_starts"][-1]
        assert plan.saves is not None
        assert plan.prompts is not None
        num_decodes = next((at for at, part in enumerate(parts) if part.num_tokens > 1), count)
        assert plan.prompts.first.tolist() == [num_decodes]
        assert count - num_decodes <= plan.prompts.most == size.num_chunks
        assert num_pieces - num_decodes <= plan.prompts.most_pieces
        assert num_pieces <= len(plan.saves) == most_pieces(plan, size.num_tokens)
        for name in ("sources", "slots", "positions"):
            found = getattr(plan, name).tolist()
            assert found[:count] == expected[name], name
            assert len(found) == size.num_seqs
        assert set(plan.slots[count:].tolist()) <= {NO_SLOT}
        for name in ("starts", "piece_starts"):
            found, wanted = getattr(plan, name).tolist(), expected[name]
            assert found == wanted + wanted[-1:] * (size.num_seqs - count), name
        saves = expected.get("saves", [-1] * num_pieces)
        assert plan.saves.tolist() == saves + [-1] * (len(plan.saves) - num_pieces)
        tensors = (
            plan.sources,
            plan.slots,
            plan.starts,
            plan.positions,
            plan.saves,
            plan.piece_starts,
            *plan.prompts[:1],
        )
        assert not any(tensor.data_ptr() % 16 for tensor in tensors), "kernels are compiled for what is aligned"


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["35B", "small"])
def test_a_graph_replays_any_step_with_its_bits(kind: str) -> None:
    """Captured with padding alone, then replayed for one step after the other. 35B: a layer of Qwen3.6-35B-A3B."""
    layer = make_layer(16, 32, 128, 128) if kind == "35B" else make_layer(2, 4, 16, 32)
    packer, mixer = Packer(), Mixer.of(layer, TritonState(), torch.bfloat16)
    step = make_step(StepSize(1024, 64, 8, has_decodes=True))
    far = (*DECODES, Part(0, 700, -1, 16, ((512, 17),)), Part(128, 200, 5, 18))
    packer.place_padding(step)
    x, gates = mixer.tokens(0, step.size.num_tokens)
    cache = mixer.cache()
    replay, found = CudaRecorder(DEVICE)(
        lambda: cast("Any", ReplayOutputs(mixer(x, gates, packer.planned(step), cache), x))
    )
    for parts in (*STEPS.values(), far, STEPS["one prompt"]):
        expected, left = mixer.plain(packer, parts)
        count = len(expected)
        for place, value in zip((x, gates, *cache), (*mixer.tokens(count, len(x)), *mixer.cache()), strict=True):
            place.copy_(value)
        packer.place(step, parts)
        replay()
        assert_same(found.logits[:count], expected)
        for kept, wanted in zip(cache, left, strict=True):
            assert_same(kept, wanted)
