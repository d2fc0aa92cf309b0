"""Adds drafts to the decodes of a step. Pure policy: a draft is accepted only if the draw of its own place gives it.

Drafts come last: they get the tokens, rows and blocks that the step has left, so a drafter changes neither which
sequences a step has nor how much prompts get of it. Blocks behind the accepted tokens are given back when the step has
retired, so no plan meets one that only drafts hold. How many of the offered ones are worth it: `drafting/worth.py`.

A sequence may have drafts while this node generates it, unless it is a beam: a prompt that is handed over has none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from operator import add, sub
from typing import TYPE_CHECKING, Protocol

import msgspec

from pd_cluster.drafting.forced import ForcedDrafts
from pd_cluster.drafting.payoff import Payoff
from pd_cluster.drafting.trials import Trials
from pd_cluster.drafting.worth import EARNED, FIRST_CREDIT, LEAST_CREDIT, MOST_CREDIT, most_worth
from pd_cluster.protocol.messages import Work
from pd_cluster.scheduling.batch import SequenceChunk
from pd_cluster.scheduling.step_model import StepModel, StepWork

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Tokens

    from pd_cluster.drafting.forced import ForcedTokens
    from pd_cluster.drafting.offer import DraftOffer
    from pd_cluster.drafting.worth import StepPrice
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
        """A step has verified the first `num_drafts` tokens of the last offer, and accepted `num_right` of them.

        Called for sequences under a grammar: what others accept is what they draw.
        """

    def prepare(self, is_late: Callable[[], bool]) -> None:
        """Do now what offers would do, until `is_late`: no step waits. It may be called often, or never."""

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
    # Of a step with drafts, where steps are captured; None: all are launched. A step is captured with its drafts if it
    # is without: launched it takes 5 to 24 ms longer (8B, one H200), and no price of drafts tells it
    most_rows: int | None = None
    is_late: Callable[[], bool] = lambda: False  # whether the device waits for the host, whatever is drafted
    clock: Callable[[], float] = time.monotonic


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
        self._payoff = Payoff()
        self._token_s = 0.0  # a token more of a stream saves, in the last step with drafts
        self._forced = ForcedDrafts(speculation.forced)
        # Of sequences that may have drafts: see `worth`. What is EARNED until its next token is added at position 0,
        # so that steps without drafts change none
        self._credits: dict[int, float] = {}
        self._prolonged = 1.0  # how many steps without drafts the last step with some took
        self._unspent: tuple[list[SequenceChunk], float] = ([], 0.0)  # decodes of it without drafts, and what they wait
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
        self._credits |= {seq_id: FIRST_CREDIT - EARNED * len(token_ids) for seq_id, token_ids in known.items()}

    def forget(self, seq_id: int) -> None:
        """Note that a sequence has ended."""
        if self._credits.pop(seq_id, None) is not None:
            self._drafter.forget(seq_id)
            self._forced.forget(seq_id)

    def prepare(self, is_late: Callable[[], bool]) -> None:
        """See `Drafter.prepare`."""
        self.settle()
        self._drafter.prepare(is_late)

    def settle(self) -> None:
        """Take from credits what the last step with drafts makes others wait: the device need not wait for that."""
        (chunks, waited), self._unspent = self._unspent, ([], 0.0)
        if waited:
            for chunk in chunks:
                if chunk.num_samples:
                    self._spend(chunk, waited)

    def check(self) -> None:
        """Raise AssertionError if anything is kept of a sequence. Call it while there is none."""
        assert not self._credits, "a sequence has ended and may still have drafts"
        self._forced.check()
        self._drafter.check()

    def take(self, seq: Sequence, chunk: SequenceChunk, num_samples: int) -> None:
        """Note how many drafts of a chunk were right, and free the blocks of the others. No samples: it sat out."""
        num_right, num_drafts = 0, len(chunk.drafts)
        if num_samples:  # or else the next step may have drafts of it already
            seq.num_uncertain, num_right, request = 0, num_samples - 1, seq.request
            self._payoff.save(num_right * self._token_s)
            self._spend(chunk, self._prolonged - num_samples)
            self._num_drafts += num_drafts
            self._num_runs[num_right] += 1
            request.num_drafts += num_drafts
            request.num_accepted_drafts += num_right
            # One without drafts may end after the next one was offered for, and those are noted later
            if num_drafts and request.sampling.grammar and self._forced.note(chunk.seq_id, num_drafts, num_right):
                self._drafter.note(chunk.seq_id, num_drafts, num_right)
        if not seq.num_uncertain:
            assert seq.table is not None
            self._blocks.trim(seq.table, max(chunk.start + 1, seq.num_scheduled_tokens) + num_right)

    def add(self, builder: BatchBuilder) -> None:
        """Turn decodes of the step, which is planned otherwise, into decodes with drafts, and order its chunks."""
        self._prolonged = 1.0
        self.settle()  # in most cases it is done
        is_weighed = builder.is_of_decodes and bool(self._credits)  # no other step tells what drafts are worth
        if is_weighed and self._payoff.rests():
            return
        started_s = self._costs.clock()
        self._add(builder)
        if not self._costs.is_late():
            self._payoff.forget()
        elif is_weighed:
            self._payoff.spend(self._costs.clock() - started_s)

    def _add(self, builder: BatchBuilder) -> None:
        chunks, sequences, unready, share = builder.chunks, self._queues.sequences, builder.unready, builder.prompts
        most = min(builder.budget, builder.rows, share.cost_left if share.is_limited else builder.budget)
        if (most_rows := self._costs.most_rows) is not None:  # beside prompts they are chunks, of which it has few
            most = min(most, most_rows - len(chunks) if builder.is_of_decodes else 0)
        if most <= 0 or not self._costs.is_priced():
            return
        self._forced.take(self._credits)  # from the first call on they are sought
        offers, decodes = list["DraftOffer"](), list[tuple[int, "Sequence"]]()
        expected, offer_of, known = self._credits, self._drafter.offer, self._forced.known
        for at, chunk in enumerate(chunks):
            seq_id = chunk.seq_id
            if seq_id not in expected or chunk.num_tokens != 1 or chunk.num_samples != 1 or chunk.reads:
                continue
            seq = sequences[seq_id]
            num = seq.max_len - chunk.start - 2
            if num > 0 and not (unready and seq in unready):
                asked = seq_id, seq.token_ids, seq.num_pending - 1, num if num < self._most else self._most
                offer = offer_of(*asked)
                if seq_id in known:
                    offer = self._forced.joined(*asked, offer)
                if offer is not None:
                    offers.append(offer.until(seq.stop_ids))  # of the rest no client gets any
                    decodes.append((at, seq))
        if not offers:
            return
        price, self._spared = self._price(builder, most), None
        counts = self._trials.decided(most_worth(offers, price), offers, price)
        for (at, seq), offer, count in zip(decodes, offers, counts, strict=True):
            if count:
                chunks[at] = self._with_drafts(chunks[at], seq, offer.first(count), builder)
        self._prolonged = price.prolonged([len(chunks[at].drafts) for at, _ in decodes])  # some had no blocks
        if self._prolonged > 1.0:
            self._token_s = price.seconds[0] / price.num_decodes
            self._payoff.save(price.seconds[0] * (1.0 - self._prolonged))
        several = [one for one in chunks if one.num_tokens > 1]
        if builder.num_tokens:  # some are of prompts
            several.sort(key=lambda one: not one.drafts)
        chunks[:] = singles = [one for one in chunks if one.num_tokens == 1]
        chunks += several
        self._unspent = singles, self._prolonged - 1.0

    def _credit(self, chunk: SequenceChunk) -> float:
        """What a decode may wait in steps without drafts. One that may never have drafts waits for EARNED each time."""
        known = self._credits.get(chunk.seq_id)
        return EARNED if known is None else min(known + EARNED * chunk.start, MOST_CREDIT)

    def _spend(self, chunk: SequenceChunk, num_steps: float) -> None:
        """Take so many steps from the credit of a decode. Below 0: it gains them."""
        if (known := self._credits.get(chunk.seq_id)) is not None:
            earned = EARNED * chunk.start
            self._credits[chunk.seq_id] = max(min(known, MOST_CREDIT - earned) - num_steps, LEAST_CREDIT - earned)

    def _price(self, builder: BatchBuilder, most: int) -> StepPrice:
        """What up to `most` drafts cost in this step."""
        price = self._costs.model.draft_price(StepWork.of(builder.chunks), most)
        most_s, most_shared_s = self._budget.most_with_drafts_s(self._queues)
        step_s = self._costs.gap_s() + price.step_s
        least, known = MOST_CREDIT, self._credits  # of all `_credit`s
        for one in builder.chunks:
            if one.num_tokens == 1 and one.num_samples:
                credit = known.get(one.seq_id)
                credit = EARNED if credit is None else credit + EARNED * one.start
                if credit < least:
                    least = credit
        return price._replace(step_s=step_s, most_s=most_s, most_shared_s=most_shared_s, least_credit=least)

    def _fit(self, table: BlockTable, start: int, num_drafts: int, builder: BatchBuilder) -> int:
        """How many of the drafts, for which the table is too short, may be verified. `start`: of the first of them.

        While a sequence gives blocks up or waits for them none may. Else what the next tokens of running sequences take
        is left. A draft takes free blocks; where there are none, the sequence's next block alone evicts a cached one,
        as its own tokens would within a few steps: a node that has run for a while has hardly a free block.

        Where groups share memory, what is left is freed, too: a draft may take the last idle slab in place of a cached
        block, and another group has no block then.
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
            needs = list(map(add, spared, blocks.needs(table, start, start + count)))
            if has_blocks(needs):
                blocks.free_for(needs)
                self._spared = spared
                return count
        return num_own

    def _with_drafts(
        self, chunk: SequenceChunk, seq: Sequence, drafts: tuple[int, ...], builder: BatchBuilder
    ) -> SequenceChunk:
        """The chunk with the first of the drafts: as many as there are blocks for."""
        table, start, count, new_blocks = seq.table, chunk.start + 1, len(drafts), chunk.new_blocks
        assert table is not None
        if start + count > table.capacity:
            count = self._fit(table, start, count, builder)
        seq.num_uncertain = count
        if start + count > table.capacity:
            growth = self._blocks.grow(table, start, start + count)
            assert not growth.copies, "the block of the chunk's own token is the sequence's own"
            new_blocks += growth.new_blocks
            for at, one in enumerate(builder.starts):
                if one.seq_id == seq.seq_id:  # a start names all blocks
                    new_blocks = ()
                    builder.starts[at] = msgspec.structs.replace(one, tables=self._blocks.whole(table))
        return SequenceChunk(chunk.seq_id, chunk.start, 1 + count, new_blocks, 1, False, drafts[:count])
