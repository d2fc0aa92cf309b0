"""The layout of KV blocks as a value.

A cache is made of *groups*. The layers of one group have blocks of one shape, which lie in one tensor. Two engines can
exchange KV when their groups are equal. Into how many tensor-parallel ranks each engine splits its blocks may differ:
`slices.plan_slices` pairs the parts.
"""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from itertools import pairwise, takewhile
from math import lcm, prod

import msgspec

from pd_connectors.protocol.errors import LayoutMismatch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
MAX_RANKS = 64  # of one engine; bounds the work for a layout that a peer sent


class KVKind(StrEnum):
    """The kind of content of a group's blocks."""

    FULL = "full"  # keys and values of every token
    WINDOW = "window"  # keys and values of which a token sees the last `window`
    LATENT = "latent"  # one compressed vector a token (MLA), the same for all heads
    STATE = "state"  # a recurrent state of a fixed size, whatever the number of tokens


class KVGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that have blocks of one shape. Axis 0 of `shape` is the outermost, so a run of heads is contiguous."""

    kind: KVKind
    layers: tuple[int, ...]  # of the model, in the order in which they lie in a block
    shape: tuple[int, ...]  # of one block over all ranks, heads first: [heads, layers, 2, block_size, head_dim]
    dtype: str  # one of DTYPE_BYTES
    block_size: int  # tokens a block; for STATE the distance of checkpoints
    window: int = 0  # tokens, for WINDOW
    sharded: bool = True  # axis 0 is split over ranks; False: every rank holds, and reads, the whole block
    optional: bool = False  # a peer without this group is accepted; then it is not handed over (the head of drafts)

    @property
    def block_bytes(self) -> int:
        """The size of one block with each head once, whatever the ranks replicate."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    def first_block(self, position: int) -> int:
        """The first block that the token at `position`, or a later one, reads. The blocks before it are dead then."""
        match self.kind:
            case KVKind.WINDOW:
                return max(0, position - self.window + 1) // self.block_size
            case KVKind.STATE:
                return max(0, position - 1) // self.block_size
        return 0

    def handed_over(self, num_tokens: int, num_computed: int | None = None) -> range:
        """The prompt blocks that a handoff of a prompt of `num_tokens` moves, as indices into the prompt's blocks.

        num_computed: only those that are final when this many of the prompt's tokens are computed. None: all tokens.
        A reader may compute the last token again, and finds its own last whole block cached in the next turn, so what
        follows that boundary reads is moved too.
        """
        computed = num_tokens if num_computed is None else num_computed
        if self.kind is KVKind.STATE:  # the state after the last token, which no earlier step has
            first = self.first_block(num_tokens)
            return range(first, first + int(computed == num_tokens))
        first = self.first_block((num_tokens - 1) // self.block_size * self.block_size)
        stop = -(-computed // self.block_size) if computed == num_tokens else computed // self.block_size
        return range(first, max(first, stop))

    def heads_of(self, rank: int, tp_size: int) -> range:
        """The part of axis 0 that a rank holds.

        With more ranks than heads each rank holds one head, and neighbours hold the same one. Raises LayoutMismatch
        when the heads cannot be split evenly.
        """
        heads = self.shape[0]
        if not 1 <= tp_size <= MAX_RANKS or (self.sharded and max(heads, tp_size) % min(heads, tp_size)):
            raise LayoutMismatch(f"{heads} KV heads cannot be split over {tp_size} ranks")
        if not self.sharded:
            return range(heads)
        first, count = rank * heads // tp_size, max(1, heads // tp_size)
        return range(first, first + count)

    def rank_shape(self, tp_size: int) -> tuple[int, ...]:
        """`shape` with the heads of one rank. It is the same on every rank. Raises as `heads_of` does."""
        return (len(self.heads_of(0, tp_size)), *self.shape[1:])

    def rank_bytes(self, tp_size: int) -> int:
        """The size of one block on one rank. Raises as `heads_of` does."""
        return prod(self.rank_shape(tp_size)) * DTYPE_BYTES[self.dtype]


class BlockRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one group: blocks `first_block`, `first_block` + 1, ... of a prompt lie in `block_ids`."""

    first_block: int
    block_ids: tuple[int, ...]

    @property
    def span(self) -> range:
        """The prompt blocks, as indices."""
        return range(self.first_block, self.first_block + len(self.block_ids))

    def ids_of(self, blocks: range) -> tuple[int, ...]:
        """The ids of some of the prompt blocks in `span`."""
        return self.block_ids[blocks.start - self.first_block : blocks.stop - self.first_block]


class BlockLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of one engine. A sequence has a block table for each group; an id is valid in its group's tensor."""

    groups: tuple[KVGroup, ...]  # those that are optional come last
    tp_size: int = 1  # ranks that the engine splits its blocks over

    def __post_init__(self) -> None:
        if any(a.optional and not b.optional for a, b in pairwise(self.groups)):
            raise ValueError("KV groups that are optional come last")

    @property
    def required(self) -> tuple[KVGroup, ...]:
        """The groups that a peer must have."""
        return tuple(group for group in self.groups if not group.optional)

    @property
    def block_size(self) -> int:
        """Tokens a block of the group with the smallest blocks. The block size of each group is a multiple of it."""
        return min(group.block_size for group in self.groups)

    @property
    def boundary(self) -> int:
        """Tokens from one place where a prompt can be continued in every required group to the next."""
        return lcm(*(group.block_size for group in self.required))

    @property
    def block_bytes(self) -> int:
        """The size of one block of every group, with each head once. It is no measure of a number of tokens."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def rank_bytes(self) -> int:
        """`block_bytes` on one rank. `tp_size` of these hold replicated heads several times."""
        return sum(group.rank_bytes(self.tp_size) for group in self.groups)

    def digest(self) -> bytes:
        """16 bytes that name the groups that a peer must have. Equal for engines with different `tp_size`."""
        groups = [msgspec.to_builtins(group) for group in self.required]
        for group in groups:
            del group["optional"]  # so that digests are those of before there were such groups
        return blake2b(msgspec.msgpack.encode(groups), digest_size=16, person=b"pd-kv-layout").digest()

    def num_common(self, theirs: BlockLayout) -> int:
        """How many groups are handed over between the two: as many as are equal from the first one on.

        Raises LayoutMismatch, which names the difference, unless `theirs` has the same groups but optional ones.
        """
        here, there = self.required, theirs.required
        if [group.block_size for group in there] != [group.block_size for group in here]:
            raise LayoutMismatch(
                f"the peer's block_size is {_sizes(there)} tokens, ours {_sizes(here)}: "
                "start both nodes with the same block_size"
            )
        if [group.dtype for group in there] != [group.dtype for group in here]:
            raise LayoutMismatch(
                f"the peer's KV is {there[0].dtype}, ours {here[0].dtype}: "
                "start both nodes with the same dtype and kv_cache_dtype"
            )
        if there != here:
            raise LayoutMismatch(f"the peer's KV groups are {there}, ours {here}")
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(self.groups, theirs.groups, strict=False)))


def _sizes(groups: tuple[KVGroup, ...]) -> str:
    return "/".join(str(group.block_size) for group in groups)
