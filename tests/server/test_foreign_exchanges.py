"""What foreign routers were seen to send to our nodes, sent again: the nodes answer as they did, and KV is moved.

The engines are scripted. The routers themselves run in the slow test `tests/integration/test_foreign_routers.py`.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.messages import FinishReason, Work
from pd_connectors.protocol.ticket import Ticket, verify
from tests.server.cut_nodes import tool_state
from tests.server.fake_engine import FakeEngine, Line, says
from tests.server.foreign_exchanges import OF_PREFILL, PARAMS, ROUTERS, Exchange, load, shape
from tests.server.live_server import KEY, Node, running
from tests.server.sse import parse_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

pytestmark = pytest.mark.anyio

EXCHANGES = [(router, exchange) for router in ROUTERS for exchange in load(router)]
OUTPUT = [5, 6, 7]


async def one_by_one(line: Line) -> None:
    """Tokens as D's engine sends them on KV from elsewhere, in a chunk each."""
    n = line.request.sampling.n
    for place, token_id in enumerate(OUTPUT, 1):
        for index in range(n):
            is_last = place == len(OUTPUT)
            line.tokens(
                [token_id], index=index, finish=FinishReason.LENGTH if is_last else None,
                finished=is_last and index == n - 1, num_external=len(line.request.prompt_token_ids),
            )  # fmt: skip
        await line.taken()


@contextlib.asynccontextmanager
async def both() -> AsyncIterator[tuple[Node, Node]]:
    """P and D, with the reasoning parser that nodes of the demo model have."""
    parser = tool_state(FakeEngine(one_by_one), "node", "demo_model").output_parser
    p_engine, d_engine = FakeEngine(says(OUTPUT[:1]), engine_id="p"), FakeEngine(one_by_one, engine_id="d")
    async with (
        running(p_engine, node_id="p", model_name="demo_model") as p,
        running(d_engine, node_id="d", model_name="demo_model") as d,
    ):
        p.state.output_parser = d.state.output_parser = parser
        yield p, d


@pytest.mark.long_cases
@pytest.mark.parametrize(("router", "exchange"), EXCHANGES, ids=lambda value: value if isinstance(value, str) else "")
async def test_the_nodes_answer_as_they_did(router: str, exchange: Exchange) -> None:
    to_p, to_d = exchange["legs"]
    async with both() as (p, d):
        by_p, _ = await replayed(p, to_p, to_p["body"])
        given, params = by_p[PARAMS], to_d["body"][PARAMS]
        params = {name: given[name] if value == OF_PREFILL else value for name, value in params.items()}
        _, headers = await replayed(d, to_d, to_d["body"] | {PARAMS: params})
        [on_p], [on_d] = p.engine.requests, d.engine.requests
    assert (on_p.work, on_p.hold_lease, on_d.work) == (Work.PREFILL, True, Work.TAKE_OVER)
    assert on_d.ticket == verify(KEY, given["ticket"], Ticket, time.time())
    assert on_d.prompt_token_ids == on_p.prompt_token_ids
    assert on_d.sampling.first_token_digest == on_p.sampling.first_token_digest, "D would draw it again"
    assert (headers["x-pd-prefill"], headers["x-pd-decode"]) == ("p", "d")
    assert d.metric("pd_external_tokens_total") == len(on_p.prompt_token_ids)


async def replayed(node: Node, leg: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[Any, Mapping[str, str]]:
    """The node's answer to the leg, which has the form of the recorded one."""
    async with node.session.post(node.url + leg["path"], json=body, headers=leg["headers"]) as response:
        text = await response.text()
        assert (response.status, response.content_type) == (leg["status"], leg["type"]), text
    is_stream = leg["type"] == "text/event-stream"
    answer = [data for _, data in parse_events(text)] if is_stream else await response.json()
    assert shape(answer) == shape(leg["answer"])
    return answer, response.headers
