"""Any step that a size accepts: its numbers are those of the same step packed as it is, and its tiles cover it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="tiles are those of the Triton kernels")

from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, NewBlocks, SequenceChunk, SequenceStart
from pd_cluster.worker.cuda_graphs.captured_step import MixedStep
from pd_cluster.worker.cuda_graphs.graph_sizes import (
    FAR_KEYS,
    GraphSizes,
    adapted_sizes,
    decode_sizes,
    draft_sizes,
    step_sizes,
)
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.input_batch import InputBatch
from pd_cluster.worker.kv_cache import DTYPES, KVCache
from pd_cluster.worker.sampler import WholeSampler
from pd_cluster.worker.sampling_state import SamplingState
from pd_connectors.protocol.layout import BlockLayout
from pd_connectors.protocol.slabs import KvSlabs
from pd_kernels.attention import AttentionShape
from pd_kernels.backends import TORCH
from pd_kernels.lora import NO_SLOT, NO_TILE, AdapterRows
from pd_kernels.triton_plan import TritonAttention
from tests.connectors.layouts import full_layout
from tests.worker.repeated_graphs import near_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pd_cluster.worker.cuda_graphs.captured_step import CapturedStep, StepPlaces
    from pd_cluster.worker.step_inputs import ReplayInputs
    from pd_kernels.values import StepSize

MAX_LEN, BLOCK_SIZE, NUM_SLOTS, CPU = FAR_KEYS + 700, 16, 4, torch.device("cpu")
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


@dataclass(frozen=True)
class Part:
    """One sequence's part in a step."""

    start: int
    num_tokens: int
    rest: int  # tokens known after them; 0: the chunk samples
    is_late: bool  # its last token is on the device only
    slot: int  # of its adapter


@dataclass(frozen=True)
class Problem:
    """A worker's limits and a step within them."""

    max_seqs: int
    limit: int
    group: int
    dtype: str
    with_far: bool
    with_decode_sizes: bool
    parts: tuple[Part, ...]


@pytest.fixture(autouse=True, scope="module")
def gpu() -> Iterator[None]:
    """Cut as for a GPU with so many multiprocessors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pd_kernels.triton_plan.num_processors", lambda device: 132)
        yield


class NoRecorder:
    """Runs nothing, and records it."""

    free_bytes = 0

    def has_room(self) -> bool:
        return True

    def __call__(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return lambda: None, None


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    max_seqs, limit = draw(st.integers(1, 90)), draw(st.integers(1, 900))
    starts = st.one_of(st.just(0), st.integers(0, 60), st.integers(FAR_KEYS - 50, FAR_KEYS + 50))
    lengths = st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 600))
    slots, parts, left = st.integers(NO_SLOT, draw(st.integers(NO_SLOT, NUM_SLOTS - 1))), list[Part](), limit
    num_decodes = draw(st.one_of(st.just(0), st.integers(0, min(max_seqs, left))))
    for index in range(draw(st.integers(0 if num_decodes else 1, max(max_seqs - num_decodes, 1))) + num_decodes):
        if len(parts) == max_seqs or not left:
            break
        num_tokens = 1 if index < num_decodes else min(draw(lengths), left)
        left -= num_tokens
        rest = draw(st.integers(0, 3))
        parts.append(Part(draw(starts), num_tokens, rest, not rest and draw(st.booleans()), draw(slots)))
    group, dtype = draw(st.integers(1, 32)), draw(st.sampled_from(["float32", "float16"]))
    return Problem(max_seqs, limit, group, dtype, draw(st.booleans()), draw(st.booleans()), tuple(parts))


def make_rows(problem: Problem) -> tuple[InputBatch, HostBuffer, tuple[SequenceChunk, ...]]:
    """Rows in which the step may be launched. The result of the step that sampled late tokens was not read yet."""
    host_buffer = HostBuffer(CPU, 64 * problem.limit + 200 * problem.max_seqs + 1024)
    sampling = SamplingState(problem.max_seqs, 99, (), host_buffer)
    rows = InputBatch(problem.max_seqs, MAX_LEN, [BLOCK_SIZE] * 3, sampling, host_buffer, 99, CPU)
    random, starts, chunks, before = np.random.default_rng(0), [], [], []
    for seq_id, part in enumerate(problem.parts):
        end = part.start + part.num_tokens
        known = end + part.rest - part.is_late
        tables = tuple(
            NewBlocks(group, 0, tuple(random.permutation(1000)[: -(-end // BLOCK_SIZE)].tolist())) for group in range(3)
        )
        token_ids = tuple(random.integers(0, 99, known).tolist())
        starts.append(SequenceStart(seq_id, token_ids, known, tables, GREEDY, 0, adapter=part.slot))
        chunks.append(SequenceChunk(seq_id, part.start, part.num_tokens, num_samples=int(not part.rest)))
        if part.is_late:
            before.append(SequenceChunk(seq_id, known - 1, 1, num_samples=1))
    rows.apply(Batch(0, tuple(starts)))
    if before:
        rows.note_launched(rows.build(tuple(before)).samples, torch.from_numpy(random.integers(0, 99, len(before))))
    return rows, host_buffer, tuple(chunks)


def make_graphs(problem: Problem, rows: InputBatch, host_buffer: HostBuffer) -> StepGraphs:
    """Of a model that has a shape and no weights. Two of its KV groups share tiles."""
    layout = BlockLayout(3 * full_layout(BLOCK_SIZE, 2, 1, 16, problem.dtype).groups)
    spec = SimpleNamespace(vocab_size=99)
    adapters = SimpleNamespace(num_slots=NUM_SLOTS)
    model = cast("Any", SimpleNamespace(device=CPU, dtype=torch.float32, spec=spec, adapters=adapters))
    shape = AttentionShape(2 * problem.group, 2, 16, BLOCK_SIZE, 1, DTYPES[problem.dtype])
    attentions = [TritonAttention.of(shape, CPU, large_tiles=cast("Any", large)) for large in (None, "a kernel", None)]
    sampler = WholeSampler(spec.vocab_size, TORCH)
    steps = StepGraphs(
        model, KVCache.allocate(layout, KvSlabs.of_blocks(layout, 1), 0, CPU), rows, host_buffer, sampler, attentions
    )
    decodes = decode_sizes(problem.max_seqs) if problem.with_decode_sizes else []
    mixed = (step_sizes if problem.with_far else near_sizes)(problem.limit, problem.max_seqs)
    drafts = draft_sizes(2 * problem.max_seqs, problem.max_seqs)
    sizes = [*decodes, *drafts, *mixed]
    steps.capture([*sizes, *adapted_sizes(sizes)], NoRecorder(), lambda _: None)
    return steps


def check_tokens(rows: InputBatch, chunks: tuple[SequenceChunk, ...], places: StepPlaces, padding_slot: int) -> None:
    """And the rows that sample, against the packing of steps that are not captured."""
    plain = rows.build(chunks)
    count = len(plain.token_ids)
    token_ids = rows.token_choices[places.tokens]
    rows.fill_late(plain)
    assert torch.equal(token_ids[:count], plain.token_ids)
    assert torch.equal(places.positions[:count], plain.positions)
    for slots, expected in zip(places.slots, plain.slot_mappings, strict=True):
        assert torch.equal(slots[:count], expected)
        assert set(slots[count:].tolist()) <= {padding_slot}
    assert not token_ids[count:].any(), "padding needs no last token"
    rows_drawn, positions = plain.samples.draw_rows.tolist(), plain.samples.draw_positions.tolist()
    assert places.lengths.tolist()[: len(positions)] == positions
    assert places.owners.tolist()[: len(rows_drawn)] == rows_drawn
    assert set(places.owners.tolist()[len(rows_drawn) :]) <= {rows.padding_row}


def check_sequences(rows: InputBatch, chunks: tuple[SequenceChunk, ...], places: StepPlaces, tables: Any) -> None:
    """Their order, lengths and tables, and those that sample. Those after the last one are empty."""
    plain, count, parts = rows.build(chunks), len(chunks), places.attention
    packed = plain.sequences[0]
    for table, own in zip(tables, plain.sequences, strict=True):
        assert torch.equal(table, own.block_tables[:, : table.shape[1]])
        assert table.shape[1] * BLOCK_SIZE >= int(packed.host_seq_lens.max())
    if parts is None:
        assert places.lengths.tolist()[:count] == packed.host_seq_lens.tolist()
        assert not places.lengths[count:].any()
        return
    if chunks[-1].drafts:
        assert plain.tail is None, "all tokens sample"
        assert not len(parts.sampled) + len(parts.decode_lens)
    else:
        expected = torch.arange(count) if plain.tail is None else plain.tail.rows
        assert parts.sampled[: len(expected)].tolist() == expected.tolist()
        decodes = parts.decode_lens.tolist()
        assert decodes[: packed.num_decodes] == packed.host_seq_lens[: packed.num_decodes].tolist()
        assert not any(decodes[packed.num_decodes :])
    assert parts.seq_lens.tolist()[:count] == packed.host_seq_lens.tolist()
    assert not parts.seq_lens[count:].any()
    starts = parts.query_starts.tolist()
    assert starts[: count + 1] == packed.query_starts.tolist()
    assert set(starts[count:]) == {starts[count]}
    assert len(parts.seq_lens) > count, "there is a padding sequence"


def check_tiles(step: MixedStep, chunks: tuple[SequenceChunk, ...], places: StepPlaces) -> None:
    """Every chunk's tokens are covered once, and no others."""
    parts = places.attention
    num_decodes = int((parts.decode_lens > 0).sum())
    assert set(parts.tiles) == {attention.tiles for attention in step.attentions}
    for kind, tiles in parts.tiles.items():
        seqs, firsts = tiles.tolist()
        found = [(seq, first) for seq, first in zip(seqs, firsts, strict=True) if seq != step.size.num_seqs]
        wanted = [
            (seq, first)
            for seq in range(num_decodes, len(chunks))
            for first in range(0, chunks[seq].num_tokens, kind.num_tokens)
        ]
        assert sorted(found) == wanted
        assert seqs[: len(found)] == [seq for seq, _ in found], "padding sequences come last"
        assert not any(firsts[len(found) :])


def check_adapters(rows: InputBatch, chunks: tuple[SequenceChunk, ...], step: CapturedStep, places: StepPlaces) -> None:
    """Each row of the step has its adapter, and padding has none. Each row that samples has that of its token."""
    plain = rows.build(chunks).adapters
    if not step.size.has_adapters:
        assert plain is None
        assert places.adapters is None
        return
    assert plain is not None
    assert places.adapters is not None
    found = places.adapters.on_device()
    count = sum(chunk.num_tokens for chunk in chunks)
    of_rows = slots_of(found)
    assert of_rows == slots_of(plain) + [NO_SLOT] * (step.size.num_tokens - count)
    if step.size.num_chunks:
        assert found.tail is not None
        assert slots_of(found.tail) == [of_rows[place] for place in places.attention.sampled.tolist()]


def slots_of(rows: AdapterRows) -> list[int]:
    """By row. A tile has rows of one slot, and each row is in one tile."""
    found = dict[int, int]()
    for slot, first, end in rows.tiles.tolist():
        if slot != NO_TILE:
            assert end - first <= rows.most
            own = rows.order[first:end].tolist()
            assert not found.keys() & own
            found |= dict.fromkeys(own, slot)
    return [found[row] for row in range(len(rows.order))]


def has_adapters(problem: Problem) -> bool:
    return any(part.slot != NO_SLOT for part in problem.parts)


def is_served(problem: Problem, num_decodes: int) -> bool:
    """Whether some size has room for the step, and not for far more."""
    if problem.with_decode_sizes and all(part.num_tokens == 1 and not part.rest for part in problem.parts):
        return True
    num_tokens, num_seqs = sum(part.num_tokens for part in problem.parts), len(problem.parts)
    sizes = near_sizes(problem.limit, problem.max_seqs)
    return any(
        num_tokens <= size.num_tokens < num_tokens + 256 and size.num_seqs >= num_seqs
        and size.num_chunks >= num_seqs - num_decodes and (size.has_decodes or not num_decodes)
        for size in (adapted_sizes(sizes) if has_adapters(problem) else sizes)
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_step_in_any_place_is_the_step(problem: Problem) -> None:
    rows, host_buffer, chunks = make_rows(problem)
    steps = make_graphs(problem, rows, host_buffer)
    size = GraphSizes(steps.sizes).choose(chunks, has_adapters=has_adapters(problem))
    num_decodes = next((i for i, chunk in enumerate(chunks) if chunk.num_tokens > 1), len(chunks))
    assert (size is not None) == is_served(problem, num_decodes)
    if size is None:
        return
    assert size.num_chunks >= len(chunks) - num_decodes
    assert size.has_decodes or not num_decodes
    host_buffer.begin()
    inputs = steps.build(chunks, size, None)
    step = steps._graphs[size].step
    places = step.places(host_buffer.first(step.length))
    assert [len(part) for part in places[:2]] == [size.num_tokens] * 2
    assert places.slots.shape == (3, size.num_tokens)
    assert [len(part) for part in places[3:7]] == [size.num_seqs] * 4
    check_step(rows, steps, chunks, size, inputs)


def check_step(
    rows: InputBatch, steps: StepGraphs, chunks: tuple[SequenceChunk, ...], size: StepSize, inputs: ReplayInputs
) -> None:
    step = steps._graphs[size].step
    places = step.places(rows._host_buffer.first(step.length))
    padding_slot = 3 * BLOCK_SIZE  # after the only slabs, of a block each
    check_tokens(rows, chunks, places, padding_slot)
    check_sequences(rows, chunks, places, inputs.block_tables)
    check_adapters(rows, chunks, step, places)
    if isinstance(step, MixedStep) and size.num_chunks:
        check_tiles(step, chunks, places)


@settings(max_examples=60, deadline=None)
@given(problems(), st.data())
def test_a_step_with_drafts_in_any_place_is_the_step(problem: Problem, data: st.DataObject) -> None:
    """Decodes, each with up to as many drafts as there may be sequences; some last tokens are on the device only."""
    parts = tuple(replace(part, num_tokens=1, rest=0) for part in problem.parts)
    rows, host_buffer, decodes = make_rows(replace(problem, parts=parts))
    left, chunks = problem.max_seqs, list[SequenceChunk]()
    for chunk in decodes:
        left -= (count := data.draw(st.integers(0, min(left, 16))))
        drafts = tuple(data.draw(st.lists(st.integers(0, 98), min_size=count, max_size=count)))
        new = tuple(
            NewBlocks(group, 0, tuple(range(-(-(chunk.start + 1 + count) // BLOCK_SIZE)))) for group in range(3)
        )
        chunks.append(msgspec.structs.replace(chunk, num_tokens=1 + count, drafts=drafts, new_blocks=new))
    chunks.sort(key=lambda chunk: chunk.num_tokens)
    rows.apply(Batch(1, (), tuple(chunks)))
    steps = make_graphs(problem, rows, host_buffer)
    size = GraphSizes(steps.sizes).choose(tuple(chunks), has_adapters=has_adapters(problem))
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    if num_tokens == len(chunks):
        return
    assert size is not None
    assert size.has_drafts
    host_buffer.begin()
    inputs = steps.build(tuple(chunks), size, None)
    assert size.num_tokens == size.num_rows >= num_tokens
    check_step(rows, steps, tuple(chunks), size, inputs)
