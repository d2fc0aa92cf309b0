"""An endpoint picker's offer comes in the header `x-pd-offer`: D-first, whatever the body says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.fake_engine import decodes
from tests.server.live_server import Node, running
from tests.server.test_decode_leg import TEXT, decode_node, engine_of_p, fallbacks, make_offer

pytestmark = pytest.mark.anyio


async def ask(node: Node, path: str, body: dict[str, Any], offer: str) -> tuple[int, str, dict[str, Any]]:
    headers = {"x-pd-offer": offer}
    async with node.session.post(f"{node.url}{path}", json=body, headers=headers) as response:
        return response.status, response.headers["x-pd-prefill"], await response.json()


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": TEXT, "kv_transfer_params": {"do_remote_decode": True}}),
        ("/v1/completions", {"prompt": TEXT, "kv_transfer_params": {"do_remote_prefill": True, "ticket": "forged"}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/messages", {"model": "", "messages": [{"role": "user", "content": TEXT}]}),
    ],
)
async def test_the_offered_node_is_asked(path: str, body: dict[str, Any]) -> None:
    """Nothing is left of a client's own kv_transfer_params, which a picker removes only from bodies that it reads."""
    async with running(engine_of_p(), node_id="p") as p, decode_node(decodes([5, 6, 7])) as d:
        status, prefilled_by, answer = await ask(d, path, {"max_tokens": 3, **body}, make_offer(p.url))
        assert (status, prefilled_by, len(p.engine.requests)) == (200, "engine-of-p", 1)
        assert "kv_transfer_params" not in answer
        assert d.metric('pd_handoffs_total{prefill="remote"}') == 1


@pytest.mark.parametrize(
    ("offer", "reason"),
    [
        (make_offer("http://127.0.0.1:9", key=bytes(32)), "offer_bad_signature"),
        (make_offer("http://127.0.0.1:9", expires_at_s=1.0), "offer_expired"),
        ("x", "offer_malformed"),
    ],
)
async def test_an_offer_that_cannot_be_trusted_is_counted(offer: str, reason: str) -> None:
    async with decode_node(decodes([5, 6, 7])) as d:
        status, prefilled_by, _ = await ask(d, "/v1/completions", {"prompt": TEXT, "max_tokens": 3}, offer)
        assert (status, prefilled_by) == (200, "d")
        assert fallbacks(d, reason) == 1
