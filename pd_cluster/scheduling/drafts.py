"""Adds drafts to the decodes of a step. Pure policy: a draft is accepted only if the draw of its own place gives it.

Drafts come last: they get the tokens, rows and blocks that the step has left, so a drafter changes neither which
sequences a step has nor how much prompts get of it. Blocks behind the accepted tokens are given back when the step has
retired, so no plan meets one that only drafts hold. How many of the offered ones are worth it: `drafting/worth.py`.

A sequence may have drafts while this node generates it, unless it is a beam: a prompt that is handed over has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from operator import add, sub
from typing import TYPE_CHECKING, Protocol

import msgspec

from pd_cluster.drafting.forced import ForcedDrafts
from pd_cluster.drafting.offer import DraftOffer
from pd_cluster.drafting.trials import Trials
from pd_cluster.drafting.worth import StepPrice, most_worth
from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.step_model import StepModel, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Tokens

    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.scheduling.batch_builder import BatchBuilder
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.kv_memory import KvMemory
    from pd_cluster.scheduling.queues import Queues
    from pd_cluster.scheduling.sequence import Request, Sequence
    from pd_cluster.scheduling.step_budget import StepBudget


class Drafter(Protocol):
    """Guesses tokens of sequences. Its guesses change no answer, and no other request tells it anything of one."""

    def expect(self, known: Mapping[int, list[int]], prediction: Tokens[int], num_prompt: int) -> None:
        """Sequences of one request will be offered for.

        known: by id, the prompt and what is known of the output; sequences may share a list. prediction: of the answer,
        by its client; it may be empty. num_prompt: tokens of the prompt.
        """

    def offer(self, seq_id: int, token_ids: list[int], num_ahead: int, most: int) -> DraftOffer | None:
        """At most `most` tokens that may follow, after `num_ahead` that running steps draw. None: it knows none.

        `token_ids`: prompt and output so far, the same list each time.
        """

    def note(self, seq_id: int, num_drafts: int, num_right: int) -> None:
        """A step has verified the first `num_drafts` tokens of the last offer, and accepted `num_right` of them."""

    def forget(self, seq_id: int) -> None:
        """The sequence has ended. Called once for each that was expected."""

    def check(self) -> None:
        """Raise AssertionError if anything is kept of a sequence. Called while there is none."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """A drafter, and what its drafts are weighed by.

    gap_s: of the device after a step with drafts. is_priced: whether the model rests on steps of this node. Before that
    no step has drafts: those teach nothing else, and with drafts in each step the node would never be priced.
    """

    drafter: Drafter
    model: StepModel = field(default_factory=StepModel)
    gap_s: Callable[[], float] = lambda: 0.0
    is_priced: Callable[[], bool] = lambda: True
    forced: Callable[[], Tokens[ForcedTokens]] = lambda: ()  # see `Executor.take_forced`


class Drafting:
    """Chooses drafts for the decodes of steps. `most`: of a sequence in a step."""

    def __init__(
        self,
        speculation: Speculation,
        most: int,
        blocks: BlockManager,
        memory: KvMemory,
        queues: Queues,
        budget: StepBudget,
    ) -> None:
        self._drafter, self._costs, self._most = speculation.drafter, speculation, most
        self._blocks, self._memory, self._queues, self._budget = blocks, memory, queues, budget
        self._spared: list[int] | None = None  # blocks by group that a step's drafts leave; None: not counted
        self._trials = Trials()
        self._forced = ForcedDrafts(speculation.forced)
        self._expected = set[int]()  # sequences that may have drafts
        self._num_drafts = 0
        self._num_runs = [0] * (most + 1)  # by the number of accepted drafts

    @property
    def counters(self) -> dict[str, float]:
        """Totals since boot, by metric name without prefix. A sequence's drafts in a step count as one of `drafts`."""
        num_reached = [sum(self._num_runs[at:]) for at in range(self._most + 1)]  # runs of so many accepted, or more
        return {
            "spec_decode_num_drafts_total": float(num_reached[0]),
            "spec_decode_num_draft_tokens_total": float(self._num_drafts),
            "spec_decode_num_accepted_tokens_total": float(sum(num_reached[1:])),
        } | {
            f"spec_decode_num_accepted_tokens_per_pos_total|position={at}": float(num)
            for at, num in enumerate(num_reached[1:])
        }

    def expect(self, request: Request) -> None:
        """Note a request that has its sequences."""
        if request.work in (Work.PREFILL, Work.READ) or request.beams is not None:
            return
        prompt = request.prompt_token_ids
        known = {seq.seq_id: seq.token_ids if request.is_parted else prompt for seq in request.sequences}
        self._drafter.expect(known, request.message.prediction, len(prompt))
        self._expected.update(known)

    def forget(self, seq_id: int) -> None:
        """Note that a sequence has ended."""
        if seq_id in self._expected:
            self._expected.remove(seq_id)
            self._drafter.forget(seq_id)
            self._forced.forget(seq_id)

    def check(self) -> None:
        """Raise AssertionError if anything is kept of a sequence. Call it while there is none."""
        assert not self._expected, "a sequence has ended and may still have drafts"
        assert not self._forced.known, "forced tokens of an ended sequence are kept"
        self._drafter.check()

    def note(self, chunk: SequenceChunk, num_right: int) -> None:
        """Note a chunk with drafts that a step has verified, of a sequence that has not ended."""
        self._num_drafts += len(chunk.drafts)
        self._num_runs[num_right] += 1
        request = self._queues.sequences[chunk.seq_id].request
        request.num_drafts += len(chunk.drafts)
        request.num_accepted_drafts += num_right
        if self._forced.note(chunk.seq_id, len(chunk.drafts), num_right):
            self._drafter.note(chunk.seq_id, len(chunk.drafts), num_right)

    def add(self, builder: BatchBuilder) -> None:
        """Turn decodes of the step, which is planned otherwise, into decodes with drafts, and order its chunks."""
        self._forced.take(self._expected)
        if not self._costs.is_priced():
            return
        chunks, sequences, unready = builder.chunks, self._queues.sequences, builder.unready or ()
        offered, expected, offer_of = list[tuple[int, "DraftOffer"]](), self._expected, self._drafter.offer
        for at, chunk in enumerate(chunks):
            seq_id = chunk.seq_id
            if chunk.num_tokens != 1 or chunk.num_samples != 1 or seq_id not in expected or chunk.reads:
                continue
            seq = sequences[seq_id]
            most = seq.max_len - chunk.start - 2
            if most > 0 and seq not in unready:
                asked = seq_id, seq.token_ids, seq.num_pending - 1, most if most < self._most else self._most
                offer = offer_of(*asked)
                if seq_id in self._forced.known:
                    offer = self._forced.joined(*asked, offer)
                if offer is not None:
                    offered.append((at, _ended(offer, seq.stop_ids)))
        if not offered:
            return
        self._spared = None
        offers, price = [offer for _, offer in offered], self._price(builder, offered)
        counts = self._trials.decided(most_worth(offers, price), offers, price.most)
        for (at, offer), count in zip(offered, counts, strict=True):
            if count:
                chunks[at] = self._with_drafts(chunks[at], tuple(offer.tokens[:count]), builder)
        if any(counts):
            single, several = ([one for one in chunks if (one.num_tokens == 1) is wanted] for wanted in (True, False))
            drafted, prompts = ([one for one in several if bool(one.drafts) is wanted] for wanted in (True, False))
            chunks[:] = (*single, *drafted, *prompts)  # as by `place`, in a quarter of the time

    def _price(self, builder: BatchBuilder, offered: Tokens[tuple[int, DraftOffer]]) -> StepPrice:
        """What drafts cost in this step."""
        work, prompts = StepWork.of(builder.chunks), builder.prompts
        most = int(min(builder.budget, builder.rows, prompts.cost_left if prompts.is_limited else inf))
        costs = self._costs.model.draft_costs(work, max(1, most))
        most_s, most_shared_s = self._budget.most_with_drafts_s(self._queues)
        return StepPrice(
            num_decodes=work.num_decodes,
            seconds_of=costs.rows_and_alone_s,
            knots=costs.knots,
            step_s=costs.step_s,
            sequence_s=costs.sequence_s,
            gap_s=self._costs.gap_s(),
            most=most,
            most_s=most_s,
            most_shared_s=most_shared_s,
        )

    def _fit(self, table: BlockTable, start: int, num_drafts: int, builder: BatchBuilder) -> int:
        """How many of the drafts, for which the table is too short, may be verified. `start`: of the first of them.

        While a sequence gives blocks up or waits for them none may. Else what the next tokens of running sequences take
        is left. A draft takes free blocks; where there are none, the sequence's next block alone evicts a cached one,
        as its own tokens would within a few steps: a node that has run for a while has hardly a free block.
        """
        blocks, num_own = self._blocks, table.capacity - start
        is_awaited = self._queues.reserving or self._memory.refused is not None
        if builder.preempted or builder.held or is_awaited:
            return num_own
        if self._spared is None:
            self._spared = self._memory.next_needs()
        spared = self._spared
        if not num_own:  # its next token is spared for, too
            spared = list(map(sub, spared, blocks.needs(table, start, start + 1)))
        num_next = min(num_drafts, num_own + blocks.block_size)
        for count, has_blocks in ((num_drafts, blocks.has_free), (num_next, blocks.has_room)):
            if has_blocks(list(map(add, spared, blocks.needs(table, start, start + count)))):
                self._spared = spared
                return count
        return num_own

    def _with_drafts(self, chunk: SequenceChunk, drafts: tuple[int, ...], builder: BatchBuilder) -> SequenceChunk:
        """The chunk with the drafts for which there are blocks."""
        seq, start = self._queues.sequences[chunk.seq_id], chunk.start + 1
        table, new_blocks = seq.table, chunk.new_blocks
        assert table is not None
        count = len(drafts)
        if start + count > table.capacity:
            count = self._fit(table, start, count, builder)
        builder.budget -= count
        builder.rows -= count
        builder.prompts.cost_left -= count
        seq.num_uncertain = count
        if start + count > table.capacity:
            growth = self._blocks.grow(table, start, start + count)
            assert not growth.copies, "the block of the chunk's own token is the sequence's own"
            if (begins := _start_of(seq, builder)) is None:
                new_blocks += growth.new_blocks
            else:  # a start names all blocks
                tables = self._blocks.whole(table)
                builder.starts[begins] = msgspec.structs.replace(builder.starts[begins], tables=tables)
        return SequenceChunk(chunk.seq_id, chunk.start, 1 + count, new_blocks, 1, drafts=drafts[:count])


def _ended(offer: DraftOffer, stop_ids: frozenset[int]) -> DraftOffer:
    """The offer up to a token that ends the sequence: of those after it no client gets one."""
    if stop_ids.isdisjoint(offer.tokens):
        return offer
    num = 1 + next(at for at, token in enumerate(offer.tokens) if token in stop_ids)
    return DraftOffer(offer.tokens[:num], offer.chances[:num])


def _start_of(seq: Sequence, builder: BatchBuilder) -> int | None:
    """The place of the sequence's start in the step; None: it has a row already."""
    return next((at for at, start in enumerate(builder.starts) if start.seq_id == seq.seq_id), None)
