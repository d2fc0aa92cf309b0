"""A worker without a model: KV is remembered as *which history* a cell holds, so that any wrong block shows at once.

A cell (group, block, slot) holds the hash of all tokens up to and including its position. Before a chunk is "computed",
every earlier position that it reads must hold the right history in the block tables of every KV group: in FULL and
LATENT all, in a WINDOW those that its first token sees. A block of a STATE group is one cell, the hash of all tokens
that the state has taken in. A group that writes into a slab destroys what other groups had there.
A sampled token is a function of the history
and the sequence's seed: `continuation` says what a request must generate, whatever happened to its blocks meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np

from pd_cluster.protocol.messages import AddRequest, FinishReason, Work
from pd_cluster.protocol.sampling_params import MAX_TOP_LOGPROBS, BeamParams, SamplingParams
from pd_cluster.scheduling.batch import Batch, NewBlocks, StepResult
from pd_cluster.scheduling.sequence import sequence_seed
from pd_cluster.worker.verification import ExpectedRows
from pd_connectors.protocol.layout import KVKind
from pd_connectors.protocol.messages import SampledToken, TopLogprob
from tests.drafters import TokenDrafter
from tests.scheduling.kv_groups import ONE_FULL
from tests.scheduling.side_stream import GARBAGE, Cell, SideStream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pd_cluster.scheduling.batch import SequenceChunk, SequenceStart
    from pd_connectors.base import LoadSpec
    from pd_connectors.protocol.layout import BlockRun, KVGroup

BLOCK_SIZE = 16
MAX_MODEL_LEN = 160
VOCAB_SIZE = 23
EOS = 0
START = 17  # the hash before the first token


def history(tokens: Sequence[int], previous: int = START) -> list[int]:
    """The hash of every prefix of `tokens`."""
    hashes = []
    for token in tokens:
        previous = hash((previous, token))  # of ints: the same in every process
        hashes.append(previous)
    return hashes


def sample(last: int, seed: int) -> int:
    """The token after a history, in a sequence with this seed."""
    digest = blake2b(f"{last}/{seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


def candidates(last: int) -> SampledToken:
    """The best tokens after a history, with log-probabilities that do not depend on the seed."""
    row = logprobs(last)
    ranked = sorted(range(VOCAB_SIZE), key=lambda token: -row[token])[:MAX_TOP_LOGPROBS]
    return SampledToken(ranked[0], row[ranked[0]], tuple(TopLogprob(token, row[token]) for token in ranked))


def logprobs(last: int) -> list[float]:
    """The log-probability of each token after a history."""
    digest = blake2b(str(last).encode(), digest_size=2 * VOCAB_SIZE).digest()
    weights = [math.exp(int.from_bytes(digest[at : at + 2], "little") / 8192) for at in range(0, 2 * VOCAB_SIZE, 2)]
    total = sum(weights)
    return [math.log(weight / total) for weight in weights]


def continuation(
    prompt_token_ids: Sequence[int], seed: int, sampling: SamplingParams
) -> tuple[list[int], FinishReason]:
    """What a sequence with this seed generates, and why it ends."""
    last, output = history(prompt_token_ids)[-1], list[int]()
    while True:
        token = sample(last, seed)
        output.append(token)
        last = history([token], last)[-1]
        if token == EOS and not sampling.ignore_eos and len(output) >= sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) == sampling.max_tokens:
            return output, FinishReason.LENGTH


def prompt(length: int, family: int = 0) -> list[int]:
    """Tokens without an EOS; families differ from the first token on."""
    return [(family * 5 + position) % 20 + 1 for position in range(length)]


def message(
    request_id: str,
    prompt_token_ids: Sequence[int],
    *,
    work: Work = Work.GENERATE,
    max_tokens: int = 4,
    n: int = 1,
    seed: int = 1,
    ignore_eos: bool = True,
    priority: int = 0,
    salt: str = "",
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    group: str = "",
    known: tuple[tuple[int, ...], ...] = (),
    beams: BeamParams | None = None,
    grammar: str = "",
    adapter: str = "",
) -> AddRequest:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        n=n,
        seed=seed,
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        beams=beams,
        grammar=grammar,
    )
    return AddRequest(
        request_id, list(prompt_token_ids), sampling, work, priority=priority, salt=salt or adapter, group=group,
        known=known, adapter=adapter,
    )  # fmt: skip


def begun(asked: AddRequest, num_known: int) -> AddRequest:
    """The same request with at most so many tokens of each sequence known, fewer than it generates."""
    seed = asked.sampling.seed
    assert seed is not None
    known = []
    for index in range(asked.sampling.n):
        output, _ = continuation(asked.prompt_token_ids, sequence_seed(seed, index), asked.sampling)
        known.append(tuple(output[: min(num_known, len(output) - 1)]))
    return msgspec.structs.replace(asked, known=tuple(known))


def reads(group: KVGroup, start: int) -> range:
    """The earlier positions that a chunk reads."""
    if group.kind is KVKind.WINDOW:
        return range(max(0, start - group.window + 1), start)
    return range(start)


@dataclass(frozen=True)
class SeedDrafter(TokenDrafter):
    """Finds out which of some seeds a sequence may have, and guesses what it says. Some of its guesses are wrong."""

    num_bent: int = 1  # of five guesses: they are never drawn

    seeds: ClassVar = tuple(sequence_seed(seed, index) for seed in range(4) for index in range(3))

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        hashes = history(token_ids)
        fits = [seed for seed in self.seeds if len(hashes) > 1 and sample(hashes[-2], seed) == token_ids[-1]]
        seed, last, drafts = (fits or self.seeds)[0], hashes[-1], list[int]()
        for _ in range(min(most, last % 7)):
            token = sample(last, seed)
            drafts.append(VOCAB_SIZE if last % 5 < self.num_bent else token)
            last = history([token], last)[-1]
        return tuple(drafts)


@dataclass
class Row:
    """What the worker keeps of a live sequence."""

    start: SequenceStart
    tokens: list[int]
    tables: tuple[dict[int, int], ...]  # by group: index -> block. Of a STATE group: 0 -> the slot
    source: int = -1  # of the next chunk, where it names none
    _hashes: list[int] = field(default_factory=list)

    def history(self, num_tokens: int) -> list[int]:
        """Of its first tokens. Each hash is computed once: a row's tokens only become more."""
        own = self._hashes
        own += history(self.tokens[len(own) : num_tokens], own[-1] if own else START)
        return own[:num_tokens]

    def put(self, new: NewBlocks) -> None:
        """Set blocks, which lie after or among those that the table has."""
        self.tables[new.group].update(enumerate(new.block_ids, new.first_block))


@dataclass
class FakeWorker:
    """Executes batches in order; checks that each is possible, and that it reads what it should.

    `longest_run`: a sequence that samples goes on by up to so many tokens in the same step, as far as its blocks reach.
    """

    max_num_seqs: int
    max_num_tokens: int
    longest_run: int = 1
    are_late: Callable[[], bool] = lambda: False  # whether a sequence gets no token in a step
    groups: tuple[KVGroup, ...] = ONE_FULL.groups(BLOCK_SIZE)
    per_slab: tuple[int, ...] = (10**6,)
    device: dict[Cell, int] = field(default_factory=dict)
    host: dict[Cell, int] = field(default_factory=dict)
    writers: dict[int, int] = field(default_factory=dict)  # slab -> the group that wrote it last
    rows: dict[int, Row] = field(default_factory=dict)
    num_tokens_computed: int = 0
    num_drafts: int = 0
    num_accepted: int = 0

    def __post_init__(self) -> None:
        self.states = [index for index, group in enumerate(self.groups) if group.kind is KVKind.STATE]
        self.side = SideStream(self.groups, self.device, self.host, self._write)

    def execute(self, batch: Batch) -> StepResult:
        rows = {step.seq_id: (self.rows[step.parent], step.token_id) for step in batch.beam_steps}
        for seq_id, (parent, token_id) in rows.items():
            start, known = self.rows[seq_id].start, parent.tokens[:-1]
            self.rows[seq_id] = Row(start, [*known, token_id], tuple(map(dict, parent.tables)), parent.source)
        for seq_id in batch.departures:
            del self.rows[seq_id]
        self.side.finish(batch.step - 1)
        self._copy(batch)
        self.side.begin(batch.step, batch.copies)
        for start in batch.starts:
            assert start.seq_id not in self.rows, "a sequence entered twice"
            assert [new.group for new in start.tables] == list(range(len(self.groups)))
            self.rows[start.seq_id] = row = Row(start, list(start.token_ids), tuple({} for _ in self.groups))
            for new in start.tables:
                row.put(new if new.group not in self.states else NewBlocks(new.group, 0, new.block_ids))
        self._check_slots(batch)
        assert len(batch.chunks) <= len(self.rows) <= self.max_num_seqs
        assert batch.num_tokens <= self.max_num_tokens
        assert sum(max(chunk.num_rows - 1, 0) for chunk in batch.chunks) <= self.max_num_seqs, "rows beyond one each"
        assert len({chunk.seq_id for chunk in batch.chunks}) == len(batch.chunks)
        result = StepResult(batch.step, {})
        for chunk in batch.chunks:
            tokens = self._compute(chunk)
            if chunk.num_samples and not tokens:
                result = replace(result, absent=result.absent | {chunk.seq_id})
            elif chunk.num_samples > 1:
                result.first_samples[chunk.seq_id] = tokens
            elif chunk.num_samples:
                result.samples[chunk.seq_id] = tokens
        self.num_tokens_computed += batch.num_tokens
        return result

    def _copy(self, batch: Batch) -> None:
        copies = batch.copies
        targets = [(group, to) for group, _, to in copies.swap_in + copies.copy_on_write]
        assert len(set(targets)) == len(targets), "two copies into one block"
        swapped_in = {(group, to) for group, _, to in copies.swap_in}
        assert not {copy[:2] for copy in copies.copy_on_write} & swapped_in, "copies depend on each other"
        for group, source, to in copies.swap_out:
            for slot in range(self.groups[group].block_size):
                self.host[group, to, slot] = self.device.get((group, source, slot), GARBAGE)
        for group, source, to in copies.swap_in:
            for slot in range(self.groups[group].block_size):
                self._write((group, to, slot), self.host.get((group, source, slot), GARBAGE))
        for group, source, to in copies.copy_on_write:
            for slot in range(self.groups[group].block_size):
                self._write((group, to, slot), self.device.get((group, source, slot), GARBAGE))

    def _write(self, cell: Cell, value: int) -> None:
        group, slab = cell[0], cell[1] // self.per_slab[cell[0]]
        before = self.writers.setdefault(slab, group)
        if before != group:
            count = self.per_slab[before]
            lost = [one for one in self.device if one[0] == before and one[1] // count == slab]
            for one in lost:
                del self.device[one]
            self.writers[slab] = group
        self.device[cell] = value

    def _compute(self, chunk: SequenceChunk) -> tuple[SampledToken, ...]:
        row, end = self.rows[chunk.seq_id], chunk.start + chunk.num_tokens
        for new in chunk.new_blocks:
            row.put(new)
        for group, table in self._paged(row):
            for index in [index for index in table if index < group.first_block(chunk.start)]:
                del table[index]  # dead: it may be another one's, or another index's, by now
            assert len(set(table.values())) == len(table)
        assert chunk.num_tokens > 0
        certain = end - len(chunk.drafts)
        assert certain <= len(row.tokens), "a chunk of unknown tokens"
        assert bool(chunk.num_samples) == (certain == len(row.tokens))
        most = min(MAX_MODEL_LEN, row.start.num_prompt_tokens + row.start.sampling.max_tokens)
        assert not chunk.drafts or (chunk.is_decode and chunk.num_samples == 1 and end < most), "a run may be too long"
        hashes = row.history(certain)
        hashes += history(chunk.drafts, hashes[-1])
        for index, (group, table) in enumerate(self._paged(row)):
            self.expect(index, table, hashes, reads(group, chunk.start), f"sequence {chunk.seq_id}")
        for index in self.states:
            self._step_state(index, row, chunk, hashes)
        self._put(row, range(chunk.start, end), hashes)
        may_be_late = not self.states or row.start.sampling.grammar
        if not chunk.num_samples or (may_be_late and self.are_late()):
            return ()
        seeds = row.start.num_sample_seeds if chunk.num_samples > 1 else (row.start.seed,)
        assert len(seeds) == chunk.num_samples
        if chunk.drafts:
            drawn = [sample(last, row.start.seed) for last in hashes[chunk.start :]]
            (length,) = ExpectedRows([chunk.drafts], [len(drawn)]).runs(np.array(drawn)).lens
            run = drawn[:length]
            for group, table in zip(self.groups, row.tables, strict=True):  # the blocks after it are given back
                for index in [index for index in table if index * group.block_size >= chunk.start + len(run)]:
                    del table[index]
            self.num_drafts += len(chunk.drafts)
            self.num_accepted += len(run) - 1
            row.tokens += run
            return tuple(map(SampledToken, run))
        tokens = tuple(SampledToken(sample(hashes[-1], seed)) for seed in seeds)
        if row.start.sampling.beams is not None:
            best = candidates(hashes[-1])
            row.tokens.append(best.token_id)
            return (best,)
        row.tokens.append(tokens[0].token_id)  # of several, the row goes on with the first
        return tokens if chunk.num_samples > 1 else self._run_on(row, tokens)

    def _run_on(self, row: Row, run: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Compute the run's last token and sample after it; how often is drawn from the history."""
        position, last = len(row.tokens) - 1, row.history(len(row.tokens))[-1]
        has_blocks = all(position // group.block_size in table for group, table in self._paged(row)) and not self.states
        if len(run) >= 1 + last % self.longest_run or not has_blocks:
            return run
        self._put(row, range(position, position + 1), [*[0] * position, last])
        row.tokens.append(sample(last, row.start.seed))
        return self._run_on(row, (*run, SampledToken(row.tokens[-1])))

    def _put(self, row: Row, positions: range, hashes: Sequence[int]) -> None:
        for index, (group, table) in enumerate(self._paged(row)):
            for position in positions:
                block, slot = divmod(position, group.block_size)
                self._write((index, table[block], slot), hashes[position])

    def _paged(self, row: Row) -> list[tuple[KVGroup, dict[int, int]]]:
        """The groups that are not of states, which come first, and the row's tables of them."""
        return list(zip(self.groups, row.tables, strict=True))[: len(self.groups) - len(self.states)]

    def _check_slots(self, batch: Batch) -> None:
        """No slot is written that another sequence of the step reads or writes, and no save hits another."""
        for group in self.states:
            uses = [one for chunk in batch.chunks for one in self._slots_of(group, chunk)]
            written = [slot for slot, is_written in uses if is_written]
            assert len(set(written)) == len(written), "two writes of a slot in one step"
            assert not {slot for slot, is_written in uses if not is_written} & set(written)

    def _slots_of(self, group: int, chunk: SequenceChunk) -> list[tuple[int, bool]]:
        slot = self.rows[chunk.seq_id].tables[group][0]
        if (states := chunk.states) is None:
            return [(slot, True)]
        written = [states.slot, *(save for _, save in states.saves)]
        return [(one, True) for one in written] + [(states.source, False)] * (states.source not in (states.slot, -1))

    def _step_state(self, group: int, row: Row, chunk: SequenceChunk, hashes: Sequence[int]) -> None:
        size, end, source = self.groups[group].block_size, chunk.start + chunk.num_tokens, row.source
        saves: tuple[tuple[int, int], ...] = ()
        if chunk.states is not None:
            source, row.tables[group][0], saves = chunk.states.source, chunk.states.slot, chunk.states.saves
        assert (source < 0) == (not chunk.start), "a state that does not begin with zeros, or one that does"
        found, place = self.device.get((group, source, 0)), f"sequence {chunk.seq_id} at {chunk.start}, slot {source}"
        assert not chunk.start or found == hashes[chunk.start - 1], f"{place}: the state is of other tokens"
        for num_tokens, slot in saves:
            assert chunk.start < num_tokens <= end
            assert not num_tokens % size
            self._write((group, slot, 0), hashes[num_tokens - 1])
        row.source = row.tables[group][0]
        self._write((group, row.source, 0), hashes[end - 1])

    def expect(
        self, group: int, table: Mapping[int, int], hashes: Sequence[int], positions: range, reader: str
    ) -> None:
        """The blocks of a group hold these histories at these positions."""
        size, device = self.groups[group].block_size, self.device
        for position in positions:
            index, slot = divmod(position, size)
            assert index in table, f"{reader}: no block of group {group} for position {position}"
            found = device.get((group, table[index], slot))
            assert found == hashes[position], f"{reader}: wrong KV at {position}, group {group}, block {table[index]}"

    def expect_runs(self, runs: Sequence[BlockRun], hashes: Sequence[int], reader: str) -> None:
        """The runs hold these histories, as far as they go."""
        for index, (group, run) in enumerate(zip(self.groups, runs, strict=True)):
            size = group.block_size
            positions = range(run.first_block * size, min(len(hashes), run.span.stop * size))
            if group.kind is KVKind.STATE and positions:
                found = self.device.get((index, run.block_ids[0], 0))
                assert found == hashes[positions[-1]], f"{reader}: the state is of other tokens"
                continue
            self.expect(index, dict(zip(run.span, run.block_ids, strict=True)), hashes, positions, reader)

    def write_load(self, load: LoadSpec, prompt_token_ids: Sequence[int], *, good: bool) -> None:
        """A transfer writes its blocks: the prompt's KV, or what a failing one leaves behind."""
        hashes = history(prompt_token_ids)
        for index, (group, run) in enumerate(zip(self.groups, load.runs, strict=True)):
            assert not run.block_ids or run.span.stop == -(-load.num_tokens // group.block_size)
            is_state, end = group.kind is KVKind.STATE, load.num_tokens
            if is_state and run.block_ids:
                self._write((index, run.block_ids[0], 0), hashes[end - 1] if good else GARBAGE)
            for position in range(run.first_block * group.block_size, 0 if is_state else end):
                block, slot = divmod(position, group.block_size)
                block_id = run.block_ids[block - run.first_block]
                self._write((index, block_id, slot), hashes[position] if good else GARBAGE)
