"""A cluster of nodes with gates: a request stays in the phase in which a test wants a fault, for as long as `held`.

P has computed HELD tokens of a long prompt and D has read them; or D has told so many tokens of an answer.
"""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from tests.integration.calls import Call, Outcome
from tests.integration.fault_cluster import DECODE_FLAGS, Member, RouterMember, make_prompt, start, until, wait_clean
from tests.integration.gate import Gate
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.cluster import Launcher

LONG_S = 600.0  # of what must not run out: that a request ended proves that it did not wait for it
SHORT, LONG = 200, 1000  # prompt tokens
STEP = 512  # the most tokens of a step
HELD = STEP  # of a long prompt, which has only begun then; a short one has fewer
NUM_TOKENS = 12
SPOKEN = 20  # tokens of a longer answer that has begun
BLOCK_SIZE = 16
P0_BLOCKS = 71  # one long prompt and 100 tokens, so that the next one overwrites it
D0_BLOCKS = 162  # a long prompt does not fit beside one of 1,600 tokens
ROLES = {"p": "prefill", "d": "decode", "s": "decode"}
PATIENT_FLAGS = (f"--load-deadline-s={LONG_S:g}", f"--drain-s={LONG_S:g}")
ROOM = "--kv-cache-gb=0.03"  # 7,300 tokens of the shallow model
READER_FLAGS = (*DECODE_FLAGS, "--max-model-len=2560")  # d0 holds so much: streams go on at nodes of equal limits only
FLAGS = {
    "p0": ("--max-num-seqs=8", f"--max-num-batched-tokens={STEP}", f"--num-blocks={P0_BLOCKS}"),
    "p1": (f"--max-num-batched-tokens={STEP}",),
    "d0": (*READER_FLAGS, f"--num-blocks={D0_BLOCKS}"),
    "d1": READER_FLAGS,
    "strict": (*READER_FLAGS, "--on-load-failure=fail"),
}
LASTING = {"p1": (f"--lease-ttl-s={LONG_S:g}",)}  # of patient nodes: what nothing gives back stays
# As between machines: over shared memory a reader needs no help of the other process, so nothing could be late
NETWORK = {"UCX_TLS": "tcp"}


class GatedCluster:
    """Nodes by name, see FLAGS; started together, ended by `launcher`. `router` knows only p0 and d0.

    They have the shallow model: an answer is compared with that of a node alone. Each has a gate. If they are patient
    no lease of p1 ends by its ttl. strict reports every failed load.
    """

    def __init__(
        self,
        launcher: Launcher,
        directory: Path,
        *names: str,
        flags: Sequence[str] = PATIENT_FLAGS,
        p0_flags: Sequence[str] = (),
        patient: bool = True,
    ) -> None:
        """`directory`: an empty one, for the gates. `flags`: of all nodes. `patient`: the nodes are, see `Gate`."""
        self.launcher = launcher
        self._gates = {name: Gate(directory, name, patient=patient) for name in names}
        flags = (f"--model={shallow_model()}", ROOM, *flags)
        self.nodes = {
            name: Member(
                launcher, name, ROLES[name[0]], *flags, *FLAGS[name], *gate.flags, *(p0_flags if name == "p0" else ()),
                *(LASTING.get(name, ()) if patient else ()),
                environment={**NETWORK, **gate.environment},
            )
            for name, gate in self._gates.items()
        }  # fmt: skip
        start(list(self.nodes.values()))
        self._routers: list[RouterMember] = []
        self.router = self.new_router(["p0"], ["d0"])
        self._salts = count()
        self._expected: dict[int, Outcome] = {}

    @property
    def p0(self) -> Member:
        return self.nodes["p0"]

    @property
    def d0(self) -> Member:
        return self.nodes["d0"]

    @property
    def running(self) -> list[Member]:
        """The nodes that no test has ended, or that were started again."""
        return [node for node in self.nodes.values() if node.is_running]

    def held(self, name: str = "p0", prompt: float = HELD) -> AbstractContextManager[None]:
        """The node computes no sequence of so many tokens, until the end."""
        return self._gates[name].held(prompt=prompt)

    def spoken(self, name: str = "d0", answer: float = SPOKEN) -> AbstractContextManager[None]:
        """The node computes no sequence with an answer of so many tokens, until the end."""
        return self._gates[name].held(answer=answer)

    @contextmanager
    def impatient(self, *names: str) -> Iterator[None]:
        """These nodes are not patient with what begins before the end."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self._gates[name].impatient())
            yield

    def stop(self) -> None:
        """End all processes at once. Asserts that nodes end well; what they leave behind is found by `launcher`."""
        with ThreadPoolExecutor() as pool:
            stopping = [pool.submit(router.process.stop) for router in self._routers]
            statuses = list(pool.map(lambda node: node.process.stop(), self.running))
        assert set(statuses) <= {0}
        assert {one.result() for one in stopping} <= {0, -signal.SIGKILL}

    def stop_new_routers(self) -> None:
        """End all routers but the first: each asks its nodes for their health five times a second."""
        first, *others = self._routers
        self._routers = [first]
        with ThreadPoolExecutor() as pool:
            assert set(pool.map(lambda router: router.process.stop(), others)) <= {0}

    def new_router(self, prefill: Sequence[str], decode: Sequence[str], *flags: str) -> RouterMember:
        """A router before these nodes. Its first request goes to the first node of each role."""
        prefills, decodes = ([self.nodes[name] for name in names] for names in (prefill, decode))
        router = RouterMember(self.launcher, prefills, decodes, *flags)
        self._routers.append(router)
        return router

    def body(self, length: int, *, num_tokens: int = NUM_TOKENS, stream: bool = False) -> dict[str, Any]:
        """A greedy request. Prompts of one length are equal, but under another salt each, so that nothing is cached."""
        return {
            "prompt": make_prompt(length),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            "cache_salt": f"salt {next(self._salts)}",
        }

    async def expected(self, length: int) -> Outcome:
        """What d0 alone makes of the prompt of this length, with nothing going wrong."""
        if length not in self._expected:
            self._expected[length] = await Call(self.d0.url, self.body(length)).outcome()
            assert self._expected[length].error is None
        return self._expected[length]

    def call(
        self, length: int, route: str, *, stream: bool = False, num_tokens: int = NUM_TOKENS, url: str = ""
    ) -> Call:
        """A request to `url`, by default that of `router`."""
        return Call(url or self.router.url, self.body(length, num_tokens=num_tokens, stream=stream), route)

    async def reading(
        self, by: str | tuple[str, ...] = "d0", route: str = "p-first", *, url: str = "", stream: bool = False
    ) -> Call:
        """A request with a long prompt: a node of `by` has read its first blocks; a prefill node is `held` after them.

        On a machine that keeps a process waiting for seconds D takes P for frozen, and answers: then it is asked again.
        """
        readers = [self.nodes[name] for name in ((by,) if isinstance(by, str) else by)]
        calls: list[Call] = []

        async def is_there() -> bool:
            if not calls or calls[-1].done:
                calls.append(self.call(LONG, route, stream=stream, url=url))
            return any([await node.is_reading() for node in readers])

        await until(is_there, f"{by} reads", explain=lambda: f"{len(calls)} requests")
        assert not calls[-1].done
        return calls[-1]

    async def check_transfer(self, length: int, route: str = "p-first") -> int:
        """A request through the router is right, and its KV came from p0 to d0. Returns how often it was asked.

        On a busy machine p0's lease may end before d0 has come to it: then it is asked again.
        """
        before, ways = await self.d0.metric("pd_kv_transfer_bytes_total"), list[tuple[str, str]]()

        async def is_transferred() -> bool:
            outcome = await self.call(length, route).outcome()
            outcome.check(await self.expected(length))
            ways.append((outcome.headers["x-pd-prefill"], outcome.headers["x-pd-decode"]))
            return ways[-1] == ("p0", "d0")

        await until(is_transferred, "a prompt goes from p0 to d0", explain=lambda: str(ways))
        await self.d0.wait_more("pd_kv_transfer_bytes_total", before)
        return len(ways)

    async def check_clean(self, *members: Member) -> float:
        """Wait until no node of `members` (default: all) has anything left. Returns the seconds that took, for logs."""
        return max(await asyncio.gather(*(wait_clean(member) for member in members or self.nodes.values())))

    def go_on(self) -> None:
        """Let all nodes that stand still go on."""
        for node in self.running:
            node.go_on()

    async def restore(self) -> None:
        """Start what is dead, so that the next test finds the cluster whole. A test's own end comes first."""
        self.go_on()
        await asyncio.to_thread(start, [node for node in self.nodes.values() if not node.is_running])
        for node in (self.p0, self.d0):
            await self.router.wait_healthy(node)
