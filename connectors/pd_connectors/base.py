"""The KV-connector API: how blocks get into an engine's cache from elsewhere, and out of it.

An engine holds one connector, in two halves. The *scheduler half* speaks in tokens and block ids and is called from
the step loop; no call of it may block on a peer. The *worker half* sees the cache tensor. Around every forward pass the
engine calls `recv_before` (start the loads that this step admitted) and, once the step's work on the device has
retired, `send_after` (let others read what the step produced). Everything that happens meanwhile comes back through
`poll`: success and failure alike are values.

When a block belongs to the connector, as the engine sees it. The connector must keep the right-hand column true:

    block of ...                  is the connector's from ... until ...
    a load                        `recv_before(load)`     LoadDone or LoadDrained: nothing can land in it any more
    a prefix from a pool          `recv_before(load)`     PrefixLoaded: nothing can land in it any more
    a lease                       `send_after(publish)`   LeaseEnded, or the return of `retract` / `end_lease`:
                                                          no read of it can be confirmed any more

A connector may also have a *pool*: a store, shared by all nodes, of whole blocks by content hash. The engine gives it
what its steps computed (`Pool.store`) and asks it for the prefix of a prompt that it is about to compute (`Pool.find`).
A pool promises nothing: a block that is missing, late or damaged there only makes the prefix shorter.

**What changed for connectors from outside with protocol version 3:**

- Every group has block ids of its own: an id is valid in its group's tensor only. `CacheDescription.num_blocks` is
  gone; `tensors[group].shape[0]` is the number. The tensors of several groups may lie in the same memory and are
  strided then: block i begins `i * tensor.stride(0)` elements after the first one, and is contiguous within.
- The runs of `LoadSpec` and `PublishSpec` differ by group in first block, length and block size. A WINDOW group hands
  over only the blocks that the last token or a later one reads, a STATE group one block (`KVGroup.handed_over`).
- Groups that are `KVGroup.optional` come last and need not be equal on both sides. `BlockLayout.num_common` groups are
  handed over, if both specs have runs of them: runs may be shorter by optional groups. No pool has them.
- `CachedBlock.group`: a pool stores objects of that group only. A prefix counts as found at a boundary when every
  group has the blocks that a later token reads. `Pool.find` is told by group what the engine has.
- `cancel_load` is told the reason, under which the load counts as failed.
- `Ticket.position_delta`: refuse a ticket with another value than 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pd_connectors.protocol.errors import ConnectorUnavailable, LoadFailure
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts, SampledToken

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from pd_connectors.protocol.errors import LeaseEnd
    from pd_connectors.protocol.layout import BlockLayout, BlockRun
    from pd_connectors.protocol.ticket import Ticket
    from pd_connectors.rank_port import RankPort

API_VERSION = 3  # of this interface; raised when connectors written for the version before no longer work


@dataclass(frozen=True, slots=True)
class CacheDescription:
    """One rank's KV cache as a connector sees it. With one rank, `rank_shape` is the group's shape."""

    # One rank's: by group, [the group's block ids, *group.rank_shape(tp_size)]. Several may lie in the same memory, in
    # which a block belongs to one of them at a time. Each block is contiguous; axis 0 may be strided
    tensors: tuple[torch.Tensor, ...]
    layout: BlockLayout  # of the whole engine


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load: read the blocks in `runs`, of the first `num_tokens` tokens of a prompt. The runs may have no blocks."""

    load_id: str
    # D's blocks by group, to the prompt's last one; blocks before a run are cached at D, or dead, and are never sent
    runs: tuple[BlockRun, ...]
    num_tokens: int  # the whole prompt's length (the last block may be partial), or a prefix's, at a boundary


@dataclass(frozen=True, slots=True)
class PublishSpec:
    """Tokens [0, num_tokens) of the lease are complete in `runs`.

    With `num_tokens` 0 it says that P computes the prompt in blocks that P has, so D may reserve its blocks now.
    If the step that computed the last prompt token also sampled, `first_tokens` has the first tokens, and no
    `finish_lease` follows. First tokens stay valid when the generation is raised.
    """

    lease_id: str
    runs: tuple[BlockRun, ...]  # by group, the blocks that `KVGroup.handed_over` names; () if `num_tokens` is 0
    num_tokens: int  # 0, a multiple of the layout's `block_size`, or the whole prompt
    generation: int  # of the lease when the step was planned; void when the lease has been retracted since
    first_tokens: tuple[SampledToken, ...] = ()  # one per sample; () : they are not known yet
    prefill: PrefillFacts = NO_PREFILL  # see `finish_lease`


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A whole block of one group with final content: the KV of the last tokens that its chained hash covers.

    Of a STATE group: the state after those tokens.
    """

    hash: bytes
    block_id: int
    group: int = 0


@dataclass(frozen=True, slots=True)
class LoadReady:
    """P computes the prompt, in blocks that it has, so it will finish: reserve blocks now and call `recv_before`. Once
    a load, never after LoadFailed."""

    load_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """P's sampled first tokens, one per sample. At most once a load, before or after LoadReady, always before LoadDone,
    never after LoadFailed."""

    load_id: str
    tokens: tuple[SampledToken, ...]
    prefill: PrefillFacts = field(default=NO_PREFILL, compare=False)


@dataclass(frozen=True, slots=True)
class LoadSteps:
    """Seconds that a load spent in each step, from the announcement of the whole prompt until the engine knew."""

    announce_s: float = 0.0  # until our control thread had the announcement; from P's wall clock to ours
    reserve_s: float = 0.0  # until the last read was handed to the transport; mostly the engine reserving blocks
    post_s: float = 0.0  # until that read was posted; 0: the transport does not report it
    link_s: float = 0.0  # until every read had ended
    confirm_s: float = 0.0  # until P had confirmed
    wake_s: float = 0.0  # until the engine polled


@dataclass(frozen=True, slots=True)
class LoadDone:
    """Every byte is in, P has confirmed it, and FirstTokens came before: publish the blocks, compute on. Terminal."""

    load_id: str
    group_bytes: tuple[int, ...]  # bytes read, by group
    transfer_s: float  # first read posted to confirmation
    steps: LoadSteps = field(default_factory=LoadSteps, compare=False)
    done_at: float = field(default=0.0, compare=False)  # the connector's clock


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The load will not succeed. Its blocks must not be reused before LoadDrained, which always follows."""

    load_id: str
    reason: LoadFailure
    detail: str = ""


@dataclass(frozen=True, slots=True)
class LoadDrained:
    """Follows LoadFailed when nothing can land in the load's blocks any more. Terminal."""

    load_id: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """No further read of the lease's blocks can be confirmed; P may reuse them. Once a lease, unless P ended it."""

    lease_id: str
    reason: LeaseEnd


@dataclass(frozen=True, slots=True)
class PrefixFound:
    """The pool has more of the prompt than the engine: reserve blocks up to `num_tokens` and call `recv_before`.
    At most once a search, before its PrefixLoaded."""

    load_id: str
    num_tokens: int  # from the prompt's start, to a boundary of all groups


@dataclass(frozen=True, slots=True)
class PrefixLoaded:
    """The search is over. Of the blocks that `recv_before` named, those that end by `num_tokens` are whole; nothing can
    land in any of them any more. Terminal; once a search, whatever happens."""

    load_id: str
    # From the prompt's start; 0 when nothing was loaded. If a group is neither FULL nor LATENT: what was found, or 0
    num_tokens: int


Event = LoadReady | FirstTokens | LoadDone | LoadFailed | LoadDrained | LeaseEnded | PrefixFound | PrefixLoaded


class SchedulerHalf(ABC):
    """The half that the step loop calls with tokens and block ids. No method waits for a peer."""

    # P: this engine's blocks, read by others

    @abstractmethod
    def open_lease(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        salt: str,
        num_samples: int,
        *,
        hold: bool,
        sampling_digest: bytes = b"",
    ) -> Ticket:
        """Promise a prompt's KV. With `hold` the clock of its expiry starts only at `finish_lease` (a foreign router
        shows the ticket to D after prefill); otherwise it starts now and D must renew.

        sampling_digest: goes into the ticket as it is. b"": the reader will not adopt the first tokens."""

    @abstractmethod
    def finish_lease(
        self, lease_id: str, first_tokens: tuple[SampledToken, ...], prefill: PrefillFacts = NO_PREFILL
    ) -> None:
        """Make the first tokens known, if no PublishSpec had them. The whole prompt has been published.

        prefill: for the reader."""

    @abstractmethod
    def retract(self, lease_id: str) -> int | None:
        """Take the lease's blocks back but keep the lease: its announcements are void. When this returns, no read of
        the blocks can be confirmed. Returns the new generation, for later PublishSpecs; None for an ended lease."""

    @abstractmethod
    def end_lease(self, lease_id: str, reason: LeaseEnd) -> None:
        """End the lease now. After it returns no read can be confirmed; no LeaseEnded follows. Ignores unknown ids."""

    # D: blocks of others, read into this engine

    @abstractmethod
    def begin_load(self, load_id: str, ticket: Ticket, deadline_s: float) -> None:
        """Start fetching what `ticket` promises: contact P, renew the lease, and report LoadReady, FirstTokens, ...
        `load_id` is never reused. `deadline_s`: seconds from now until LoadFailed(DEADLINE)."""

    @abstractmethod
    def cancel_load(self, load_id: str, reason: LoadFailure = LoadFailure.CANCELLED) -> None:
        """Give the load up and leave its lease. LoadFailed(reason) and LoadDrained follow unless it has ended."""

    # both

    @abstractmethod
    def poll(self) -> list[Event]:
        """Returns the events since the last call, oldest first. Never blocks."""

    @abstractmethod
    def set_waker(self, wake: Callable[[], None]) -> None:
        """`wake` is called from any thread after an event becomes available to `poll`."""

    def allow_silence(self, allowed_s: float) -> None:  # noqa: B027 - most connectors tell no peer
        """Set how many seconds the step loop may go without a call of `poll` before it counts as frozen.

        Otherwise it calls `poll` at least once a second. A connector with peers that wait for this engine's steps tells
        them.
        """


class WorkerHalf(ABC):
    """The half that sees the cache tensors. One per tensor-parallel rank."""

    @abstractmethod
    def register_kv_cache(self, cache: CacheDescription) -> None:
        """Called once, before anything else. The tensor outlives the connector."""

    @abstractmethod
    def recv_before(self, loads: Sequence[LoadSpec]) -> None:
        """Start these loads. Every step that may touch their blocks has retired; a later step may be running.

        Loads that have failed meanwhile are skipped: their LoadFailed was polled or will be, and no byte is written
        into their blocks."""

    @abstractmethod
    def send_after(self, publishes: Sequence[PublishSpec]) -> None:
        """Let others read these blocks and know first tokens. The step's work on the device has retired."""

    @abstractmethod
    def close(self) -> None:
        """End every lease and load and free the transport. Idempotent; returns within `close_deadline_s`.

        After it nothing is written into the cache of rank 0. The engine then closes what the other ranks run, each in
        its own process, before that rank frees its cache: until then a read of that rank may still land there.
        """


class Pool(ABC):
    """Blocks by content, shared by all nodes. Called from the step loop; nothing here waits for a server.

    `Connector.recv_before` loads the blocks that were found. Events come from `Connector.poll`.
    """

    @abstractmethod
    def find(self, load_id: str, block_hashes: Sequence[bytes], first_blocks: Sequence[int]) -> None:
        """Search for a prompt's blocks; `block_hashes` name blocks of `layout.block_size` tokens, from its start.

        first_blocks: by group, in its own blocks: the engine has those of the prompt before this one. It has the prompt
        up to the largest multiple of `layout.boundary` within all of them; of what comes before the KVGroup.first_block
        there it may lack some.

        The prefix ends at the largest multiple p of `layout.boundary` for which every required group has its blocks
        from the engine's on, and of a WINDOW or STATE group only those from `first_block(p)` on. A larger block has the
        hash at its end.

        PrefixFound may follow, PrefixLoaded always follows. The pool has its own deadline, which does not count the
        engine's time from PrefixFound to `recv_before`. A `load_id` is never reused, not even for a load from P.
        """

    @abstractmethod
    def cancel(self, load_id: str) -> None:
        """Cancel the search of `load_id`. Its PrefixLoaded follows soon, unless it was reported already."""

    @abstractmethod
    def store(self, blocks: Sequence[CachedBlock]) -> None:
        """Offer blocks of retired steps, each of one group.

        Their content is copied before a later step on the device, or a load that a later `recv_before` starts, can
        change it.
        """


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """The engine's identity, addresses, key and deadlines, for its connector."""

    engine_id: str
    epoch: int
    fingerprint: str
    layout: BlockLayout
    cluster_key: bytes
    host: str  # address under which peers reach this node's control port
    port: int  # 0: chosen by the OS
    kv_ports: tuple[int, int] | None = None  # lowest and highest port for KV, where it has ports; None: the default
    max_readers: int = 1024  # connections to the control port at once
    lease_ttl_s: float = 10.0  # P frees a lease's blocks this long after the last renewal
    connect_deadline_s: float = 5.0  # D gives a peer this long to answer a handshake
    renew_every_s: float = 1.0  # D asks P at least this often about a lease
    silence_s: float = 2.5  # D gives P this long to answer, so a frozen P is noticed within 3.5 s
    read_deadline_s: float = 10.0  # a load fails if reads are in flight and none of the peer's ends for this long
    confirm_deadline_s: float = 5.0
    drain_deadline_s: float = 10.0  # a read that hangs this long after its load failed costs the peer its endpoint
    close_deadline_s: float = 5.0
    options: tuple[tuple[str, Any], ...] = ()  # passed through to the implementation
    rank: int = 0  # of this process; a connector runs on rank 0, see `registry.rank_reader` for the others
    rank_ports: tuple[RankPort, ...] = ()  # on rank 0: index i leads to rank i + 1


class Closes(Protocol):
    """Something to be closed."""

    def close(self) -> None:
        """After it nothing is written into this rank's cache. Idempotent; returns within `close_deadline_s`."""


class Connector(SchedulerHalf, WorkerHalf):
    """A whole connector: the scheduler's half and the worker's half, in one process (rank 0).

    `api_version` names the version of this interface for which the connector was written. The version is now 3. A node
    refuses to start with a connector of another version, because the loads of such a connector would stall.
    """

    name: str
    api_version: ClassVar[int] = 0

    @classmethod
    def serve_rank(cls, context: ConnectorContext, cache: CacheDescription, port: RankPort) -> Closes | None:
        """Start what this connector needs in the process of a further rank (`context.rank`) with its own cache.

        None: nothing. Raises ConnectorUnavailable when it does not start, or this connector moves one rank's KV only.
        """
        raise ConnectorUnavailable(f"connector {cls.name!r} moves the KV of one rank only: start the node with --tp 1")

    @property
    def control_port(self) -> int:
        """Port under which peers reach this node; known from construction on. 0: the node cannot be read."""
        return 0

    @property
    def pool(self) -> Pool | None:
        """The pool beside the handoff, in connectors that have one."""
        return None

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Counters (`..._total`) and gauges by metric name without prefix. A label follows the name after a bar:
        `kv_transfer_bytes_total`, `leases_open`, `loads_failed_total|reason=deadline`. Callable from any thread."""
