"""What a decode node finds out about a prefill node that broke a connection."""

from __future__ import annotations

import aiohttp
import pytest

from pd_cluster.server.requests.prefill_client import _lives
from tests.few_files import no_files
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

pytestmark = pytest.mark.anyio


async def test_a_node_without_files_does_not_take_another_for_dead() -> None:
    async with running(FakeEngine(says([5]))) as node:
        with no_files():
            assert await _lives(node.session, node.url)
        assert await _lives(node.session, node.url)
        url = node.url
    async with aiohttp.ClientSession() as session:
        assert not await _lives(session, url)
