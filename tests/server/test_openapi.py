"""The OpenAPI document says what the node takes and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from pd_cluster.errors import InvalidRequest
from pd_cluster.server.app import create_app
from pd_cluster.server.bodies.schema import ChatBody, CompletionBody, decode_body
from pd_cluster.server.routes.openapi import openapi_document
from pd_cluster.server.shapes.completions import prompts_of
from pd_cluster.server.tools.output_parser import load_parser
from pd_connectors.protocol.ticket import sign
from tests.server.fake_engine import FakeEngine, says
from tests.server.live_server import KEY, make_state, running
from tests.server.test_bad_requests import CHAT, COMPLETIONS, HI
from tests.server.test_output_parser import PARSER

DOCUMENT = openapi_document()


def validator(path: str, *, answer: str = "", method: str = "post") -> Draft202012Validator:
    """Of the body of `path`, or of its answer with this status."""
    operation = DOCUMENT["paths"][path][method]
    described = operation["responses"][answer] if answer else operation["requestBody"]
    schema = described["content"]["application/json"]["schema"]
    return Draft202012Validator(schema | {"components": DOCUMENT["components"]})


@pytest.mark.long
def test_every_route_is_described() -> None:
    state = make_state(FakeEngine(says([5])))
    routes: Any = create_app(state).routes
    state.tokenizer.close()
    served = {(one.path_format, method.lower()) for one in routes for method in one.methods - {"HEAD"}}
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.long
@pytest.mark.anyio
async def test_real_requests_and_answers_are_valid() -> None:
    async with running(FakeEngine(says([5, 6]))) as node:
        node.state.output_parser = load_parser(PARSER)
        ticket = sign(KEY, FakeEngine(says([5])).make_ticket([1]))
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/v1/chat/completions", {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 2, "seed": 1.0}),
            ("/v1/chat/completions", {"messages": HI, "logit_bias": {"5": 1}, "stop": "x", "user": "me"}),
            ("/v1/completions", {"prompt": ["a", "b"], "logprobs": 1, "stop": ["x"], "stop_token_ids": [7]}),
            ("/v1/completions", {"prompt": [[5], [6]], "max_tokens": None, "kv_transfer_params": {"offer": "x"}}),
            ("/tokenize", {"messages": HI, "chat_template_kwargs": {"x": 1}}),
            ("/detokenize", {"tokens": [5]}),
            ("/pd/release", {"ticket": ticket}),
        ]
        for path, body in requests:
            validator(path).validate(body)
            async with node.session.post(node.url + path, json=body) as response:
                assert response.status == 200
                validator(path, answer="200").validate(await response.json())
        for path in ("/v1/models", "/v1/models/{name}", "/kv", "/health"):
            async with node.session.get(node.url + path.format(name="demo")) as response:
                validator(path, answer="200", method="get").validate(await response.json())
        async with node.session.post(f"{node.url}/v1/completions", json={}) as response:
            validator("/v1/completions", answer="default").validate(await response.json())
        async with node.session.get(f"{node.url}/openapi.json") as response:
            assert await response.json() == DOCUMENT


def test_values_of_the_wrong_type_are_invalid() -> None:
    """As the decoder has it: it checks types, and what it lets pass may still be out of range."""
    chat = ("/v1/chat/completions", {"messages": HI}, CHAT)
    completions = ("/v1/completions", {"prompt": "a"}, COMPLETIONS)
    for path, base, wrongs in (chat, completions):
        num_refused = 0
        for wrong, _ in wrongs:
            raw = json.dumps(base | wrong).encode()
            try:
                body, _ = decode_body(raw, ChatBody if "messages" in base else CompletionBody)
                if isinstance(body, CompletionBody):
                    prompts_of(body, 3072, 4096)
            except InvalidRequest as error:
                if error.code == "invalid_type":
                    num_refused += 1
                    assert not validator(path).is_valid(base | wrong), wrong
        assert num_refused > 2, path
