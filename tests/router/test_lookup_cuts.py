"""Answers with runs of accepted drafts that are cut at each frame and go on elsewhere: with drafts, or without.

The drafter is the product's. A run of several tokens is one frame, so cuts are between runs and, with the router,
inside the bytes of one. Where the first node has no drafts a cut is behind each token, and the other node drafts from
there.
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import product
from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import Work
from pd_http.dialects import MESSAGES, RESPONSES
from tests.cut_streams import CHAT, COMPLETIONS, Case, check_cuts, data_of, same_content
from tests.lookup_nodes import LookupNode, longest_run, running, text_of, workers
from tests.one_process import STOPPED_S
from tests.router.router_process import KEY, Router, serving
from tests.router.test_cut_through_router import LENIENT, CutNode, alike, ask
from tests.server.test_continued_generation import FORM, HI, PENALTIES, plain
from tests.server.test_runs_of_tokens import told

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from starlette.types import Receive, Scope, Send

    from tests.lookup_nodes import Worker

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(900)]

GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 0.9, "seed": 4}
LONG = {"max_tokens": 30, "ignore_eos": True}
FEW = {"allowed_token_ids": [172, 253, 247, 222, 100]}  # bytes of characters: an answer of these repeats itself
# The client predicts what a node without drafts answers
PREDICTED = [
    plain("two choices with logprobs", CHAT, n=2, logprobs=True, top_logprobs=2, **LONG, **GREEDY),
    plain("token ids", CHAT, return_token_ids=True, **LONG, **SEEDED),
    plain("penalties", CHAT, n=2, bad_words=["the"], logprobs=True, min_tokens=30, **PENALTIES, **LONG, **SEEDED),
    plain("JSON", CHAT, response_format=FORM, max_tokens=40, **GREEDY),
]
REPEATED = [
    plain(
        "several prompts", COMPLETIONS, prompt=["Once", "A fox"], n=2, echo=True, logprobs=1, **FEW, **LONG, **GREEDY
    ),
    plain("two choices", COMPLETIONS, n=2, logprobs=2, return_token_ids=True, **FEW, **LONG, **SEEDED),
    plain("a regular expression", COMPLETIONS, guided_regex="(ab){9}(cde){5}", max_tokens=40, logprobs=0, **SEEDED),
]
OTHERS = [
    Case("a message", MESSAGES, {"messages": HI, "max_tokens": 36, "stream": True, **GREEDY}),
    Case("a response", RESPONSES, {"input": HI, "max_output_tokens": 36, "stream": True, **GREEDY}),
]


DRAFTING = [{"d0"}, {"d1"}, {"d0", "d1"}]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Worker]]:
    with workers("p", "d0", "d1") as found:
        yield found


async def cases(node: LookupNode) -> list[Case]:
    """All, with predictions and stop strings out of the answers of a node without drafts."""
    predicted, stopped = list[Case](), list[Case]()
    texts = [text_of(data_of(await node.ask(case.path, case.body))) for case in (*PREDICTED, PREDICTED[0])]
    for case, text in zip((*PREDICTED, *OTHERS), (*texts[:4], *texts[:1] * 2), strict=True):
        predicted.append(case.drawn(prediction={"type": "content", "content": text}))
    for at, shown in ((len(texts[0]) // 2, False), (2 * len(texts[0]) // 3, True)):
        stop = {"stop": [texts[0][at : at + 4], "zzz"], "include_stop_str_in_output": shown}
        stopped.append(predicted[0].drawn(**stop))
    return [*predicted, *stopped, *REPEATED]


def same(answer: bytes, whole: bytes) -> None:
    """Each token with its logprobs, texts, ends and usage, wherever events end."""
    if answer.startswith(b"data: ") and b'"choices"' in answer:
        same_content(answer, whole)
    else:
        assert told(answer) == told(whole)


@pytest.mark.long
@pytest.mark.parametrize(
    ("drafting", "step"),
    [
        pytest.param({"d0"}, 8, id="the first node, some cuts"),
        *(pytest.param(names, 1, id="+".join(sorted(names)), marks=pytest.mark.slow) for names in DRAFTING),
    ],
)
async def test_an_answer_goes_on_with_or_without_drafts(
    found: dict[str, Worker], drafting: set[str], step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All cases at once."""
    monkeypatch.setattr("time.time", lambda: 1.8e9)  # answers say when they were created
    async with running(found, drafting) as nodes:
        first, second, alone = nodes["d0"], nodes["d1"], nodes["p"]
        asked, runs = (await cases(alone))[:: 1 if step == 1 else 3], dict[str, int]()
        for case in asked:
            messages = await first.ask(case.path, case.body)
            same(data_of(messages), data_of(await alone.ask(case.path, case.body)))
            runs[case.name.partition(" {")[0]] = longest_run(messages)
        assert min(runs.values()) > 1 if "d0" in drafting else max(runs.values()) == 1, runs
        before = second.num_accepted
        cuts = await asyncio.gather(*(check_cuts(one, first.ask, second.ask, same=same, step=step) for one in asked))
        assert second.num_continued > sum(cuts) / 2 > 15 / step, "the others had all tokens"
        assert (second.num_accepted - before > sum(cuts)) == ("d1" in drafting)


class WholeNode(CutNode):
    """Is never cut: P sees the header of the cut, too."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


@contextlib.asynccontextmanager
async def routed(nodes: Mapping[str, LookupNode], route: str) -> AsyncIterator[tuple[Router, list[CutNode]]]:
    """The router before P and two D, which are cut."""
    async with contextlib.AsyncExitStack() as stack:
        cut, served = set[bytes](), list[CutNode]()
        for name, node in nodes.items():
            kind = CutNode if name[0] == "d" else WholeNode
            served.append(await stack.enter_async_context(kind(node.app, cut).serving()))
        patience = {"ticket_timeout_s": STOPPED_S, "first_byte_timeout_s": STOPPED_S, "response_timeout_s": STOPPED_S}
        router = serving(served[:1], served[1:], key=KEY, route=route, **LENIENT | patience)
        yield await stack.enter_async_context(router), served[1:]


async def check_routed(router: Router, served: list[CutNode], case: Case, expected: bytes, step: int) -> int:
    """The whole answer, and the same one cut at each `step`th place: between two frames, and inside the next one.

    Returns the number of places. A node with drafts has fewer frames: it may answer before it is cut.
    """
    same(whole := alike(await ask(router, case)), alike(expected))
    num = max(node.num_messages for node in served)
    cuts = [f"{number}{inside}" for number in range(1, num) for inside in ("", "-inside")][::step]
    for cut, answer in zip(cuts, await asyncio.gather(*(ask(router, case, cut) for cut in cuts)), strict=True):
        try:
            same(alike(answer), whole)
        except AssertionError as error:
            raise AssertionError(f"{case}, cut at {cut}:\n{error}") from error
    served[0].forget()
    return len(cuts)


ROUTES = [
    pytest.param("p-first", {"d0"}, 31, id="P-first, a D drafts, some cuts"),
    *(
        pytest.param(route, drafting, 7, id=f"{route} {'+'.join(sorted(drafting))}", marks=pytest.mark.slow)
        for route, drafting in product(("p-first", "d-first"), ({"d0"}, {"p", "d0"}, {"p"}))
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("route", "drafting", "step"), ROUTES)
async def test_no_cut_is_seen_where_only_some_nodes_draft(
    found: dict[str, Worker], route: str, drafting: set[str], step: int
) -> None:
    """Through the router: P computes prompts, and those that go on with what is known of their answers."""
    async with running(found, {}) as nodes:
        asked = (await cases(nodes["d0"]))[:: 4 if step > 7 else 1]
        expected = [data_of(one) for one in await asyncio.gather(*(nodes["d0"].ask(c.path, c.body) for c in asked))]
    async with running(found, drafting) as nodes, routed(nodes, route) as (router, served):
        num = 0
        for case, whole in zip(asked, expected, strict=True):
            num += await check_routed(router, served, case, whole, step)
        continued = router.count("pd_router_continuations_total", outcome="continued")
        assert len(asked) <= continued <= num, "the first place of each case is one of every node"
        if step <= 7:
            assert continued > num / 2
            assert min(nodes["d0"].num_continued, nodes["d1"].num_continued) > 0, "from either D to the other"
        assert {one.work for one in nodes["p"].engine.requests} == {Work.PREFILL}
        accepted = {name for name, node in nodes.items() if node.num_accepted}
        assert accepted == drafting - {"p"}, "P drafts nothing that it hands over"
