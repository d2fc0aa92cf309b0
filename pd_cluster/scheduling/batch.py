"""One step's decision and its result. The scheduler makes a Batch, the worker makes a StepResult.

A batch is a *delta*: the worker keeps a row per live sequence (tokens, block table, sampling state), so a decode step
names only what changed. That also lets step n+1 be prepared while step n runs: sampled tokens stay with the worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_cluster.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pd_cluster.errors import PdError
    from pd_cluster.protocol.prompt_outputs import PromptPart
    from pd_connectors.base import LoadSpec, PublishSpec
    from pd_connectors.protocol.messages import SampledToken


class NewBlocks(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Blocks for a sequence's table of one KV group: table[first_block : first_block + len(block_ids)] = block_ids."""

    group: int
    first_block: int
    block_ids: tuple[int, ...]


class SequenceStart(msgspec.Struct, frozen=True):
    """A sequence enters the worker (first time, or again after preemption). Its row is set to exactly this."""

    seq_id: int
    token_ids: tuple[int, ...]  # all known: prompt, then output so far
    num_prompt_tokens: int
    tables: tuple[NewBlocks, ...]  # one entry a KV group, in order; entries before its first block are undefined
    sampling: SamplingParams
    seed: int  # resolved: the client's, or a drawn one; differs per index of n
    # n > 1 before the fork: seeds of all n first tokens; the row keeps the first
    num_sample_seeds: tuple[int, ...] = ()
    outputs: PromptOutputs | None = None  # what its chunks with `reads` find out about the prompt
    adapter: int = -1  # the slot of its adapter until it departs; -1: it has none


class StateStep(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The slots of a chunk in the model's STATE group. A slot is a block of the group."""

    source: int  # has the state before the chunk; -1: it begins with zeros
    slot: int  # gets the state after the chunk
    saves: tuple[tuple[int, int], ...] = ()  # (tokens, slot): slots that get the state after so many tokens, too


class BeamStep(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A beam continues another, or itself: its row becomes the other's, with this token as the last one."""

    seq_id: int
    parent: int  # a seq_id; both have a row, with a token that was sampled and is replaced
    token_id: int


class SequenceChunk(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Compute tokens [start, start + num_tokens) of a sequence. A decode step is a chunk of one."""

    seq_id: int
    start: int
    num_tokens: int
    new_blocks: tuple[NewBlocks, ...] = ()  # written into the tables before the forward
    num_samples: int = 0  # 0: the chunk does not reach the last known token, or nothing is drawn after it
    reads: bool = False  # it finds out something about the prompt. No captured step serves it
    # Its last tokens, which may be wrong: each is accepted if the draw after the token before it gives it. Only a
    # decode has some: it computes one token that is certain, and samples after each of its tokens
    drafts: tuple[int, ...] = ()
    # None: there is no STATE group, or the chunk reads and writes the slot that the sequence's chunk before it wrote
    states: StateStep | None = None

    @property
    def is_decode(self) -> bool:
        """Whether it computes one token that is certain: of an answer, or the last of a prompt, which takes as long."""
        return self.num_tokens - len(self.drafts) == 1

    @property
    def num_rows(self) -> int:
        """Rows of logits from which tokens are drawn, each for one token."""
        return self.num_samples + len(self.drafts)


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Copies between blocks. Each is (KV group, from, to).

    The first three run before the forward, in this order. `save` and `load` run on a side stream, in any order, from
    the end of the step before to the end of this one: the side stream first waits for all that the main stream did
    before this step's forward, and the next step's copies and forward wait for the side stream. So this step writes no
    block that they touch, and reads none of their targets; later steps may do both.
    """

    swap_out: tuple[tuple[int, int, int], ...] = ()  # device -> host
    swap_in: tuple[tuple[int, int, int], ...] = ()  # host -> device
    copy_on_write: tuple[tuple[int, int, int], ...] = ()  # device -> device; one may write what those before it read
    save: tuple[tuple[int, int, int], ...] = ()  # device -> host, of cached blocks
    load: tuple[tuple[int, int, int], ...] = ()  # host -> device
    may_outlast: bool = False  # these two may take longer than what the step computes


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Empty chunks are legal (copies, loads or departures only)."""

    step: int
    starts: tuple[SequenceStart, ...] = ()
    chunks: tuple[SequenceChunk, ...] = ()  # of one token, then decodes with drafts, then prefill chunks
    departures: tuple[int, ...] = ()  # seq_ids of rows that end (finished or preempted); applied before starts
    copies: BlockCopies = field(default_factory=BlockCopies)
    loads: tuple[LoadSpec, ...] = ()  # for recv_before, once every step before this one has retired
    begun: tuple[
        PublishSpec, ...
    ] = ()  # for send_after, at launch; no tokens yet: this step is the first of these leases' prompts
    publishes: tuple[PublishSpec, ...] = ()  # for send_after, once the step has retired
    # (slot, digest): adapters that are copied beside this step, as `BlockCopies.load` is: later steps may use them
    adapters: tuple[tuple[int, str], ...] = ()
    beam_steps: tuple[BeamStep, ...] = ()  # applied before departures; all read the rows as they were before the first

    @property
    def num_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def moves_worker(self) -> bool:
        """Whether the worker has anything to do. A start comes with its first chunk."""
        copies = self.copies
        has_rows = self.chunks or self.departures or self.beam_steps
        before_forward = copies.swap_out or copies.swap_in or copies.copy_on_write
        return bool(has_rows or before_forward or copies.save or copies.load or self.adapters)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens that a step sampled, by seq_id.

    Each chunk with `num_samples` > 0 has one entry, or its sequence is absent.
    """

    step: int
    # The new tokens of the sequence, in order: one or more. The KV of all but the last is computed
    samples: dict[int, tuple[SampledToken, ...]]
    # For chunks with `num_samples` > 1: the first tokens of the request's n sequences, by index
    first_samples: dict[int, tuple[SampledToken, ...]] = field(default_factory=dict)
    # Sequences that cannot go on, with the reason. Their tokens of this step are of no use
    failures: dict[int, PdError] = field(default_factory=dict)
    # Sequences that got no token, because it could not be drawn in time; they go on in a later step
    absent: frozenset[int] = frozenset()
    prompts: dict[int, PromptPart] = field(default_factory=dict)  # of chunks with `reads`, by seq_id
