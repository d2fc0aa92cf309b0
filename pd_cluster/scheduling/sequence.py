"""A request as the client sees it, and its sequences as the engine runs them.

A request has n sequences. Until they *part*, only the lead (index 0) is scheduled: it prefills the prompt for all.
They part when output tokens are known: sampled by the lead, received from P, or given at admission
(`AddRequest.known`). From then on each has its own tokens and its own block table, and they share the prompt's blocks.

Known output tokens are treated alike, wherever they come from. To the KV they are like prompt tokens: a sequence
without blocks (admitted with known tokens, after a failed load, or preempted) computes its prompt and its output as one
prompt. To limits, penalties and random numbers they are output.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import FinishReason, Work
from pd_cluster.protocol.prompt_outputs import PromptPart
from pd_cluster.scheduling.beam import BeamSearch
from pd_cluster.scheduling.request_marks import Marks
from pd_connectors.protocol.hashing import extend_hashes, root_hash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.protocol.messages import AddRequest
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.scheduling.block_table import BlockTable
    from pd_cluster.scheduling.request_group import RequestGroup
    from pd_connectors.protocol.layout import BlockRun
    from pd_connectors.protocol.messages import SampledToken


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's sequence `index`, 0 <= it < 2**63. The same on every node, so that P and D agree."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8, person=b"pd-seq-seed").digest()
    return int.from_bytes(digest, "little") >> 1


class SequenceStatus(Enum):
    """Where a sequence is."""

    WAITING = auto()  # never ran: waits for KV, a slot, memory, or (not the lead) the first tokens
    RUNNING = auto()
    PREEMPTED = auto()  # waiting; its KV is gone and will be computed again
    SWAPPED = auto()  # waiting; its KV is in host memory
    FINISHED = auto()


class KvArrival(Enum):
    """How far the KV of a TAKE_OVER request has come. WRITING: a transfer may write its blocks at any moment."""

    ABSENT = auto()
    WRITING = auto()
    PRESENT = auto()


@dataclass(slots=True, eq=False)
class Beams:
    """The beam search of a request."""

    policy: BeamSearch
    order: list[Sequence]  # of its beams, best first
    candidates: dict[Sequence, SampledToken] = field(default_factory=dict)  # of the beams of this round, as they come


@dataclass(slots=True, eq=False)
class Request:
    """One admitted AddRequest. The scheduler fills `arrival`, `sequences` and everything below them."""

    message: AddRequest
    seed: int  # the client's, or the one that the API process drew
    lease_id: str | None = None  # PREFILL: the lease under which its blocks are promised
    lease_generation: int = 0  # for PublishSpec; `retract` raises it
    load_id: str | None = None  # TAKE_OVER: the load in progress; set it before `Scheduler.reserve`
    arrival: int = -1
    since: int = -1  # its time of arrival in the units of `turn`
    turn: int = -1  # place among the requests of its priority; see `queue_order`
    sequences: list[Sequence] = field(default_factory=list)
    num_live: int = 0  # sequences that have not ended
    is_parted: bool = False  # each sequence has its own tokens
    is_stream: bool = False  # more than a first token is drawn here
    # TAKE_OVER: P samples under parameters other than this request's. P's first tokens are dropped. The prompt's last
    # token is computed here, on the loaded KV of the tokens before it, and the first tokens are drawn from its logits
    redraws: bool = False
    table: BlockTable | None = None  # TAKE_OVER: the pinned prefix, then the blocks being loaded
    kv: KvArrival = KvArrival.ABSENT
    num_cached_before: int = 0  # tokens that were cached here when a pool was searched
    marks: Marks = field(default_factory=Marks)
    group: RequestGroup[Sequence] = field(init=False, repr=False)  # shares slots and turns with its other requests
    is_queued: bool = True  # nothing of it has run yet
    num_named: int = 0  # of `message.steps`: see `CacheNews`
    beams: Beams | None = None  # its sequences are the beams of a search
    num_drafts: int = 0  # that steps have verified, and of these accepted
    num_accepted_drafts: int = 0

    @classmethod
    def from_message(cls, message: AddRequest, *, lease_id: str | None = None) -> Request:
        seed = message.sampling.seed
        return cls(message, message.drawn_seed if seed is None else seed, lease_id)

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.message.prompt_token_ids

    @property
    def sampling(self) -> SamplingParams:
        return self.message.sampling

    @property
    def work(self) -> Work:
        return self.message.work

    @property
    def salt(self) -> str:
        return self.message.salt

    @property
    def precedence(self) -> tuple[int, ...]:
        """Smaller goes first and is preempted last."""
        return (self.message.priority, self.turn, self.arrival)

    @property
    def claim(self) -> tuple[int, ...]:
        """Order of requests that wait for memory: smaller goes first. Each turn of its group changes it."""
        return self.group.claim(self.precedence)

    @property
    def finished(self) -> bool:
        """Every sequence has ended."""
        return self.num_live == 0

    @property
    def num_loaded_tokens(self) -> int:
        """Tokens of a load: the prompt and known tokens but the last, which is computed here, for the next logits."""
        known = self.message.known  # a load is for one sequence then: see `Admission`
        return len(self.prompt_token_ids) + (len(known[0]) - 1 if known else 0)

    @property
    def may_sit_out(self) -> bool:
        """Whether a step that draws for its sequences may be taken back: see `Sequence.sit_out`."""
        return bool(self.sampling.grammar)

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of a load that are kept: all, or all but the last if its logits are needed for the first tokens."""
        return self.num_loaded_tokens - self.redraws

    @property
    def heads(self) -> list[Sequence]:
        """The sequences that go on with the prompt's KV: all that live, or the lead alone before they part."""
        if not self.is_parted:
            return self.sequences[:1]
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def is_stuck(self) -> bool:
        """Whether it is a beam search of which no beam runs, and some wait for a slot or blocks."""
        waiting = [seq for seq in self.sequences if not seq.num_pending]
        is_idle = all(not seq.num_in_flight for seq in self.sequences)
        return is_idle and bool(waiting) and all(seq.status is not SequenceStatus.RUNNING for seq in waiting)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in this engine's prefix cache."""
        if len(self.sequences) == 1:  # asked for with every token
            return self.sequences[0].num_cached_tokens
        return max((seq.num_cached_tokens for seq in self.sequences), default=0)

    @property
    def num_external_tokens(self) -> int:
        """Prompt tokens with KV from another node or a pool."""
        if len(self.sequences) == 1:
            return self.sequences[0].num_external_tokens
        return max((seq.num_external_tokens for seq in self.sequences), default=0)

    def begin(
        self, arrival: int, now_s: float, seq_ids: Iterator[int], eos_token_ids: frozenset[int], max_model_len: int
    ) -> None:
        """Number the request and make its sequences. Until they part only the lead has tokens."""
        self.arrival = self.since = self.turn = arrival
        self.marks.arrived_s = self.message.received_s or now_s
        self.marks.begun_s = now_s
        sampling = self.sampling
        beams = None if self.work is Work.PREFILL else sampling.beams
        stop_ids = sampling.stop_ids(eos_token_ids)
        num_prompt, known = len(self.prompt_token_ids), self.message.known
        self.is_parted = any(known)
        self.is_stream = self.work not in (Work.PREFILL, Work.READ)
        self.num_live = self.message.num_sequences
        self.sequences = [
            Sequence(
                seq_id=next(seq_ids),
                index=index,
                request=self,
                precedence=(*self.precedence, index),
                seed=self.seed_of(index),
                num_prompt_tokens=num_prompt,
                stop_ids=stop_ids,
                min_tokens=0 if sampling.grammar else sampling.min_tokens,  # see `GrammarMasks`
                max_len=min(num_prompt + self.message.max_output_tokens, max_model_len),
                token_ids=[*self.prompt_token_ids, *known[index]] if self.is_parted else [],
                num_given_tokens=len(known[index]) if self.is_parted else 0,
                is_beam=beams is not None,
                num_uncertain=int(beams is not None),
            )
            for index in range(self.num_live)
        ]
        lead = self.sequences[0]
        if not self.is_parted:
            lead.token_ids = list(self.prompt_token_ids)
            lead.num_samples = 0 if self.work is Work.READ else sampling.num_first_tokens
            outputs = self.message.outputs
            lead.num_unread_tokens = 0 if outputs is None else outputs.num_entries(num_prompt)
        if beams is not None:
            max_tokens = lead.max_len - num_prompt
            self.beams = Beams(BeamSearch(beams, max_tokens, stop_ids, sampling.logprobs), [lead])

    def seed_of(self, index: int) -> int:
        """The seed of its sequence `index`."""
        numbers = self.message.sequence_numbers
        return sequence_seed(self.seed, numbers[index] if numbers else index)

    def set_place(self, since: int, turn: int) -> None:
        """Set the request's place in its priority. No queue may have it yet."""
        self.since, self.turn = since, turn
        for seq in self.sequences:
            seq.precedence = (*self.precedence, seq.index)


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One generation. Token counts: `num_computed` <= `num_scheduled` <= len(token_ids) + num_pending."""

    seq_id: int
    index: int  # among the request's n
    request: Request = field(repr=False)
    precedence: tuple[int, ...]  # smaller goes first and is preempted last; unique
    seed: int
    num_prompt_tokens: int
    stop_ids: frozenset[int] = field(repr=False)  # EOS (unless ignored) and the request's stop tokens
    min_tokens: int
    max_len: int  # prompt and output never exceed this
    token_ids: list[int] = field(repr=False)  # prompt, then output
    status: SequenceStatus = SequenceStatus.WAITING
    table: BlockTable | None = None
    host_blocks: tuple[BlockRun, ...] = ()  # by group, while SWAPPED
    num_computed_tokens: int = 0  # tokens with KV in the table, by steps that have retired
    num_scheduled_tokens: int = 0  # the same, counting steps that still run
    # Tokens that running steps sample, one per step: their positions are known, their values not. Of a beam, until its
    # round is over
    num_pending: int = 0
    # Further tokens that the newest step may give it: its drafts. No step is planned after such a step. Of a beam
    # always 1, because no step is planned after one before its token is chosen
    num_uncertain: int = 0
    num_in_flight: int = 0  # steps that still run and touch this sequence
    num_announced_tokens: int = 0  # PREFILL: announced to the lease's reader
    num_queued_tokens: int = 0  # its part of `Queues.num_queued_tokens`
    num_queued_keys: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    num_given_tokens: int = 0  # of its output, known at admission
    num_samples: int = 1  # sampled when a chunk reaches the last token; n for a lead before the sequences part
    # Prompt tokens of which a log-probability is wanted and not reported: the last so many
    num_unread_tokens: int = 0
    in_worker: bool = False  # the worker has a row for it
    is_beam: bool = False
    is_absent: bool = False  # the step that runs draws no token for it: see `sit_out`
    awaits_first_decode: bool = (
        False  # its KV or first token came from another node, and no decode step followed; for the timeline
    )
    planned_step: int = -1  # the last step that has a chunk of it
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop token that ended it
    block_hashes: list[bytes] = field(default_factory=list, repr=False)

    @property
    def priority(self) -> int:
        """Of its request; smaller is better."""
        return self.precedence[0]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_context(self) -> int:
        """Known tokens, those of its prompt also before its request has parted."""
        return max(self.num_prompt_tokens, len(self.token_ids))

    @property
    def num_remaining_tokens(self) -> int:
        """Known or certain tokens that no step computes yet. 1 in a decode."""
        return len(self.token_ids) + self.num_pending - self.num_scheduled_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens for which cached KV may be used when it waits without blocks: those from which nothing is wanted."""
        if self.num_unread_tokens:
            return self.num_prompt_tokens - 1 - self.num_unread_tokens
        return len(self.token_ids) - 1

    def reads(self, start: int, end: int) -> bool:
        """Whether a chunk of these positions finds out something that the request asks about its prompt."""
        outputs, last = self.request.message.outputs, self.num_prompt_tokens - 1
        if outputs is None or self.index or start > last:
            return False
        if outputs.of_last_token and end > last:
            return True
        return bool(self.num_unread_tokens) and start < last

    def take_entries(self, part: PromptPart) -> PromptPart:
        """Note the log-probabilities of a step as reported. Returns those that were not reported before."""
        first = self.num_prompt_tokens - self.num_unread_tokens
        self.num_unread_tokens = min(self.num_unread_tokens, self.num_prompt_tokens - part.start - len(part.entries))
        num_known = max(0, first - part.start)
        return PromptPart(part.start + num_known, part.entries[num_known:])

    def sit_out(self, start: int) -> None:
        """Take the tokens of the newest step's chunk from `start` on back: the step draws no token after it.

        It is the last token, or all of the chunk where a state has taken them in. They are computed again, and the draw
        is in the same place and with the same random number. Until the step retires:

            position of the token    not pending, so no step is planned after it
            KV of the last token     not counted as computed, so its block stays out of the prefix cache and is the
                                     sequence's own when the next chunk writes it again
            the last blocks          not announced to a lease's reader (`Scheduler.publishes`)
            blocks                   stay with the sequence: it is in flight
        """
        self.is_absent = True
        self.num_pending -= 1
        self.num_uncertain = int(self.is_beam)
        self.num_scheduled_tokens = start
        self.num_announced_tokens = min(self.num_announced_tokens, self.num_scheduled_tokens)

    def append(self, token_id: int) -> None:
        """Add an output token, and end when it is a stop token, or the last that is allowed.

        The sampler bans stop tokens before `min_tokens`; those of another engine's P may be another set.
        """
        self.token_ids.append(token_id)
        if token_id in self.stop_ids and self.num_output_tokens >= self.min_tokens:
            self.finish_reason = FinishReason.STOP
            self.stop_token_id = token_id
        elif len(self.token_ids) >= self.max_len:
            self.finish_reason = FinishReason.LENGTH

    def append_run(self, run: tuple[SampledToken, ...]) -> tuple[SampledToken, ...]:
        """Add the tokens of one step up to the one that ends the sequence, and return those that were added.

        All but the last are computed already. This is the one place that allows a step more than one token. A later
        step that is planned already assumes one (`num_pending`) and starts at a wrong position, so there must be none.
        """
        assert run
        assert not self.num_in_flight or len(run) == 1, "a step was planned after one that sampled several tokens"
        ids, num_added = [token.token_id for token in run], 0
        if len(self.token_ids) + len(ids) < self.max_len and self.stop_ids.isdisjoint(ids):
            self.token_ids += ids  # in a fifth of the time
            num_added = len(ids)
        while num_added < len(run) and self.finish_reason is None:
            self.append(ids[num_added])
            num_added += 1
        self.num_computed_tokens += num_added - 1
        self.num_scheduled_tokens += num_added - 1
        return run[:num_added]

    def part_from(self, lead: Sequence) -> None:
        """Copy the lead's prompt, before the sequence gets its own first token. The caller sets the block table."""
        self.token_ids = list(self.request.prompt_token_ids)
        self.block_hashes = lead.block_hashes[:]
        self.num_cached_tokens = lead.num_cached_tokens
        self.num_external_tokens = lead.num_external_tokens

    def hash_blocks(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Chained hashes of the first `num_blocks` blocks; all their tokens must be known. Each is computed once."""
        hashes = self.block_hashes
        if len(hashes) < num_blocks:
            parent = hashes[-1] if hashes else root_hash(self.request.salt)
            tokens = self.token_ids[len(hashes) * block_size : num_blocks * block_size]
            hashes.extend(extend_hashes(parent, tokens, block_size))
        return hashes[:num_blocks] if len(hashes) > num_blocks else hashes

    def iter_hashes(self, num_blocks: int, block_size: int) -> Iterator[bytes]:
        """The hashes of `hash_blocks`, computed as far as they are asked for, and at most as many again.

        A prompt that is not cached needs one of them before its step. All blocks of 1,024 tokens take 50 to 80 us.
        """
        for index in range(num_blocks):
            if index >= len(self.block_hashes):
                self.hash_blocks(min(2 * index + 1, num_blocks), block_size)
            yield self.block_hashes[index]
