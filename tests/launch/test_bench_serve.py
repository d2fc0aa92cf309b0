"""The load client against a small server that streams like ours, and the command around it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pd_cluster.bench.load import Target, run_load
from pd_cluster.bench.workload import Arrival
from pd_cluster.launch.cli import main
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pd_cluster.bench.statistics import RequestRecord


class FakeServer:
    """Answers every streamed completion with `max_tokens` words. Special prompts misbehave, by their first id."""

    REFUSE, BREAK, ERROR, COALESCE, RUNS, ODD = 9001, 9002, 9003, 9004, 9005, 9006

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self.refuse_all = False
        self.roles = ["prefill", "decode"]
        self.timings: dict[str, float] = {}
        self.more_headers: dict[str, str] = {}
        self.max_model_len: int | None = None
        self.ignores_ids = False
        self.short_of = 0  # prompts with more ids than this get one token less than they ask for; 0: none does

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/nodes", self._nodes)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake-model", "max_model_len": self.max_model_len}]})

    async def _nodes(self, request: web.Request) -> web.Response:
        return web.json_response({"nodes": [{"role": role} for role in self.roles]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": [5, 6, 7, 8, 8, 5]})

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": " ".join(map(str, (await request.json())["tokens"]))})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        first = body["prompt"][0]
        if self.refuse_all or first == self.REFUSE:
            return web.json_response({"error": {"message": "the queue is full"}}, status=503)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "x-pd-route": "p-first; reason=default", **self.more_headers}
        )
        await response.prepare(request)
        events: list[dict[str, Any]] = [{"choices": [{"text": f"w{index} "}]} for index in range(body["max_tokens"])]
        if body.get("return_token_ids") and not self.ignores_ids:
            events = [{"choices": [{"text": f"{index}", "token_ids": [index]}]} for index in range(body["max_tokens"])]
        if first == self.COALESCE:
            events = [{"choices": [{"text": "everything"}]}]
        elif first == self.BREAK:
            events = events[:1]
        elif first == self.ERROR:
            events = [events[0], {"error": {"message": "the decode node died"}}]
        elif first == self.RUNS:  # of one, three and one tokens; the text of one more comes with the last
            events = [{"choices": [{"text": text}]} for text in ("a", "bcd", "", "ef")]
        if body["stream_options"].get("continuous_usage_stats"):
            counts = (1, 4, 5, 6) if first == self.RUNS else range(1, len(events) + 1)
            events = [event | {"usage": {"completion_tokens": num}} for event, num in zip(events, counts, strict=True)]
        if first == self.ODD:
            await response.write(b'data: {"choices": [{\n\n')
            return response
        if first in (self.BREAK, self.ERROR):
            await response.write(_frames(events))
            return response
        is_short = 0 < self.short_of < len(body["prompt"])
        usage = {"completion_tokens": body["max_tokens"] - is_short, "prompt_tokens_details": {"cached_tokens": 2}}
        if self.timings and body["stream_options"]["include_timings"]:
            usage["timings"] = self.timings
        whole = _frames([*events, {"choices": [], "usage": usage}]) + b"data: [DONE]\n\n"
        for at in range(0, len(whole), 7):  # frames arrive in pieces
            await response.write(whole[at : at + 7])
        return response

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if "tools" in body:
            return self._call_tool(body)
        shown = body["messages"][0]["content"].split("```")[1]
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": delta}]}
            for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "So."}, {"content": shown}, {})
        ]
        usage = {"prompt_tokens": 31, "completion_tokens": 17, "prompt_tokens_details": {"cached_tokens": 0}}
        whole = _frames([*events, {"choices": [], "usage": usage}]) + b"data: [DONE]\n\n"
        return web.Response(body=whole, content_type="text/event-stream")

    def _call_tool(self, body: dict[str, Any]) -> web.Response:
        """The first turn gets a call, in two pieces, later ones a text."""
        is_first = len(body["messages"]) == 2
        call = {"index": 0, "id": "c1", "function": {"name": "read_file", "arguments": '{"path":'}}
        rest = {"index": 0, "function": {"arguments": '"a"}'}}
        deltas: list[dict[str, Any]] = (
            [{"tool_calls": [call]}, {"tool_calls": [rest]}] if is_first else [{"content": "ab"}]
        )
        usage = {
            "prompt_tokens": 10 * len(body["messages"]), "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 0 if is_first else 21},
        }  # fmt: skip
        events: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
        whole = _frames([*events, {"choices": [], "usage": usage}]) + b"data: [DONE]\n\n"
        return web.Response(body=whole, content_type="text/event-stream")


def _frames(events: list[dict[str, Any]]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


@contextmanager
def serving() -> Iterator[FakeServer]:
    """The fake on a free port, in a thread with its own loop."""
    server, started, loop = FakeServer(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(server.app(), shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = "http://{}:{}".format(*runner.addresses[0][:2])
        started.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(HANG_S)
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(HANG_S)
        loop.close()


def load(server: FakeServer, *first_ids: int, num_output: int = 4, counts_tokens: bool = False) -> list[RequestRecord]:
    requests = [(Arrival(0.0, 3, num_output), [first, 1, 2]) for first in first_ids]
    target = Target(server.url, "fake-model", route="p-first", api_key="k", counts_tokens=counts_tokens)
    return asyncio.run(run_load(target, requests))


def test_complete_answers() -> None:
    with serving() as server:
        records = load(server, 1, 1, 1)
    assert [record.error for record in records] == ["", "", ""]
    assert [record.index for record in records] == [0, 1, 2]
    for record in records:
        assert record.ok
        assert (record.num_output, len(record.chunk_times_s), record.num_cached) == (4, 4, 2)
        assert record.route == "p-first; reason=default"
        assert record.scheduled_s <= record.sent_s < record.chunk_times_s[0] <= record.chunk_times_s[-1] <= record.end_s
    assert server.bodies[0]["max_tokens"] == 4
    assert server.bodies[0]["ignore_eos"] is True
    assert server.headers[0]["x-pd-route"] == "p-first"
    assert server.headers[0]["Authorization"] == "Bearer k"


def test_an_odd_answer_is_a_failure_of_its_request_only() -> None:
    with serving() as server:
        odd, whole = load(server, FakeServer.ODD, 1)
        server.more_headers = {"x-pd-predicted-ttft": "n/a"}
        (unread,) = load(server, 1)
    assert odd.error.startswith("JSONDecodeError: ")
    assert whole.ok
    assert unread.error.startswith("ValueError: ")


def test_the_server_counts_the_tokens_of_each_event() -> None:
    with serving() as server:
        runs, single = load(server, FakeServer.RUNS, 1, num_output=6, counts_tokens=True)
        (uncounted,) = load(server, FakeServer.RUNS, num_output=6)
    assert (runs.tokens_so_far, len(runs.gaps_s), len(runs.itl_s), runs.num_output) == ([1, 4, 6], 2, 5, 6)
    assert sum(runs.itl_s) == pytest.approx(sum(runs.gaps_s))
    assert (single.tokens_so_far, single.itl_s) == ([1, 2, 3, 4, 5, 6], single.gaps_s)
    assert (uncounted.tokens_so_far, uncounted.itl_s) == ([], uncounted.gaps_s)
    asked = [body["stream_options"].get("continuous_usage_stats") for body in server.bodies]
    assert asked == [True, True, None], "a client that does not ask puts no work on the server"


def test_tokens_are_counted_by_the_server() -> None:
    with serving() as server:
        (record,) = load(server, FakeServer.COALESCE)
    assert (record.num_output, len(record.chunk_times_s)) == (4, 1)


@pytest.mark.parametrize(
    ("first_id", "error"),
    [
        (FakeServer.REFUSE, "HTTP 503: the queue is full"),
        (FakeServer.BREAK, "the stream broke off"),
        (FakeServer.ERROR, "error in the stream: the decode node died"),
    ],
)
def test_failures_are_told_apart(first_id: int, error: str) -> None:
    with serving() as server:
        bad, good = load(server, first_id, 1)
    assert (bad.error, bad.ok, good.ok) == (error, False, True)


def test_a_server_that_is_not_there() -> None:
    with serving() as server:
        url = server.url
    target = Target(url, "m")
    (record,) = asyncio.run(run_load(target, [(Arrival(0.0, 1, 1), [1])]))
    assert "ClientConnectorError" in record.error


def test_arrival_times_are_kept() -> None:
    gaps = [0.0, 0.05, 0.1]
    with serving() as server:
        requests = [(Arrival(at_s, 1, 1), [1]) for at_s in gaps]
        records = asyncio.run(run_load(Target(server.url, "m"), requests))
    assert all(record.sent_s >= record.scheduled_s for record in records)
    assert [record.scheduled_s for record in records] == gaps


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "deep" / "out.json", tmp_path / "plot.png"
    with serving() as server:
        arguments = (
            f"bench serve --url {server.url}/ --rate inf --num-requests 8 --input-len 4:9 --output-len 3 --seed 3"
        )
        arguments += f" --goodput ttft:20000 tpot:20000 --json {out} --plot {plot}"
        assert main(arguments.split()) == 0
    shown = capsys.readouterr().out
    assert "8 of 8 requests" in shown
    assert "100.0% of all within ttft 20000 ms, tpot 20000 ms" in shown
    record = json.loads(out.read_text())
    assert record["config"]["model"] == "fake-model"
    assert "api_key" not in record["config"]
    assert record["summary"]["num_ok"] == 8
    assert record["summary"]["output_tokens"] == 24
    assert len(record["requests"]) == 8
    assert record["environment"]["num_cores"] >= 1
    prompts = [body["prompt"] for body in server.bodies]
    assert len(prompts) == 8 + 2, "two to warm up"
    assert {token for prompt in prompts for token in prompt} <= {5, 6, 7, 8}, "ids that /tokenize named"
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_the_command_fails_when_requests_fail(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        server.refuse_all = True
        arguments = f"bench serve --url {server.url} --rate inf --num-requests 2 --output-len 3 --warmup 0"
        assert main(arguments.split()) == 1
    assert "2 failed: HTTP 503: the queue is full" in capsys.readouterr().out


@pytest.mark.parametrize("predicts", [False, True])
def test_edits_are_chats_about_a_file(predicts: bool, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with serving() as server:
        arguments = (
            f"bench serve --url {server.url} --rate inf --num-requests 3 --warmup 1 --workload edits --json {out}"
        )
        assert main([*arguments.split(), *["--prediction"] * predicts]) == 0
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 4
    for body in server.bodies:
        assert (body["ignore_eos"], body["max_tokens"], "prompt" in body) == (False, 128, False)
        assert ("prediction" in body) is predicts
        if predicts:
            assert body["messages"][0]["content"].endswith(body["prediction"]["content"])
    requests = json.loads(out.read_text())["requests"]
    assert {(one["num_input"], one["num_output"], len(one["chunk_times_s"])) for one in requests} == {(31, 17, 2)}


def test_a_prediction_needs_edits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--prediction"]) == 2
    assert "--prediction needs --workload edits" in capsys.readouterr().err


def test_the_command_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        url = server.url
    assert main(["bench", "serve", "--url", url]) == 2
    assert f"{url}/v1/models does not answer as expected" in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_any_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with serving() as server:
        status = main(["bench", "serve", "--url", server.url, f"--plot={tmp_path / 'plot.png'}"])
    assert status == 2
    assert "pip install -e '.[bench]'" in capsys.readouterr().err
    assert server.bodies == []
