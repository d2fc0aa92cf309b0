"""What every connector must do, told without saying how: the suite of this folder runs on a `Harness` for each.

To run it on a connector of your own, write a harness and name it by its import path:

    pytest tests/conformance --harness my_package.my_harness:MyHarness

A connector that hands requests over from node to node subclasses `handoffs.RemoteHandoff` and sets `connector` to what
`create_connector` takes, `package.module:Class` for example. One with a pool subclasses `pools.PoolHarness` and says
how the server is started, killed and asked. Anything else implements `Harness` itself. Settings for the connector go
into `options`; everything else that the suite needs is in `pd_connectors.base`.

Two parties: the *source*, which computes prompts and may be stopped or killed, and *readers*, nodes in this process.
"""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from pd_connectors.base import LoadDone, LoadDrained, LoadFailed, LoadReady, LoadSpec, PrefixFound, PrefixLoaded
from tests.connectors.layouts import over
from tests.connectors.remote_node import LAYOUT, Node, context, is_stamped, runs
from tests.deadlines import HANG_S, wait_until

if TYPE_CHECKING:
    from types import TracebackType

    from pd_connectors.protocol.errors import LoadFailure

SIZE = LAYOUT.block_size
NUM_READER_BLOCKS = 64
NUM_SOURCE_BLOCKS = 256
LOAD_DEADLINE_S = HANG_S
FOREVER_S = 3600.0  # what waits for the end of this fails its test by pytest's timeout
PATIENT: dict[str, Any] = {"connect_deadline_s": FOREVER_S, "confirm_deadline_s": FOREVER_S, "silence_s": FOREVER_S}
QUICK: dict[str, Any] = {"connect_deadline_s": 0.5, "confirm_deadline_s": 0.5, "silence_s": 0.5, "renew_every_s": 0.1}
_GRAMMAR = re.compile(
    r"((LoadReady |FirstTokens ){0,2}LoadFailed LoadDrained |(LoadReady FirstTokens |FirstTokens LoadReady )LoadDone "
    r"|(PrefixFound )?PrefixLoaded )"
)


@dataclass(eq=False)
class Prompt:
    """Its KV lies, or will lie, in these blocks of the source; `version` makes their content its own."""

    version: int
    num_tokens: int
    source_blocks: tuple[int, ...]
    num_offered: int = 0  # blocks

    @property
    def num_blocks(self) -> int:
        return len(self.source_blocks)


@dataclass(frozen=True)
class End:
    """How a load ended: tokens from the prompt's start that are there now, and why it is not all (in a handoff)."""

    num_tokens: int
    reason: LoadFailure | None = None


@dataclass
class Reader:
    """A node that wants prompts. Its cache is zeros where nothing landed."""

    node: Node
    found: dict[str, int] = field(default_factory=dict)  # tokens, by load
    named: set[int] = field(default_factory=set)  # blocks of loads since the last `wipe`

    def wait_found(self, load_id: str) -> bool:
        """Until there is something to reserve blocks for. False: it ended without."""
        event = self._wait(load_id, (LoadReady, PrefixFound, LoadDrained, PrefixLoaded))
        if not isinstance(event, LoadReady | PrefixFound):
            return False
        self.found[load_id] = event.num_tokens
        return True

    def read(self, load_id: str, block_ids: tuple[int, ...], first_block: int = 0) -> None:
        """Reserve as many of these blocks as were found, from the prompt's `first_block` on, and start reading."""
        num_tokens = self.found[load_id]
        needed = block_ids[: -(-num_tokens // SIZE) - first_block]
        self.named.update(needed)
        self.node.connector.recv_before([LoadSpec(load_id, runs(first_block, needed), num_tokens)])

    def wait_end(self, load_id: str) -> End:
        event = self._wait(load_id, (LoadDone, LoadDrained, PrefixLoaded))
        if isinstance(event, PrefixLoaded):
            return End(event.num_tokens)
        if isinstance(event, LoadDone):
            return End(self.found[load_id])
        failed = self._wait(load_id, (LoadFailed,))
        return End(0, failed.reason)

    def wait_landed(self, prompt: Prompt, block: int, block_id: int) -> None:
        """Until this block of the prompt is there."""
        wait_until(lambda: self.has(prompt, block, block_id), lambda: f"block {block} did not come", 0.0)

    def has(self, prompt: Prompt, block: int, block_id: int) -> bool:
        """Whether this block of the prompt is in this block of the cache, to the bit."""
        return is_stamped(self.node.cache, block_id, prompt.source_blocks[block], prompt.version)

    def check(self, prompt: Prompt, end: End, block_ids: tuple[int, ...], first_block: int = 0) -> None:
        """What is said to be there is there, and nothing is anywhere but in the blocks that were named."""
        num_whole = -(-end.num_tokens // SIZE) - first_block
        for index in range(num_whole):
            assert self.has(prompt, first_block + index, block_ids[index]), f"block {first_block + index} is wrong"
        others = [block_id for block_id in range(NUM_READER_BLOCKS) if block_id not in block_ids]
        landed = any(bool(tensor[others].any()) for tensor in self.node.cache.tensors)
        assert not landed, "something landed in a block that no load named"

    def wipe(self) -> None:
        """Zeros everywhere. No load may be open. Asserts that nothing of the loads before the last wipe has landed."""
        others = [block_id for block_id in range(NUM_READER_BLOCKS) if block_id not in self.named]
        assert not any(bool(tensor[others].any()) for tensor in self.node.cache.tensors), "it landed after its end"
        self.named.clear()
        for tensor in self.node.cache.tensors:
            tensor.zero_()

    def check_events(self) -> None:
        """Each load's events are those that the interface allows, in their order, and it has ended."""
        load_ids = {name for event in self.node.events if (name := getattr(event, "load_id", None)) is not None}
        for load_id in load_ids:
            kinds = self.node.kinds(load_id)
            assert _GRAMMAR.fullmatch(" ".join(kinds) + " "), f"{load_id}: {kinds}"
            assert len(set(kinds)) == len(kinds), f"{load_id}: {kinds}"

    def _wait(self, load_id: str, kinds: tuple[type[Any], ...]) -> Any:
        end_s = time.monotonic() + HANG_S
        while True:
            self.node.events += self.node.connector.poll()
            for event in self.node.events:
                if isinstance(event, kinds) and event.load_id == load_id:
                    return event
            assert time.monotonic() < end_s, f"no end of {load_id} but {self.node.kinds(load_id)}"
            time.sleep(0.002)


class Harness(ABC):
    """One connector with a source that works. Use it in a `with` statement."""

    connector: ClassVar[str]  # as `create_connector` takes it
    waits_for_the_rest: ClassVar[bool]  # an offer of a part is a promise of all, not an answer
    parts: ClassVar[tuple[str, ...]]  # what may stand still or die
    source_ranks: ClassVar[int] = 1  # tensor-parallel ranks of the source, all in its process
    reader_ranks: ClassVar[int] = 1

    def __init__(self) -> None:
        self._num_prompts = 0
        self._num_used = 0
        self._serials = count()

    def options(self) -> tuple[tuple[str, Any], ...]:
        """The connector's, on both sides."""
        return ()

    def prompt(self, num_tokens: int) -> Prompt:
        """One that is new to every node."""
        self._num_prompts += 1
        first, count = self._num_used, -(-num_tokens // SIZE)
        self._num_used += count
        blocks = tuple((first + index) % NUM_SOURCE_BLOCKS for index in range(count))
        return Prompt(self._num_prompts, num_tokens, blocks)

    def reader(self, name: str, *, is_quick: bool = False) -> Reader:
        """A new node. Close it. A quick one gives a silent source up soon, and on a busy machine another one, too."""
        settings = context(name, layout=over(LAYOUT, self.reader_ranks), options=self.reader_options(is_quick))
        return Reader(
            Node.start(self.connector, replace(settings, **(QUICK if is_quick else PATIENT)), NUM_READER_BLOCKS)
        )

    def reader_options(self, is_quick: bool) -> tuple[tuple[str, Any], ...]:
        return self.options()

    def fetch(
        self, reader: Reader, prompt: Prompt, load_id: str, block_ids: tuple[int, ...], first_block: int = 0
    ) -> End:
        """A load from its beginning to its end; checked."""
        self.ask(reader, prompt, load_id, first_block)
        if reader.wait_found(load_id):
            reader.read(load_id, block_ids, first_block)
        end = reader.wait_end(load_id)
        reader.check(prompt, end, block_ids, first_block)
        return end

    def wait_working(self, reader: Reader) -> None:
        """Until a prompt that is offered arrives. Tries before may end without it, but with nothing wrong.

        Nothing of an earlier load lands meanwhile, which another block would show, nor until the next `wipe`.
        """
        prompt = self.prompt(3 * SIZE)

        def arrives() -> bool:
            reader.wipe()
            self.offer(prompt)
            return self.fetch(reader, prompt, self.load_id("try"), (50, 51, 52)) == End(prompt.num_tokens)

        wait_until(arrives, lambda: "nothing arrives")

    def load_id(self, what: str) -> str:
        """One that was never used."""
        return f"{what}-{next(self._serials)}"

    @abstractmethod
    def ask(
        self, reader: Reader, prompt: Prompt, load_id: str, first_block: int = 0, deadline_s: float = LOAD_DEADLINE_S
    ) -> None:
        """Begin a load. The reader has the blocks before `first_block`."""

    @abstractmethod
    def cancel(self, reader: Reader, load_id: str) -> None:
        """Give a load up."""

    @abstractmethod
    def offer(self, prompt: Prompt, num_blocks: int | None = None) -> None:
        """The source computes the prompt up to so many blocks (all): readers that ask now or later can read them."""

    @abstractmethod
    def evict(self, prompt: Prompt) -> None:
        """The source needs the prompt's blocks for something else, and has written that into them."""

    @abstractmethod
    def bytes_read(self, reader: Reader) -> float:
        """Of blocks, by this reader so far."""

    @abstractmethod
    def stop(self, part: str) -> None:
        """One of `parts` stands still, as under SIGSTOP."""

    @abstractmethod
    def resume(self, part: str) -> None:
        """It goes on."""

    @abstractmethod
    def kill(self, part: str) -> None:
        """One of `parts` is gone without a word."""

    @abstractmethod
    def restart(self, part: str) -> None:
        """It is there again, under its address, and has forgotten everything."""

    @abstractmethod
    def __enter__(self) -> Harness:
        """Start the source."""

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End everything, killed or stopped as it may be."""
