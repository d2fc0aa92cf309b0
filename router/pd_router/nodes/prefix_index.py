"""Which nodes have cached the prefix of a prompt, by the text chains that nodes publish. Pure.

A node evicts a block before the blocks that it continues, so a stored block says that the whole prefix up to its end
is stored. The index maps each step of a text chain to the nodes that have a block there, as bits of an integer: one
look-up serves all nodes.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import msgspec

from pd_connectors.protocol.feed import DEVICE, HOST, StoredBlock

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_connectors.protocol.text_chain import LastTurn

N = TypeVar("N", bound=Hashable)

# Blocks kept of one node, so that a feed cannot take all memory. Those beyond are ignored: fewer hits, none wrong.
# At one block for each 512 bytes of text: prompts of 30 million tokens.
MAX_BLOCKS = 1 << 18


class _Step(msgspec.Struct, eq=False, gc=False):
    """A step of a text chain at which a node has a block.

    `places` and `nodes` are immutable: there are hundreds of thousands, which the garbage collector need not search.
    """

    hash: int
    places: tuple[_Place, ...] = ()  # the longest prefix first
    nodes: int = 0  # bits of the nodes of all places


class _Place(msgspec.Struct, eq=False, gc=False):
    """The blocks of all nodes that end at this token of the chain, and that the devices have."""

    tier: ClassVar[int] = DEVICE  # of the class, so that a name costs no memory for its tier

    step: _Step
    num_tokens: int
    nodes: int = 0  # bits


class _LowerPlace(_Place):
    """Those of which the device lacks something."""

    tier: ClassVar[int] = HOST


class _NodeBlocks(msgspec.Struct, eq=False):
    """The blocks of one node."""

    bit: int
    blocks: dict[int, _Place] = {}
    more: dict[int, int] = {}  # id of a place -> number of this node's blocks there beyond the first


class PrefixIndex(Generic[N]):
    """The named blocks of all nodes `N`.

    `hits` takes 15 to 50 us at 100 nodes of 5,000 blocks each and 100 steps; to store or evict a block 3 us. A node of
    5,000 blocks that no other node has takes 1.5 MB (benchmarks/router_feed.py).
    """

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}
        self._of_node: dict[N, _NodeBlocks] = {}
        self._last_turns: dict[N, LastTurn] = {}
        self.last_turns: frozenset[LastTurn] = frozenset()  # a prompt has a text chain for each of these: one a model
        self._by_bit: list[N | None] = []
        self._bits = 0  # of all nodes
        self._forgotten: list[_NodeBlocks] = []  # still in the steps, and not found
        self.num_lower = 0  # blocks that are not on the device

    def __len__(self) -> int:
        """Number of steps."""
        return len(self._steps)

    def num_blocks(self, node: N) -> int:
        mine = self._of_node.get(node)
        return 0 if mine is None else len(mine.blocks)

    def tell(self, node: N, last_turn: LastTurn) -> None:
        """What the node's chat template does, from which its names follow. It holds until `forget`."""
        self._last_turns[node] = last_turn
        self.last_turns = frozenset(self._last_turns.values())

    def store(self, node: N, blocks: Iterable[StoredBlock]) -> None:
        """Add blocks. A block that the node has stored already moves to its new place."""
        mine = self._of_node.get(node) or self._enter(node)
        for stored in blocks:
            if (before := mine.blocks.pop(stored.block, None)) is not None:
                self._leave(mine, before)
            elif len(mine.blocks) >= MAX_BLOCKS:
                continue
            mine.blocks[stored.block] = place = self._place(stored)
            if stored.tier:
                self.num_lower += 1
            bit = mine.bit
            if place.nodes & bit:
                mine.more[id(place)] = mine.more.get(id(place), 0) + 1
                continue
            place.nodes = place.nodes | bit if place.nodes else bit  # a lone bit shares the node's integer
            step = place.step
            step.nodes = step.nodes | bit if step.nodes else bit

    def evict(self, node: N, blocks: Iterable[int]) -> None:
        """Remove blocks. Those that are not stored are ignored."""
        if (mine := self._of_node.get(node)) is None:
            return
        for block in blocks:
            if (place := mine.blocks.pop(block, None)) is not None:
                self._leave(mine, place)

    def move(self, node: N, moved: Iterable[tuple[int, int]]) -> None:
        """Change the tiers of blocks. Those that are not stored are ignored."""
        mine = self._of_node.get(node)
        for block, tier in moved if mine else ():
            if (place := mine.blocks.get(block)) is not None:  # type: ignore[union-attr]
                self.store(node, (StoredBlock(block, place.step.hash, place.num_tokens, tier),))

    def forget(self, node: N) -> None:
        """Find nothing of a node any more. `sweep` then frees its memory: 260,000 blocks would take half a second."""
        self._last_turns.pop(node, None)
        self.last_turns = frozenset(self._last_turns.values())
        if (mine := self._of_node.pop(node, None)) is None:
            return
        self._bits ^= mine.bit
        self._forgotten.append(mine)

    def sweep(self, limit: int) -> bool:
        """Remove up to `limit` blocks of nodes that were forgotten. True: there are more."""
        while limit and self._forgotten:
            mine = self._forgotten[-1]
            while limit and mine.blocks:
                self._leave(mine, mine.blocks.popitem()[1])
                limit -= 1
            if not mine.blocks:
                self._by_bit[mine.bit.bit_length() - 1] = None
                self._forgotten.pop()
        return bool(self._forgotten)

    def hits(self, steps: Sequence[int]) -> dict[N, int]:
        """Tokens that each node has cached of a prompt with this text chain. Nodes without a hit are absent."""
        left = self._bits
        find = self._steps.get
        found: dict[N, int] = {}
        for step_hash in reversed(steps):
            step = find(step_hash)
            if step is None or not (here := step.nodes & left):
                continue
            left ^= here
            for place in step.places:  # the first place of a node is its longest
                hit = place.nodes & here
                here ^= hit
                while hit:
                    at = hit.bit_length() - 1
                    hit ^= 1 << at
                    found[self._by_bit[at]] = place.num_tokens  # type: ignore[index]  # a bit in use has its node
                if not here:
                    break
            if not left:
                break
        return found

    def hits_on_device(self, steps: Sequence[int]) -> dict[N, int]:
        """The same up to where the node's device has all. Only with `num_lower` it differs from `hits`."""
        left = self._bits
        found: dict[N, int] = {}
        for step_hash in reversed(steps):
            step = self._steps.get(step_hash)
            for place in step.places if step is not None and step.nodes & left else ():
                hit = 0 if place.tier else place.nodes & left
                left ^= hit
                while hit:
                    at = hit.bit_length() - 1
                    hit ^= 1 << at
                    found[self._by_bit[at]] = place.num_tokens  # type: ignore[index]  # as in `hits`
            if not left:
                break
        return found

    def _enter(self, node: N) -> _NodeBlocks:
        if None in self._by_bit:
            at = self._by_bit.index(None)
            self._by_bit[at] = node
        else:
            at = len(self._by_bit)
            self._by_bit.append(node)
        mine = self._of_node[node] = _NodeBlocks(1 << at)
        self._bits |= mine.bit
        return mine

    def _place(self, stored: StoredBlock) -> _Place:
        step = self._steps.get(stored.step)
        if step is None:
            step = self._steps[stored.step] = _Step(stored.step)
        kind = _LowerPlace if stored.tier else _Place
        for place in step.places:
            if place.num_tokens == stored.num_tokens and type(place) is kind:
                return place
        place = kind(step, stored.num_tokens)
        step.places = tuple(sorted((*step.places, place), key=lambda one: -one.num_tokens))
        return place

    def _leave(self, mine: _NodeBlocks, place: _Place) -> None:
        """Take one block of a node from its place, and what is empty then from the index."""
        if self.num_lower and place.tier:
            self.num_lower -= 1
        if more := mine.more.get(id(place)):
            if more == 1:
                del mine.more[id(place)]
            else:
                mine.more[id(place)] = more - 1
            return
        step = place.step
        place.nodes ^= mine.bit
        if not place.nodes:
            step.places = tuple(other for other in step.places if other is not place)
        nodes = 0
        for other in step.places:
            nodes |= other.nodes
        step.nodes = nodes
        if not step.places:
            del self._steps[step.hash]
