"""The tables of the API page are those of the routes, bodies and metrics."""

from __future__ import annotations

from typing import Any

import pytest

from docs.generate.api import READ, errors
from docs.generate.metrics import ENGINE, node_registry
from pd_cluster.server.bodies.fields import IGNORED_HEADER
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody
from tests.deploy import metric_names
from tests.docs.pages import ROOT
from tests.server.conftest import patient_grammar_checks
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import running

__all__ = ["patient_grammar_checks"]  # a fixture for every test here
BODIES = {"/v1/chat/completions": ChatBody, "/v1/completions": CompletionBody}
# a node with --priorities, and a chat template that knows of reasoning, read them
NOT_BY_DEFAULT = {name: name for name in ("priority", "reasoning_effort", "enable_thinking")}
NOT_BY_DEFAULT |= {name: name for name in ("length_penalty", "early_stopping")}  # without use_beam_search
NEEDS: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": []},
    "stream_options": {"stream": True},
}


def test_the_field_table_is_that_of_the_bodies() -> None:
    assert set(READ) == set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_every_field_of_the_table_is_read(path: str) -> None:
    pytest.importorskip("llguidance")  # for the fields of grammars
    kind = BODIES[path]
    plain: dict[str, Any] = {"messages": READ["messages"].example} if kind is ChatBody else {"prompt": "hi"}
    async with running(FakeEngine(says([5, 6]))) as node:
        for name in kind.__struct_fields__:
            example = True if kind is ChatBody and name == "logprobs" else READ[name].example
            body = plain | NEEDS.get(name, {}) | {name: example}
            async with node.session.post(f"{node.url}{path}", json=body) as response:
                assert response.status == 200, (name, await response.text())
                assert response.headers.get(IGNORED_HEADER) == NOT_BY_DEFAULT.get(name), name
                await response.read()


def test_every_error_has_a_code_and_a_status() -> None:
    kinds = list(errors())
    assert len(kinds) > 12
    assert all(400 <= kind.status < 600 and kind.code for kind in kinds)


def test_the_engine_s_metrics_are_in_the_table() -> None:
    """Whatever the engine and the connectors write, by their source; and nothing that they do not."""
    names = metric_names.exported() | {f"pd_{name}" for name in ENGINE}
    own = {name.removeprefix("pd_") for name in names if not name.startswith("pd_router_")}
    kept = {f"{family.name}_total" if family.type == "counter" else family.name for family in node_registry().collect()}
    samples = {f"{name}{part}" for name in kept for part in ("", "_bucket", "_sum", "_count")}
    assert {name for name in own if f"pd_{name}" not in samples} - {"_total"} == set(ENGINE)
    paths = [path for folder in ("pd_cluster", "connectors") for path in (ROOT / folder).rglob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    words = {name: name.removesuffix("_total") for name in ENGINE}
    assert [
        name for name, word in words.items() if word not in source and word.removeprefix("pool_") not in source
    ] == []
