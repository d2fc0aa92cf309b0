"""Messages between the API process and the engine process (msgspec over ZMQ).

    API -> engine   AddRequest, UseTicket, PrefillLocally, Abort, ReleaseLease, ReportNews, and orders
    engine -> API   EngineReady, TicketOpened, PromptLogprobs, PromptRead, TokensOut, NeedsPrefill, RequestFailed,
                    EngineStats, EngineNews, SilenceAllowed, EngineDied, and the ends of orders (orders.py)

Every AddRequest gets exactly one terminal reply: the TokensOut with `finished` true, a PromptRead, or a RequestFailed.
An aborted request gets its reply too (finish reason "abort").
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pd_cluster.protocol.orders import AdapterLoaded, EngineOrder
from pd_cluster.protocol.prompt_outputs import PromptOutputs, PromptToken
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_connectors.protocol.feed import NodeLoad, StoredBlock
from pd_connectors.protocol.messages import SampledToken
from pd_connectors.protocol.ticket import Ticket

HEARTBEAT_S = 1.0  # a healthy engine sends a message at least this often


class Work(StrEnum):
    """The work that this engine does for a request."""

    GENERATE = "generate"  # prefill here, generate here
    PREFILL = "prefill"  # prefill, sample the first token, hold the KV under a lease
    TAKE_OVER = "take_over"  # the KV comes from another node: that of `ticket`, or of a later UseTicket
    READ = "read"  # prefill, answer `outputs`, draw nothing, hold nothing


class FinishReason(StrEnum):
    """Why a sequence ended; the first two are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """A new request. `request_id` is unique for the life of the engine process (the API process makes it so)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    work: Work = Work.GENERATE
    ticket: Ticket | None = None  # TAKE_OVER: None asks the engine to look at its own cache and send NeedsPrefill
    hold_lease: bool = False  # PREFILL: the ticket is shown to D only after prefill
    priority: int = 0  # lower runs first
    salt: str = ""
    min_remote_tokens: int = 0  # TAKE_OVER without ticket: prefill here when fewer tokens than this lack KV
    load_deadline_s: float = 30.0
    received_s: float = 0.0  # when the API process had it, by the host's monotonic clock; 0: unknown
    # GENERATE: output tokens that each of the n sequences has already, from another engine: the answer goes on after
    # them, as if they had been sampled here. Limits, penalties and seeds count them; they are not sent again.
    # TAKE_OVER, for one sequence that has some: the ticket is for the prompt with all but the last of them, which is
    # computed here, and its first token is not used
    known: tuple[tuple[int, ...], ...] = ()
    # the numbers of the n sequences, from which their seeds follow; (): 0 to n - 1. Others where some of an answer's
    # sequences have ended on another node
    sequence_numbers: tuple[int, ...] = ()
    # While routers read the feed: (prompt tokens, text step) of the blocks to name (see `CacheNews`), ascending.
    # The tokens end with a block
    steps: tuple[tuple[int, int], ...] = ()
    group: str = ""  # requests of one group share its turns (`scheduling/turns.py`); "": a group of its own
    drawn_seed: int = 0  # used if `sampling` has none; not part of it, because P draws another one for the same request
    outputs: PromptOutputs | None = None  # what is asked about the prompt
    prediction: tuple[int, ...] = ()  # tokens that the client expects: they may be drafts, and change no answer
    adapter: str = ""  # digest of one that was loaded, else it is refused; "": the base. `salt` has it, too

    @property
    def max_output_tokens(self) -> int:
        """The most tokens of each sequence. A PREFILL samples one, whatever `max_tokens` says. A READ counts as one."""
        return 1 if self.work in (Work.PREFILL, Work.READ) else self.sampling.max_tokens

    @property
    def num_sequences(self) -> int:
        """The sequences that the engine runs: n, or one for each beam. The prefill of a beam search needs one."""
        beams = self.sampling.beams
        return self.sampling.num_first_tokens if beams is None or self.work is Work.PREFILL else beams.width


class UseTicket(msgspec.Struct, frozen=True, tag=True):
    """Answer to NeedsPrefill: read the KV that this ticket promises."""

    request_id: str
    ticket: Ticket
    load_deadline_s: float


class PrefillLocally(msgspec.Struct, frozen=True, tag=True):
    """Answer to NeedsPrefill: compute the prompt here."""

    request_id: str


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a request (`index` None) or one of its n sequences. Unknown or finished ones are ignored."""

    request_id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT  # STOP: the detokenizer saw a stop string


class ReleaseLease(msgspec.Struct, frozen=True, tag=True):
    """End this lease: the router says that no D will read it."""

    lease_id: str


class ReportNews(msgspec.Struct, frozen=True, tag=True):
    """Send EngineNews from now on, or no more. Either way the names of all blocks are forgotten."""

    is_wanted: bool
    serial: int = 0  # the number of those before it; see `EngineNews`


ToEngine = AddRequest | UseTicket | PrefillLocally | Abort | ReleaseLease | ReportNews | EngineOrder


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Sent once, when weights are loaded and the cache is allocated."""

    engine_id: str
    epoch: int
    num_blocks: int  # for one sequence in an empty cache, as in NodeLoad
    block_size: int
    max_model_len: int
    fingerprint: str
    connector: str
    control_port: int  # 0 without a peer-to-peer connector
    max_num_seqs: int
    num_ranks: int = 1


class StartupProgress(msgspec.Struct, frozen=True, tag=True):
    """One line for the log of the node that starts: "weights 12/30", "warm-up"."""

    text: str


class TicketOpened(msgspec.Struct, frozen=True, tag=True):
    """PREFILL was admitted. Sent before any of its tokens is computed."""

    request_id: str
    ticket: Ticket


class Timeline(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Seconds of a request by phase. Their sum is the engine's share of its TTFT (on D: of its second token)."""

    queue_s: float = 0.0  # received to first scheduled (prefill) or to blocks reserved (take over)
    prefill_s: float = 0.0  # first scheduled to first token sampled here
    transfer_s: float = 0.0  # blocks reserved (as soon as P computes) to confirmed
    admit_s: float = 0.0  # confirmed to scheduled in a decode step
    first_decode_s: float = 0.0  # that step
    prefill_leg_s: float = 0.0  # on D: received by P to its first tokens, as P says
    prefill_queue_s: float = 0.0  # on D: of that, until P first scheduled the prompt
    # on D, parts of the transfer: from the announcement of the prompt's end (pd_connectors.base.LoadSteps)
    announce_s: float = 0.0
    reserve_s: float = 0.0
    post_s: float = 0.0
    link_s: float = 0.0
    confirm_s: float = 0.0
    schedule_s: float = 0.0  # from the confirmation until the sequence is in the scheduler's queue

    def phases(self) -> dict[str, float]:
        """Seconds by name, of the phases that the request went through."""
        named = {name.removesuffix("_s"): getattr(self, name) for name in self.__struct_fields__}
        # never at once: 0 says that it did not come to that
        computed = ("prefill", "prefill_leg", "prefill_queue", "first_decode")
        was_loaded = self.link_s > 0  # a step of a load may take no time and is still a step
        return {name: value for name, value in named.items() if value > 0 or (was_loaded and name not in computed)}


class SequenceTokens(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one of the request's sequences since the last message."""

    index: int
    tokens: tuple[SampledToken, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop token that ended it (it is the last of `tokens`)


class TokensOut(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Tokens of one request after one step."""

    request_id: str
    sequences: tuple[SequenceTokens, ...]
    finished: bool  # every sequence has ended: the terminal reply
    num_cached_tokens: int = 0  # prompt tokens found in this engine's prefix cache
    num_external_tokens: int = 0  # prompt tokens with KV from another node or a pool
    timeline: Timeline | None = None  # once, when its phases are over; at the latest on the terminal reply
    num_peer_cached_tokens: int = 0  # prompt tokens in the prefix cache of the prefill node
    num_drafts: int = 0  # of the request so far: drafts that steps have verified, and of these accepted
    num_accepted_drafts: int = 0


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Log-probabilities of prompt tokens from position `start`, of one step; every position but 0 is sent once.

    Sent in the order of positions, all before the request's first TokensOut or PromptRead. The first token of a prompt
    has none, so the first `start` is 1.
    """

    request_id: str
    start: int
    entries: tuple[PromptToken, ...]


class PromptRead(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The terminal reply of a READ that was not aborted."""

    request_id: str
    pooled: bytes = b""  # little-endian fp32 [hidden_size]; empty: not asked for
    logits: tuple[float, ...] = ()  # of `logits_of`, in its order
    num_cached_tokens: int = 0  # prompt tokens found in this engine's prefix cache
    timeline: Timeline | None = None


class NeedsPrefill(msgspec.Struct, frozen=True, tag=True):
    """TAKE_OVER without KV: the API process must answer UseTicket, PrefillLocally or Abort.

    The engine keeps the request's prefix-cache hit pinned meanwhile. `reason` is "" at first, then why a load failed.
    """

    request_id: str
    num_cached_tokens: int
    reason: str = ""


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """Terminal: the engine could not serve the request. `error` is the class name of a PdError."""

    request_id: str
    error: str
    message: str
    param: str | None = None  # of an InvalidRequest
    code: str = ""


class KvGroupStats(msgspec.Struct, frozen=True):
    """The blocks of one KV group. `num_blocks == free + cached + in_use`, in the slabs that the group owns now."""

    kind: str
    num_blocks: int
    free: int
    cached: int
    in_use: int
    leased: int
    quarantined: int


class KvStats(msgspec.Struct, frozen=True):
    """The KV memory of all groups, in units. `num_blocks == free + cached + in_use`.

    With one group a unit is a block. Else a slab has as many units as the least common multiple of what it holds of
    each group's blocks, and a block its share of them. A slab without an owner is free.
    """

    num_blocks: int
    free: int
    cached: int  # unreferenced but reusable through the prefix cache
    in_use: int
    leased: int  # the part of `in_use` that a lease holds
    quarantined: int  # the part of `in_use` that a failed load may still write
    groups: tuple[KvGroupStats, ...] = ()


class EngineStats(msgspec.Struct, frozen=True, tag=True):
    """Sent when something changed, after the outputs of the same step, and every HEARTBEAT_S in any case.

    Counters are totals since boot.
    """

    kv: KvStats
    num_running: int
    num_waiting: int
    num_waiting_for_remote_kv: int
    counters: dict[str, float]  # metric name without the `pd_` prefix -> total
    gauges: dict[str, float]
    num_queued: int = 0  # requests of which nothing has run yet: what `max_waiting` bounds
    adapters: dict[str, int] = {}  # those that are loaded: digest -> the tier of the nearest copy


class EngineNews(msgspec.Struct, frozen=True, tag=True):
    """What has changed for routers; sent at most every NEWS_S, and before the engine waits, while they are wanted.

    A reader removes `evicted`, adds `stored`, then takes the tiers of `moved`. After ReportNews all names are new.
    """

    num_taken: int  # AddRequests since boot; `load` includes them
    load: NodeLoad
    evicted: tuple[int, ...] = ()
    stored: tuple[StoredBlock, ...] = ()
    serial: int = 0  # of the last ReportNews that the engine has taken: names of an older one are forgotten already
    moved: tuple[tuple[int, int], ...] = ()  # `StoredBlock.block`, and its tier from now on


class SilenceAllowed(msgspec.Struct, frozen=True, tag=True):
    """Sent before a step that may take long, or is warm-up: an engine that is silent for so long is not frozen yet.

    Stands until the next one. At first `step_timing.FROZEN_S` are allowed.
    """

    seconds: float


class SignOfLife(msgspec.Struct, frozen=True, tag=True):
    """Of an engine with several ranks, from the thread that watches them: the process runs, whatever its loop does."""


class EngineDied(msgspec.Struct, frozen=True, tag=True):
    """The engine ends because of an error."""

    message: str


FromEngine = (
    EngineReady
    | StartupProgress
    | TicketOpened
    | TokensOut
    | PromptLogprobs
    | PromptRead
    | NeedsPrefill
    | RequestFailed
    | EngineStats
    | EngineNews
    | AdapterLoaded
    | SilenceAllowed
    | SignOfLife
    | EngineDied
)
