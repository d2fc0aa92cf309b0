"""The feed: what a node tells its routers about its load and its cached prompts.

`GET /pd/feed` is one answer without an end, of messages (`stream_codec`). The first is a `FeedSnapshot`. Each later one
is a `FeedDelta` with the next number. After a gap, or another epoch, a reader connects again. A node sends a change
within 10 ms, or as late as a router of many nodes asks for, and a delta without a change every HEARTBEAT_S. That its
engine makes no progress any more, or makes it again, is sent at once.
"""

from __future__ import annotations

import msgspec

from pd_connectors.protocol.adapters import AdapterState
from pd_connectors.protocol.text_chain import AS_ALWAYS, LastTurn

FEED_TYPE = "application/x-pd-feed"
HEARTBEAT_S = 1.0
# Header of a request: "ROUTER.NUMBER" names the charge that the router ROUTER has made for it. Header of GET /pd/feed:
# "ROUTER", so that the node says which charges of this router its load includes.
CHARGE_HEADER = "x-pd-charge"
# Header of GET /pd/feed: milliseconds that a node waits between two messages to its routers, at most MAX_WAIT_MS
WAIT_HEADER = "x-pd-feed-wait-ms"
MAX_WAIT_MS = 250
# Tiers, of which each takes longer to load from than the one before. "Not on the device" is all that a reader may
# conclude from a number that it does not know.
DEVICE, HOST = 0, 1
# Tokens of context from which a stream takes an eighth of what reading the weights does, of each step (8B): from there
# on routers have prefill nodes keep it, and a node's steps beside such streams alone are longer
FAR = 16_384
PREFILL_CHARGE_HEADER = "x-pd-prefill-charge"  # of a request to D: the CHARGE_HEADER of D's request to a P


class NodeLoad(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The load of a node, and the measured times of its steps. A time of 0: not measured yet."""

    queued_tokens: int = 0  # prompt tokens of accepted requests that are not computed, without cached ones
    num_running: int = 0  # sequences that hold a slot
    num_waiting: int = 0  # accepted sequences that hold none
    num_slots: int = 0
    free_blocks: int = 0  # for one sequence more: without content, or cached and not in use
    num_blocks: int = 0  # for one sequence in an empty cache
    block_size: int = 0  # tokens
    step_s: float = 0.0  # of a step with decodes only, at present; of one without any while there is no stream
    token_s: float = 0.0  # to compute one more prompt token at position 0
    key_s: float = 0.0  # more for each token before it
    queued_keys: int = 0  # tokens before each queued token, summed: (n - c) * (n + c) // 2 for n tokens with c cached
    step_tokens: int = 0  # prompt tokens that a step takes at present beside the decodes
    tpot_s: float = 0.0  # target of a stream's time per token; 0: none, or nothing is known of its steps
    stream_room: int = 0  # streams more with which every stream is within that target
    late_room: int = 0  # the same for 1.5 times the target
    step_keys: int = 0  # a prompt's token after so many others counts as two of `step_tokens`; 0: always as one
    num_context: int = 0  # known tokens of the sequences that decode here or will
    context_s: float = 0.0  # of a step, for each token of KV that decodes read
    host_token_s: float = 0.0  # to load the KV of a token from host memory; 0: no such tier, or it is not known
    # Tokens of KV that further streams of a prefill node without a target may have at their ends; 0: it keeps none
    kept_tokens: int = 0
    prompts_share: float = 0.0  # of the time lately, what prompts took beside streams, or alone
    adapter_s: float = 0.0  # to read an adapter's files again


class StoredBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A cached block. The text up to a step of the text chain decides all of its tokens."""

    block: int  # first 64 bits of the block's hash
    step: int  # hash of the text chain at that step (`text_chain`)
    num_tokens: int  # of the prompt, up to the end of this block
    tier: int = DEVICE  # the lowest one of what a prompt needs to continue here beside the stored blocks before it


class FeedSnapshot(msgspec.Struct, frozen=True, array_like=True, tag="snapshot"):
    """Everything at the time of `number`."""

    epoch: int  # of the engine's boot
    number: int
    load: NodeLoad
    stored: tuple[StoredBlock, ...] = ()
    charges: tuple[int, ...] = ()  # numbers of this router's charges that `load` includes
    role: str = ""  # of the node at present; "": a node of before role orders
    role_changes: int = 0  # since the node's start: of two words the one with more changes is newer
    last_turn: LastTurn = AS_ALWAYS  # of its chat template: `stored` has steps of the text that follows from it
    adapters: tuple[AdapterState, ...] = ()  # all, with those that were unloaded


class FeedDelta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """What changed since the message before. Evictions come first, then stored blocks, then those that moved."""

    number: int
    load: NodeLoad
    evicted: tuple[int, ...] = ()  # `StoredBlock.block`
    stored: tuple[StoredBlock, ...] = ()
    charges: tuple[int, ...] = ()  # numbers of this router's charges that `load` includes from now on
    role: str = ""  # as in FeedSnapshot
    role_changes: int = 0
    is_last: bool = False  # the node ends by order: what of it is gone then has not died
    is_frozen: bool = False  # its engine makes no progress; /health says why
    moved: tuple[tuple[int, int], ...] = ()  # `StoredBlock.block`, and its tier from now on
    adapters: tuple[AdapterState, ...] = ()  # those that changed


FeedMessage = FeedSnapshot | FeedDelta
