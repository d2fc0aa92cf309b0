"""D's leg: which ticket is trusted, which node is asked, when D prefills locally, and what the client is told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fastapi import FastAPI
from starlette.requests import Request  # noqa: TC002 (FastAPI reads the annotation)
from starlette.responses import JSONResponse, Response

from pd_cluster.config import HandoffConfig
from pd_cluster.protocol.messages import Abort, NeedsPrefill, PrefillLocally, TicketOpened, UseTicket, Work
from pd_cluster.protocol.sampling_params import BeamParams, SamplingParams
from pd_cluster.server.grammar.grammar_checks import GrammarChecks
from pd_connectors.protocol.ticket import Offer, sign
from tests.connectors import version_one
from tests.server.fake_engine import FAR, WAIT_S, FakeEngine, Line, decodes, says
from tests.server.live_server import KEY, Node, running, serving
from tests.server.sse import post_events

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pd_cluster.server.grammar.check_turns import Check

pytestmark = pytest.mark.anyio

TEXT = "Hello there."


def make_offer(*urls: str, key: bytes = KEY, expires_at_s: float = FAR) -> str:
    return sign(key, Offer(urls, expires_at_s))


def engine_of_p() -> FakeEngine:
    return FakeEngine(says([5]), engine_id="engine-of-p")


async def ids_of(node: Node, text: str = TEXT) -> list[int]:
    return await node.state.tokenizer.encode(text, max_tokens=4096)


async def complete(node: Node, params: dict[str, Any], **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = {"prompt": TEXT, "max_tokens": 3, "kv_transfer_params": {"do_remote_prefill": True} | params} | more
    async with node.session.post(f"{node.url}/v1/completions", json=body) as response:
        return response.status, await response.json(), dict(response.headers)


def fallbacks(node: Node, reason: str) -> float:
    return node.metric(f'pd_handoff_fallbacks_total{{reason="{reason}"}}')


@contextlib.asynccontextmanager
async def decode_node(script: Any = None, **settings: Any) -> AsyncIterator[Node]:
    """A D with these handoff settings; its engine takes tickets from `engine_of_p`."""
    engine = FakeEngine(script or decodes([5, 6, 7]), engine_id="engine-of-d")
    async with running(engine, node_id="d", handoff=HandoffConfig(**settings)) as node:
        yield node


# P-first: the request brings a ticket


@pytest.mark.long
async def test_ticket_and_ids_of_p_are_taken_over_without_tokenizing() -> None:
    async with decode_node() as node:
        ids = [*await ids_of(node), 99]  # the ids of P are used, not those of the text
        ticket = engine_of_p().make_ticket(ids)
        params = {"ticket": sign(KEY, ticket), "prompt_token_ids": ids, "remote_host": "elsewhere", "remote_port": 1}
        status, answer, headers = await complete(node, params)
        request = node.engine.requests[0]
    assert status == 200
    assert (request.work, request.ticket, request.prompt_token_ids) == (Work.TAKE_OVER, ticket, ids)
    assert (headers["x-pd-prefill"], headers["x-pd-decode"]) == ("engine-of-p", "d")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (len(ids), 3)
    assert node.metric('pd_handoffs_total{prefill="remote"}') == 1
    assert node.metric("pd_external_tokens_total") == len(ids)


async def test_a_ticket_of_another_sampling_is_taken_over_for_its_kv() -> None:
    async with decode_node() as node:
        ticket = engine_of_p().make_ticket(await ids_of(node), num_samples=2)
        status, _, _ = await complete(node, {"ticket": sign(KEY, ticket)}, n=1, temperature=0)
        assert (status, node.engine.requests[0].ticket) == (200, ticket)


async def test_ticket_without_ids_is_checked_against_the_text() -> None:
    async with decode_node() as node:
        ticket = engine_of_p().make_ticket(await ids_of(node))
        status, _, _ = await complete(node, {"ticket": sign(KEY, ticket)})
        assert (status, node.engine.requests[0].ticket) == (200, ticket)


async def test_salt_is_part_of_what_the_ticket_promises() -> None:
    async with decode_node() as node:
        ticket = engine_of_p().make_ticket(await ids_of(node), "tenant")
        await complete(node, {"ticket": sign(KEY, ticket)}, cache_salt="tenant")
        await complete(node, {"ticket": sign(KEY, ticket)}, cache_salt="other")
        works = [request.work for request in node.engine.requests]
    assert works == [Work.TAKE_OVER, Work.GENERATE]


@pytest.mark.long_cases
@pytest.mark.parametrize("policy", ["any", "local", "remote", "fail"])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("key", "ticket_bad_signature"),
        ("expired", "ticket_expired"),
        ("garbage", "ticket_malformed"),
        ("version", "ticket_protocol_mismatch"),
        ("prompt", "ticket_prompt_mismatch"),
        ("ids", "ticket_prompt_mismatch"),
        ("none", "no_ticket"),
    ],
)
async def test_what_cannot_be_trusted_is_prefilled_here_or_refused(fault: str, reason: str, policy: str) -> None:
    async with decode_node(on_load_failure=policy) as node:
        p, ids = engine_of_p(), await ids_of(node)
        good = sign(KEY, p.make_ticket(ids))
        faulty: dict[str, dict[str, Any]] = {
            "key": {"ticket": sign(b"x" * 32, p.make_ticket(ids))},
            "expired": {"ticket": sign(KEY, p.make_ticket(ids, expires_at_s=time.time() - 1))},
            "garbage": {"ticket": "rubbish"},
            "version": {"ticket": version_one.sign(KEY, version_one.TICKET)},
            "prompt": {"ticket": sign(KEY, p.make_ticket([1, 2, 3]))},
            "ids": {"ticket": good, "prompt_token_ids": [*ids[:-1], 8]},
            "none": {},
        }
        status, answer, headers = await complete(node, faulty[fault])
        assert fallbacks(node, reason) == 1
        if policy in ("remote", "fail"):
            assert (status, answer["error"]["code"]) == (502, "prefill_unavailable")
            assert node.engine.requests == []
        else:
            assert (status, headers["x-pd-prefill"]) == (200, "d")
            request = node.engine.requests[0]
            assert (request.work, request.ticket, request.prompt_token_ids) == (Work.GENERATE, None, ids)


async def test_implausible_ids_are_not_used() -> None:
    async with decode_node() as node:
        ids = await ids_of(node)
        ticket = sign(KEY, engine_of_p().make_ticket(ids))
        for wrong in ([-1], [2**40], []):
            status, _, _ = await complete(node, {"ticket": ticket, "prompt_token_ids": wrong})
            assert status == 200
        assert [request.work for request in node.engine.requests] == [Work.TAKE_OVER] * 3
        assert [request.prompt_token_ids for request in node.engine.requests] == [ids] * 3


# D-first: the request brings an offer


EVERY_SAMPLING_FIELD: dict[str, Any] = {
    "max_tokens": 5, "n": 2, "temperature": 0.4, "top_p": 0.9, "top_k": 7, "min_p": 0.05, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": -0.3, "seed": -(2**63), "logit_bias": {"9": 1.5}, "min_tokens": 3,
    "stop_token_ids": [8, 9], "ignore_eos": True, "logprobs": 2, "logits_args": {"ban": 7},
    "guided_regex": "a", "allowed_token_ids": [5, 6], "bad_words": ["no"],
}  # fmt: skip


@pytest.mark.long
async def test_d_asks_the_offered_node_with_its_own_sampling_parameters() -> None:
    """Each field differs from its default, so this fails for a field that does not reach P, and for a new one."""
    pytest.importorskip("llguidance")  # one field is a grammar
    async with running(engine_of_p(), node_id="p") as p, decode_node(decodes([5, 6, 7], n=2)) as d:
        for node in (p, d):
            model = replace(node.state.config.model, logits_stages=("tests.ban_token:BanToken",))
            node.state.config = replace(node.state.config, model=model)
        more = EVERY_SAMPLING_FIELD | {"cache_salt": "s"}
        status, answer, headers = await complete(d, {"offer": make_offer(p.url)}, **more)
        asked, request = p.engine.requests[0], d.engine.requests[0]
        use = d.engine.sent[0]
    assert status == 200
    defaults = SamplingParams(max_tokens=3)
    for name in {field.name for field in msgspec.structs.fields(SamplingParams)} - {"beams"}:  # they exclude others
        assert getattr(request.sampling, name) != getattr(defaults, name), name
    assert asked.sampling == msgspec.structs.replace(request.sampling, max_tokens=1)
    assert (request.work, request.ticket, request.min_remote_tokens) == (Work.TAKE_OVER, None, 64)
    assert (asked.work, asked.prompt_token_ids, asked.salt) == (Work.PREFILL, request.prompt_token_ids, "s")
    assert isinstance(use, UseTicket)
    assert use.ticket.lease.engine_id == "engine-of-p"
    assert 0 < use.load_deadline_s <= 30
    assert headers["x-pd-prefill"] == "engine-of-p"
    assert answer["usage"]["completion_tokens"] == 6


async def test_the_offered_node_checks_the_grammar_in_the_turn_of_the_same_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("llguidance")
    clients = []

    async def checked(checks: GrammarChecks, check: Check) -> dict[str, str]:
        clients.append(check[0])
        return {"grammar": "start: /a/"}

    monkeypatch.setattr(GrammarChecks, "_checked", checked)
    async with running(engine_of_p(), node_id="p") as p, decode_node(decodes([5, 6])) as d:
        body = {"prompt": TEXT, "max_tokens": 2, "guided_regex": "a"}
        for headers in ({"x-pd-client": "key:one"}, {}):
            more = {"kv_transfer_params": {"do_remote_prefill": True, "offer": make_offer(p.url)}}
            async with d.session.post(f"{d.url}/v1/completions", json=body | more, headers=headers) as answer:
                assert answer.status == 200
        assert clients == ["key:one", "key:one", "", ""]
        assert len(p.engine.requests) == 2


async def test_the_offered_node_is_told_of_beams() -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node(decodes([5, 6, 7], n=2)) as d:
        fields = {"use_beam_search": True, "n": 2, "best_of": 3, "length_penalty": 0.5, "early_stopping": True}
        await complete(d, {"offer": make_offer(p.url)}, **fields)
        sampling = d.engine.requests[0].sampling
        assert sampling.beams == BeamParams(width=3, length_penalty=0.5, early_stopping=True)
        assert p.engine.requests[0].sampling == msgspec.structs.replace(sampling, max_tokens=1)


async def test_engine_that_needs_no_prefill_asks_no_node() -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node(says([5, 6])) as d:
        status, _, headers = await complete(d, {"offer": make_offer(p.url)})
        assert (status, headers["x-pd-prefill"], p.engine.requests) == (200, "d", [])
        assert d.metric('pd_handoffs_total{prefill="local"}') == 1


async def test_dead_node_of_an_offer_is_passed_over() -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node() as d:
        status, _, headers = await complete(d, {"offer": make_offer("http://127.0.0.1:9", p.url)})
        assert (status, headers["x-pd-prefill"]) == (200, "engine-of-p")
        assert fallbacks(d, "peer_unreachable") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "num_asked", "status"), [("any", 2, 200), ("remote", 2, 502), ("local", 1, 200), ("fail", 1, 502)]
)
async def test_policy_decides_what_follows_a_node_that_refuses(policy: str, num_asked: int, status: int) -> None:
    asked: list[str] = []
    app = FastAPI()

    @app.post("/{name}/v1/completions")
    async def refuse(name: str) -> Response:
        asked.append(name)
        return JSONResponse({"error": {"message": "full"}}, 503)

    async with serving(app) as url, decode_node(on_load_failure=policy) as d:
        got, _, headers = await complete(d, {"offer": make_offer(f"{url}/a", f"{url}/b/")})
        assert got == status
        assert asked == ["a", "b"][:num_asked]
        assert fallbacks(d, "peer_refused") == num_asked
        if status == 200:
            assert headers["x-pd-prefill"] == "d"
            assert isinstance(d.engine.sent[0], PrefillLocally)
        else:
            assert isinstance(d.engine.sent[0], Abort)


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("no events", "peer_bad_answer"),
        ("another event", "peer_refused"),
        ("no ticket", "peer_bad_answer"),
        ("foreign ticket", "peer_bad_answer"),
        ("other version", "peer_protocol_mismatch"),
        ("other weights", "peer_fingerprint_mismatch"),
        ("other prompt", "peer_bad_answer"),
    ],
)
async def test_answers_that_are_no_ticket(answer: str, reason: str) -> None:
    p = engine_of_p()
    app = FastAPI()

    @app.post("/v1/completions")
    async def respond(request: Request) -> Response:
        ids = (await request.json())["prompt"]
        text = {
            "no events": "",
            "another event": 'event: error\ndata: {"status": 503}\n\n',
            "no ticket": 'event: ticket\ndata: {"kv_transfer_params": {}}\n\n',
            "foreign ticket": ticket_event(sign(b"y" * 32, p.make_ticket(ids))),
            "other version": ticket_event(version_one.sign(KEY, version_one.TICKET)),
            "other weights": ticket_event(sign(KEY, msgspec.structs.replace(p.make_ticket(ids), fingerprint="other"))),
            "other prompt": ticket_event(sign(KEY, p.make_ticket([1]))),
        }[answer]
        return Response(text, media_type="text/event-stream")

    async with serving(app) as url, decode_node() as d:
        status, _, headers = await complete(d, {"offer": make_offer(url, url)})
        assert (status, headers["x-pd-prefill"]) == (200, "d")
        # During an upgrade the other nodes would answer with such tickets too
        assert fallbacks(d, reason) == (1 if answer == "other version" else 2)


def ticket_event(ticket: str) -> str:
    return f'event: ticket\ndata: {{"kv_transfer_params": {{"ticket": "{ticket}"}}}}\n\n'


async def test_silent_node_costs_only_the_deadline() -> None:
    app = FastAPI()
    asked = asyncio.Event()

    @app.post("/v1/completions")
    async def hang(request: Request) -> Response:
        asked.set()
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return Response()

    async with serving(app) as url, decode_node(load_deadline_s=0.2) as d:
        status, _, headers = await complete(d, {"offer": make_offer(url)})
        assert (status, headers["x-pd-prefill"], asked.is_set()) == (200, "d", True)
        assert fallbacks(d, "peer_timeout") == 1


@pytest.mark.parametrize(
    ("key", "expires_at_s", "reason"),
    [(b"z" * 32, FAR, "offer_bad_signature"), (KEY, 1.0, "offer_expired")],
    ids=["other key", "expired"],
)
async def test_no_node_of_an_untrusted_offer_is_contacted(key: bytes, expires_at_s: float, reason: str) -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node() as d:
        status, _, _ = await complete(d, {"offer": make_offer(p.url, key=key, expires_at_s=expires_at_s)})
        assert (status, p.engine.requests, fallbacks(d, reason)) == (200, [], 1)
        assert d.engine.requests[0].work is Work.GENERATE


async def test_failed_load_moves_on_to_the_offer_and_then_here() -> None:
    script = decodes([5, 6], failures=["lease_ended: p says so", "read_failed: read: it broke"])
    async with running(engine_of_p(), node_id="p") as p, decode_node(script) as d:
        ticket = engine_of_p().make_ticket(await ids_of(d))
        status, _, headers = await complete(d, {"ticket": sign(KEY, ticket), "offer": make_offer(p.url)})
        answers = d.engine.sent[:2]
    assert status == 200
    assert [type(answer) for answer in answers] == [UseTicket, PrefillLocally]
    assert headers["x-pd-prefill"] == "d"
    assert (fallbacks(d, "lease_ended"), fallbacks(d, "read_failed"), len(p.engine.requests)) == (1, 1, 1)


async def test_bad_ticket_with_a_good_offer_goes_to_the_offer() -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node() as d:
        status, _, headers = await complete(d, {"ticket": "rubbish", "offer": make_offer(p.url)})
        assert (status, headers["x-pd-prefill"]) == (200, "engine-of-p")
        assert fallbacks(d, "ticket_malformed") == 1


@pytest.mark.parametrize(("policy", "prefill"), [("any", "d"), ("remote", "engine-of-p")])
async def test_a_ticket_of_another_version_asks_the_offer_only_if_it_must(policy: str, prefill: str) -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node(on_load_failure=policy) as d:
        params = {"ticket": version_one.sign(KEY, version_one.TICKET), "offer": make_offer(p.url)}
        status, _, headers = await complete(d, params)
        assert (status, headers["x-pd-prefill"]) == (200, prefill)
        assert len(p.engine.requests) == (prefill != "d")
        assert fallbacks(d, "ticket_protocol_mismatch") == 1


async def test_several_prompts_ask_one_ticket_each() -> None:
    async with running(engine_of_p(), node_id="p") as p, decode_node() as d:
        params = {"offer": make_offer(p.url), "ticket": "for one prompt"}
        status, answer, headers = await complete(d, params, prompt=["Hello", " there"])
        assert (status, len(answer["choices"]), headers["x-pd-prefill"]) == (200, 2, "engine-of-p")
        assert [r.prompt_token_ids for r in p.engine.requests] == [r.prompt_token_ids for r in d.engine.requests]


async def test_leg_to_p_stays_open_until_the_client_leaves_then_p_aborts() -> None:
    async def p_script(line: Line) -> None:
        line.push(TicketOpened(line.request.request_id, line.ticket()))

    taken = asyncio.Event()

    async def d_script(line: Line) -> None:
        line.push(NeedsPrefill(line.request.request_id, 0))
        assert isinstance(await line.heard(), UseTicket)
        taken.set()

    p_engine = FakeEngine(p_script, engine_id="engine-of-p")
    async with running(p_engine, node_id="p") as p, decode_node(d_script) as d:
        post = asyncio.create_task(complete(d, {"offer": make_offer(p.url)}))
        async with asyncio.timeout(WAIT_S):
            await taken.wait()
            assert p.engine.aborts.empty()
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)
            assert (await d.engine.aborts.get()).request_id == d.engine.requests[0].request_id
            assert (await p.engine.aborts.get()).request_id == p.engine.requests[0].request_id


async def test_failure_after_the_first_token_ends_the_stream_with_an_error() -> None:
    async def script(line: Line) -> None:
        line.tokens([5])
        line.push(NeedsPrefill(line.request.request_id, 0, "peer_restarted"))
        assert isinstance(await line.heard(), Abort)

    async with decode_node(script, on_load_failure="fail") as d:
        ticket = sign(KEY, engine_of_p().make_ticket(await ids_of(d)))
        params = {"do_remote_prefill": True, "ticket": ticket}
        body = {"prompt": TEXT, "stream": True, "kv_transfer_params": params}
        events = await post_events(d.session, f"{d.url}/v1/completions", body)
    assert events[0][1]["choices"][0]["text"]
    assert events[-2][1]["error"]["code"] == "prefill_unavailable"
    assert fallbacks(d, "peer_restarted") == 1


async def test_a_prefill_node_that_sends_elsewhere_is_not_followed() -> None:
    followed: list[str] = []
    app = FastAPI()

    @app.post("/v1/completions")
    async def redirect() -> Response:
        return Response(status_code=307, headers={"location": "/elsewhere"})

    @app.post("/elsewhere")
    async def elsewhere(request: Request) -> Response:
        followed.append((await request.body()).decode())
        return JSONResponse({})

    async with serving(app) as p, decode_node() as node:
        status, _, headers = await complete(node, {"offer": make_offer(p)})
        assert (status, headers["x-pd-prefill"]) == (200, "d")
        assert fallbacks(node, "peer_refused") == 1
    assert followed == []
