"""A worker without a model: KV is remembered as *which history* a cell holds, so that any wrong block shows at once.

A cell (block, slot) holds the hash of all tokens up to and including its position. Before a chunk is "computed", every
earlier position of the sequence's block table must hold the right history. A sampled token is a function of the history
and the sequence's seed: `continuation` says what a request must generate, whatever happened to its blocks meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.protocol.messages import AddRequest, FinishReason, Work
from pd_cluster.protocol.sampling_params import MAX_TOP_LOGPROBS, BeamParams, SamplingParams
from pd_cluster.scheduling.batch import Batch, StepResult
from pd_cluster.scheduling.sequence import sequence_seed
from pd_connectors.protocol.messages import SampledToken, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.scheduling.batch import SequenceChunk, SequenceStart
    from pd_connectors.base import LoadSpec

BLOCK_SIZE = 16
VOCAB_SIZE = 23
EOS = 0
GARBAGE = -1


def history(tokens: Sequence[int], previous: int = 17) -> list[int]:
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
    return [math.log(weight / sum(weights)) for weight in weights]


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
        request_id, list(prompt_token_ids), sampling, work, priority=priority, salt=salt, group=group, known=known
    )


def begun(asked: AddRequest, num_known: int) -> AddRequest:
    """The same request with at most so many tokens of each sequence known, fewer than it generates."""
    seed = asked.sampling.seed
    assert seed is not None
    known = []
    for index in range(asked.sampling.n):
        output, _ = continuation(asked.prompt_token_ids, sequence_seed(seed, index), asked.sampling)
        known.append(tuple(output[: min(num_known, len(output) - 1)]))
    return msgspec.structs.replace(asked, known=tuple(known))


@dataclass
class Row:
    """What the worker keeps of a live sequence."""

    start: SequenceStart
    tokens: list[int]
    block_ids: list[int]


@dataclass
class FakeWorker:
    """Executes batches in order; checks that each is possible, and that it reads what it should.

    `longest_run`: a sequence that samples goes on by up to so many tokens in the same step, as far as its blocks reach.
    """

    max_num_seqs: int
    max_num_tokens: int
    longest_run: int = 1
    are_late: Callable[[], bool] = lambda: False  # whether a sequence gets no token in a step
    device: dict[tuple[int, int], int] = field(default_factory=dict)
    host: dict[tuple[int, int], int] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    num_tokens_computed: int = 0

    def execute(self, batch: Batch) -> StepResult:
        rows = {step.seq_id: (self.rows[step.parent], step.token_id) for step in batch.beam_steps}
        for seq_id, (parent, token_id) in rows.items():
            start, known = self.rows[seq_id].start, parent.tokens[:-1]
            self.rows[seq_id] = Row(start, [*known, token_id], list(parent.block_ids))
        for seq_id in batch.departures:
            del self.rows[seq_id]
        self._copy(batch)
        for start in batch.starts:
            assert start.seq_id not in self.rows, "a sequence entered twice"
            self.rows[start.seq_id] = Row(start, list(start.token_ids), list(start.tables[0].block_ids))
        assert len(batch.chunks) <= len(self.rows) <= self.max_num_seqs
        assert batch.num_tokens <= self.max_num_tokens
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
        targets = [to for _, _, to in copies.swap_in + copies.copy_on_write]
        assert len(set(targets)) == len(targets), "two copies into one block"
        swapped_in = {to for _, _, to in copies.swap_in}
        assert not {source for _, source, _ in copies.copy_on_write} & swapped_in, "copies depend on each other"
        for _, source, to in copies.swap_out:
            self._copy_block(self.device, source, self.host, to)
        for _, source, to in copies.swap_in:
            self._copy_block(self.host, source, self.device, to)
        for _, source, to in copies.copy_on_write:
            self._copy_block(self.device, source, self.device, to)

    @staticmethod
    def _copy_block(
        source: dict[tuple[int, int], int], block: int, target: dict[tuple[int, int], int], to: int
    ) -> None:
        for slot in range(BLOCK_SIZE):
            target[to, slot] = source.get((block, slot), GARBAGE)

    def _compute(self, chunk: SequenceChunk) -> tuple[SampledToken, ...]:
        row, end = self.rows[chunk.seq_id], chunk.start + chunk.num_tokens
        for new in chunk.new_blocks:
            assert new.first_block <= len(row.block_ids)
            row.block_ids[new.first_block : new.first_block + len(new.block_ids)] = new.block_ids
        assert len(set(row.block_ids)) == len(row.block_ids)
        assert chunk.num_tokens > 0
        assert end <= len(row.tokens), "a chunk of unknown tokens"
        assert bool(chunk.num_samples) == (end == len(row.tokens))
        hashes = history(row.tokens[:end])
        self.expect(row.block_ids, hashes[: chunk.start], f"sequence {chunk.seq_id}")
        for position in range(chunk.start, end):
            self.device[row.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE] = hashes[position]
        if not chunk.num_samples or self.are_late():
            return ()
        seeds = row.start.num_sample_seeds if chunk.num_samples > 1 else (row.start.seed,)
        assert len(seeds) == chunk.num_samples
        tokens = tuple(SampledToken(sample(hashes[-1], seed)) for seed in seeds)
        if row.start.sampling.beams is not None:
            tokens = (candidates(hashes[-1]),)
        row.tokens.append(tokens[0].token_id)  # of several, the row goes on with the first
        return tokens if chunk.num_samples > 1 else self._run_on(row, tokens)

    def _run_on(self, row: Row, run: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Compute the run's last token and sample behind it; how often is drawn from the history."""
        position, last = len(row.tokens) - 1, history(row.tokens)[-1]
        if len(run) >= 1 + last % self.longest_run or position >= len(row.block_ids) * BLOCK_SIZE:
            return run
        self.device[row.block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE] = last
        row.tokens.append(sample(last, row.start.seed))
        return self._run_on(row, (*run, SampledToken(row.tokens[-1])))

    def expect(self, block_ids: Sequence[int], hashes: Sequence[int], reader: str) -> None:
        """The blocks hold these histories from position 0 on."""
        for position, expected in enumerate(hashes):
            cell = (block_ids[position // BLOCK_SIZE], position % BLOCK_SIZE)
            assert self.device.get(cell) == expected, f"{reader}: wrong KV at position {position}, block {cell[0]}"

    def write_load(self, load: LoadSpec, prompt_token_ids: Sequence[int], *, good: bool) -> None:
        """A transfer writes its blocks: the prompt's KV, or what a failing one leaves behind."""
        hashes = history(prompt_token_ids)
        for position in range(load.runs[0].first_block * BLOCK_SIZE, load.num_tokens):
            block_id = load.runs[0].block_ids[position // BLOCK_SIZE - load.runs[0].first_block]
            self.device[block_id, position % BLOCK_SIZE] = hashes[position] if good else GARBAGE
