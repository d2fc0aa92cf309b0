"""Captured steps of one size: where their inputs lie, how their sequences attend, and where their outputs stay.

`DecodeStep` serves steps with decodes only. Every token samples, and attention needs lengths only. The logits stay
where the graph computes them, so each graph keeps its own logits and a replay copies nothing.

`MixedStep` serves steps with prefill chunks. It has room for a number of tokens, of sequences, and of chunks among the
sequences. A size without decodes has no attention of decodes. Only the tokens that sample get logits. The graph copies
the logits to a tensor that all mixed steps share, because there are many sizes. It also serves steps of decodes with
drafts alone: every token of these samples, and attention needs lengths and places of queries only.

All calls of attention for captured steps are in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch

from pd_cluster.models.forward_inputs import Tail
from pd_cluster.worker.cuda_graphs.adapter_room import AdapterRoom
from pd_cluster.worker.cuda_graphs.state_places import StateRoom
from pd_kernels.state import NONE, StatePlan
from pd_kernels.values import StepOnDevice, leading_ones

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pd_cluster.models.model import Model
    from pd_cluster.scheduling.batch import SequenceChunk
    from pd_cluster.worker.cuda_graphs.adapter_room import AdaptedRows
    from pd_cluster.worker.step_inputs import Samples
    from pd_kernels.attention import AttentionPlan, GroupAttention, Replayable
    from pd_kernels.chunk_tiles import ChunkTiles
    from pd_kernels.latent import LatentPlan
    from pd_kernels.values import Ints, StepSize

Plan: TypeAlias = "AttentionPlan | LatentPlan"


class StepPlaces(NamedTuple):
    """The inputs of a captured step, as parts of the host buffer's first array.

    The parts are numpy views on the host, torch views on the device. T, S, R: the size's num_tokens, num_seqs and
    num_rows. G: the number of KV groups.
    """

    tokens: Any  # [T]: places in InputBatch.token_choices
    positions: Any  # [T]
    slots: Any  # [G, T]
    owners: Any  # [R]: rows in InputBatch that continue with what is drawn
    temperatures: Any  # float32 in the first half of [R]; 0 for a row that is drawn outside the graph
    seeds: Any  # [R]: see Draws, as for `lengths`
    lengths: Any  # [R]
    attention: Any  # MixedPlaces or None
    # None: there are no states. With decodes only [3, S]: source, slot, and slot for the state at the end of a piece
    states: Any = None  # else StatePlaces
    adapters: AdaptedRows | None = None  # None: no row has one

    def put_adapters(self, slots: Ints) -> None:
        """Write which rows have adapters, if the size has any, after all others. `slots`: of the first tokens."""
        if self.adapters is not None:
            self.adapters.put(slots, None if self.attention is None else self.attention.sampled)


class MixedPlaces(NamedTuple):
    """The inputs that only mixed steps have. StepOnDevice describes all of them but `sampled`."""

    sampled: Any  # [S]: places among the T of the tokens after which one is sampled; [0] with drafts: all
    decode_lens: Any  # [S], [0] without decodes, and with drafts
    seq_lens: Any  # [S + 1]
    query_starts: Any  # [S + 2]
    tiles: Mapping[ChunkTiles, Any]  # [2, count] for each ChunkTiles of the KV groups


class ReplayOutputs(NamedTuple):
    """The outputs of a replay, for all R rows that its size has room for. The next replay overwrites them."""

    logits: torch.Tensor  # [R, num_columns]
    token_ids: torch.Tensor  # int64 [R]: drawn from the logits, or the greedy choice


class CapturedStep(Protocol):
    """A captured step of one size."""

    @property
    def size(self) -> StepSize: ...

    @property
    def length(self) -> int:
        """Length of the array that `places` divides."""

    def places(self, fields: Any) -> StepPlaces:
        """Divide `fields` [length] into views, one for each input of the step."""

    def pad(self, places: StepPlaces, padding_row: int, padding_slots: Ints) -> None:
        """Turn zeroed places into a step of padding alone. It reads no cache, and writes to `padding_slots` at most.

        `padding_slots`: [G, 1]. `StepPlaces.put_adapters` is left to be called.
        """

    def fill(
        self, places: StepPlaces, chunks: tuple[SequenceChunk, ...], samples: Samples, lens: Ints, ends: Ints
    ) -> None:
        """Write the inputs of attention except `lengths`, and which tokens get logits.

        `lens`, `ends` [n]: the number of tokens of each chunk, and the position after its last token.
        """

    def plan(self, places: StepPlaces, block_tables: Sequence[torch.Tensor]) -> tuple[list[Plan], Tail | None]:
        """Plan the attention of each KV group, and name the rows that sample (None: all). The graph captures both.

        `block_tables`: by KV group.
        """

    def states(self, places: StepPlaces) -> StatePlan | None:
        """Plan the states. The graph captures this."""

    def keep(self, logits: torch.Tensor, token_ids: torch.Tensor) -> ReplayOutputs:
        """Put the outputs where a replay leaves them, and return them there. The graph captures this."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A captured step with decodes only."""

    size: StepSize
    query_starts: torch.Tensor  # int32 [num_seqs + 1]: 0, 1, ...
    no_tiles: torch.Tensor  # int32 [2, 0]
    attentions: tuple[Replayable, ...]  # by KV group
    no_slot: int | None = None  # the slot of states that no sequence has; None: there are no states
    adapted: AdapterRoom | None = None  # the last part; None: the size has no adapters

    @property
    def length(self) -> int:
        return self._end + (0 if self.adapted is None else self.adapted.length)

    @property
    def _end(self) -> int:
        """Of the parts that have a number for each sequence."""
        return (6 + 3 * (self.no_slot is not None) + len(self.attentions)) * self.size.num_seqs

    def places(self, fields: Any) -> StepPlaces:
        rows, after = fields[: self._end].reshape(-1, self.size.num_seqs), 2 + len(self.attentions)
        adapters = None if self.adapted is None else self.adapted.places(fields[self._end :])
        owners, temperatures, seeds, lengths = rows[-4:]
        states = None if self.no_slot is None else rows[after : after + 3]
        return StepPlaces(rows[0], rows[1], rows[2:after], owners, temperatures, seeds, lengths, None, states, adapters)

    def pad(self, places: StepPlaces, padding_row: int, padding_slots: Ints) -> None:
        places.tokens[:] = padding_row + 1  # token 0 of the vocabulary
        places.owners[:] = padding_row
        places.slots[:] = padding_slots
        if places.states is not None:
            places.states[:] = NONE
            places.states[1] = self.no_slot

    def fill(
        self, places: StepPlaces, chunks: tuple[SequenceChunk, ...], samples: Samples, lens: Ints, ends: Ints
    ) -> None:
        """Writes nothing, because padding has length 0."""

    def plan(self, places: StepPlaces, block_tables: Sequence[torch.Tensor]) -> tuple[list[Plan], None]:
        lens = places.lengths.to(torch.int32)
        plans = [
            attention.plan(StepOnDevice(lens, lens, self.query_starts, tables[: self.size.num_seqs], self.no_tiles))
            for attention, tables in zip(self.attentions, block_tables, strict=True)
        ]
        return plans, None

    def states(self, places: StepPlaces) -> StatePlan | None:
        """The plan of the states; None: there are none."""
        if places.states is None:
            return None
        sources, slots, saves = places.states.to(torch.int32).unbind()
        starts, positions = self.query_starts, places.positions.to(torch.int32)
        return StatePlan(sources, slots, starts, positions, saves, starts, is_decode=True)

    def keep(self, logits: torch.Tensor, token_ids: torch.Tensor) -> ReplayOutputs:
        return ReplayOutputs(logits, token_ids)


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A captured step with prefill chunks or with drafts. The last sequence is padding and owns the unused tiles."""

    size: StepSize
    attentions: tuple[Replayable, ...]  # by KV group
    tiles: tuple[ChunkTiles, ...]  # the different tiles of the groups
    outputs: ReplayOutputs  # tensors that all mixed steps share
    bounds: tuple[tuple[int, int], ...]  # start and end of each part in the array
    room: StateRoom | None = None  # of the states; None: there are none
    adapted: AdapterRoom | None = None  # the last part; None: the size has no adapters

    @classmethod
    def of(
        cls,
        size: StepSize,
        attentions: tuple[Replayable, ...],
        outputs: ReplayOutputs,
        room: StateRoom | None = None,
        adapted: AdapterRoom | None = None,
    ) -> MixedStep:
        num_tokens, num_seqs, num_rows = size.num_tokens, size.num_seqs, size.num_rows
        num_decodes = num_seqs if size.has_decodes and size.num_chunks else 0
        num_sampled = num_rows if size.num_chunks else 0
        tiles = tuple(dict.fromkeys(attention.tiles for attention in attentions))
        lengths = (
            num_tokens, num_tokens, num_tokens * len(attentions), num_rows, num_sampled, *[num_rows] * 3, num_decodes,
            num_seqs + 1, num_seqs + 2, *(2 * each.count for each in tiles), 0 if room is None else room.length,
            0 if adapted is None else adapted.length,
        )  # fmt: skip
        shared = ReplayOutputs(outputs.logits[:num_rows], outputs.token_ids[:num_rows])
        return cls(size, attentions, tiles, shared, tuple(pairwise((0, *accumulate(lengths)))), room, adapted)

    @property
    def length(self) -> int:
        return self.bounds[-1][1]

    def places(self, fields: Any) -> StepPlaces:
        tokens, positions, slots, owners, sampled, temperatures, seeds, lengths, *others = (
            fields[start:end] for start, end in self.bounds
        )
        decode_lens, seq_lens, query_starts, *tiles, whole, rows = others
        placed = {kind: place.reshape(2, -1) for kind, place in zip(self.tiles, tiles, strict=True)}
        attention = MixedPlaces(sampled, decode_lens, seq_lens, query_starts, placed)
        slots = slots.reshape(-1, self.size.num_tokens)
        states = None if self.room is None else self.room.places(whole)
        adapters = None if self.adapted is None else self.adapted.places(rows)
        return StepPlaces(tokens, positions, slots, owners, temperatures, seeds, lengths, attention, states, adapters)

    def pad(self, places: StepPlaces, padding_row: int, padding_slots: Ints) -> None:
        places.tokens[:] = padding_row + 1  # token 0 of the vocabulary
        places.owners[:] = padding_row
        places.slots[:] = padding_slots
        for tiles in places.attention.tiles.values():
            tiles[0] = self.size.num_seqs
        if self.room is not None:
            self.room.pad(places.states)

    def fill(
        self, places: StepPlaces, chunks: tuple[SequenceChunk, ...], samples: Samples, lens: Ints, ends: Ints
    ) -> None:
        parts: MixedPlaces = places.attention
        count, query_ends = len(lens), np.cumsum(lens)
        parts.seq_lens[:count] = ends
        parts.query_starts[1 : count + 1] = query_ends
        parts.query_starts[count + 1 :] = query_ends[-1]
        if not self.size.num_chunks:
            return
        num_decodes = leading_ones(lens)
        sampling = np.flatnonzero([chunk.num_samples > 0 for chunk in chunks])
        sampled = samples.with_logits(query_ends[sampling])
        parts.sampled[: len(sampled)] = sampled
        parts.decode_lens[:num_decodes] = ends[:num_decodes]
        for tiles, place in parts.tiles.items():
            place[:] = tiles.cut(lens, ends, num_decodes, padding_seq=self.size.num_seqs)

    def plan(self, places: StepPlaces, block_tables: Sequence[torch.Tensor]) -> tuple[list[Plan], Tail | None]:
        parts: MixedPlaces = places.attention
        decode_lens, seq_lens, query_starts = (
            numbers.to(torch.int32) for numbers in (parts.decode_lens, parts.seq_lens, parts.query_starts)
        )
        cut, num_seqs = {tiles: place.to(torch.int32) for tiles, place in parts.tiles.items()}, self.size.num_seqs + 1
        plans = [
            attention.plan(StepOnDevice(decode_lens, seq_lens, query_starts, tables[:num_seqs], cut[attention.tiles]))
            for attention, tables in zip(self.attentions, block_tables, strict=True)
        ]
        return plans, Tail(parts.sampled, plan=None) if self.size.num_chunks else None

    def states(self, places: StepPlaces) -> StatePlan | None:
        """The plan of the states; None: there are none."""
        return None if self.room is None else self.room.plan(places.states, places.attention.query_starts)

    def keep(self, logits: torch.Tensor, token_ids: torch.Tensor) -> ReplayOutputs:
        self.outputs.logits.copy_(logits)
        self.outputs.token_ids.copy_(token_ids)
        return self.outputs


def make_captured_steps(
    sizes: Sequence[StepSize],
    model: Model,
    attentions: Sequence[GroupAttention],
    num_columns: int,
    no_slot: int | None = None,
) -> list[CapturedStep]:
    """Make a step for each size that the attention of every KV group can replay. `num_columns`: logits of a row.

    `no_slot`: of states, no sequence's; None: the model has no states. With states no step has drafts, because a wrong
    one would stay in the state. Steps with decodes only come first. Of each kind the largest step comes first.
    """
    decodes = sorted((size for size in sizes if size.is_plain), key=lambda size: (-size.num_seqs, size.has_adapters))
    mixed = sorted(
        (size for size in sizes if not size.is_plain and (no_slot is None or not size.has_drafts)),
        key=lambda size: (-size.num_tokens, -size.num_seqs, size.is_far, size.has_adapters),
    )
    return [
        *_decode_steps(decodes, model, attentions, no_slot),
        *_mixed_steps(mixed, model, attentions, num_columns, no_slot),
    ]


def _decode_steps(
    sizes: Sequence[StepSize], model: Model, attentions: Sequence[GroupAttention], no_slot: int | None
) -> Iterator[DecodeStep]:
    most = max((size.num_seqs for size in sizes), default=0)
    query_starts = torch.arange(most + 1, dtype=torch.int32, device=model.device)
    no_tiles = query_starts.new_empty(2, 0)
    for size, replayables in _captured(sizes, attentions):
        adapted = AdapterRoom.of(size, model.adapters)
        yield DecodeStep(size, query_starts[: size.num_seqs + 1], no_tiles, replayables, no_slot, adapted)


def _mixed_steps(
    sizes: Sequence[StepSize],
    model: Model,
    attentions: Sequence[GroupAttention],
    num_columns: int,
    no_slot: int | None,
) -> Iterator[MixedStep]:
    most, device = max((size.num_rows for size in sizes), default=0), model.device
    outputs = ReplayOutputs(
        torch.empty((most, num_columns), dtype=model.dtype, device=device),
        torch.empty(most, dtype=torch.int64, device=device),
    )
    for size, replayables in _captured(sizes, attentions):
        room = None if no_slot is None else StateRoom.of(size, no_slot)
        yield MixedStep.of(size, replayables, outputs, room, AdapterRoom.of(size, model.adapters))


def _captured(
    sizes: Sequence[StepSize], attentions: Sequence[GroupAttention]
) -> Iterator[tuple[StepSize, tuple[Replayable, ...]]]:
    """The sizes that all groups can replay, with the attention of each group."""
    for size in sizes:
        captured = [attention.captured(size) for attention in attentions]
        replayables = tuple(attention for attention in captured if attention is not None)
        if len(replayables) == len(captured):
            yield size, replayables
