"""`pd-cluster plan --check`: a running router over fake nodes beside a plan, and what cannot be compared."""

from __future__ import annotations

import asyncio
import json
import shlex
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from aiohttp import web

from pd_cluster.errors import StartupError
from pd_cluster.launch.cli import main
from pd_cluster.planning.plan_check import compare, growth, total, verdict_of, watch
from pd_http.node_report import REPORT_HEADER, NodeReport, encode_report
from pd_router.edge.worker_views import labelled
from tests.router import fake_nodes as fakes
from tests.router.fake_nodes import FakeNode, running
from tests.router.router_process import Router, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from tests.router.fake_nodes import Seen

pytestmark = pytest.mark.anyio
BODY = {"model": "demo", "prompt": "x" * 400, "max_tokens": 8}
SECONDS = 10.0
PLAN: dict[str, Any] = {
    "kind": "plan", "rate": 12.0, "load": {"prompt_tokens": 100.0, "answer_tokens": 8.0}, "handover_ms": 4.0,
    "settings": [{
        "name": "1P1D", "setting": [[1, 1, 0], [1, 1, 1]],
        "figures": {"attained": 1.0, "steps": {
            "prefill": [10, 2000, 0.1], "decode": [100, 800, 0.5],
        }},
    }],
}  # fmt: skip


async def decode(node: FakeNode, request: web.Request, seen: Seen) -> web.StreamResponse:
    report = encode_report(NodeReport("demo", 100, 25, 8, 0.05)).decode()
    return web.json_response({"choices": []}, headers={REPORT_HEADER: report})


def told(steps: float, step_tokens: float, step_s: float, answers: float, handover_s: float = 0.0) -> str:
    """Metrics of a node: counters alone."""
    values = {
        "engine_steps_total": steps, "engine_step_tokens_total": step_tokens, "engine_step_seconds_total": step_s,
        "generation_tokens_total": answers,
    }  # fmt: skip
    lines = [f"# TYPE pd_{name} counter\npd_{name} {value}" for name, value in values.items()]
    name = "pd_handover_step_seconds"
    lines.append(f'# TYPE {name} histogram\n{name}_count{{step="announce"}} {answers / 8}')
    lines += [f'{name}_sum{{step="{step}"}} {handover_s / 2}' for step in ("announce", "link")]
    return "\n".join(lines) + "\n"


def clock() -> Callable[[], float]:
    times: Iterator[float] = iter((100.0, 100.0 + SECONDS))
    return lambda: next(times)


async def asked(router: Router, num: int) -> None:
    async def ask() -> None:
        async with router.session.post(router.url + "/v1/completions", json=BODY) as answer:
            assert answer.status == 200

    await asyncio.gather(*(ask() for _ in range(num)))


async def seen_of(routers: list[Router], load: Callable[[], Awaitable[object]]) -> Any:
    async with httpx.AsyncClient(trust_env=False) as client:
        return await watch(client, [router.url for router in routers], load, clock())


async def test_what_two_routers_and_their_nodes_do_is_compared_with_the_plan() -> None:
    p, d = FakeNode("prefill", fakes.prefill, node_id="p"), FakeNode("decode", decode, node_id="d")
    p.metrics, d.metrics = told(5, 50, 1.0, 0), told(7, 70, 1.0, 80, 1.0)
    async with running(p, d), serving([p], [d]) as one, serving([p], [d]) as other:
        await asked(one, 3)

        async def load() -> None:
            await asyncio.gather(asked(one, 70), asked(other, 50))
            p.metrics, d.metrics = told(25, 4050, 1.4, 0), told(107, 870, 1.5, 80 + 960, 1.0 + 0.48)

        seen = await seen_of([one, other], load)
        terms = {term.name: term for term in compare(PLAN, seen)}
    assert {name: term.seen for name, term in terms.items()} == {
        "requests/s": 12.0, "prompt tokens": 100.0, "answer tokens": 8.0, "prefix hits": 0.25,
        "prefill: ms of a step": pytest.approx(20.0), "prefill: tokens of a step": 200.0,
        "decode: ms of a step": pytest.approx(5.0), "decode: tokens of a step": 8.0,
        "ms of a handover": pytest.approx(4.0), "within the router's targets": None,
    }  # fmt: skip
    apart = [term for term in terms.values() if term.apart and abs(term.apart) > 0.1]
    assert [(term.name, term.apart) for term in apart] == [
        ("prefix hits", 0.25), ("prefill: ms of a step", pytest.approx(1.0)),
    ]  # fmt: skip
    assert "The load is another one than planned: prefix hits." in verdict_of(apart)
    assert verdict_of(apart[1:]) == "The load is as planned; it parts in: prefill: ms of a step."
    assert not seen.notes


async def test_what_it_cannot_know_it_says() -> None:
    """A second router that is not named, a node that began anew, and one without metrics."""
    p, d = FakeNode("prefill", fakes.prefill, node_id="p"), FakeNode("decode", decode, node_id="d")
    p.metrics, d.metrics = told(50, 50, 1.0, 0), told(7, 70, 1.0, 80)
    m = FakeNode("mixed", decode, node_id="m")
    async with running(p, d, m), serving([p], [d], [m]) as one:

        async def load() -> None:
            await asked(one, 110)
            p.metrics, d.metrics = told(5, 5, 0.1, 0), told(107, 870, 1.5, 80 + 3000)

        seen = await seen_of([one], load)
    assert set(seen.nodes) == {"decode"}
    terms = {term.name: term for term in compare(PLAN, seen)}
    assert terms["decode: ms of a step"].apart is None
    assert [note.split(":")[0] for note in seen.notes] == [
        "Steps of p are not known", "Steps of m are not known", "Nodes gave 3000 tokens and these routers 880",
        "The plan has no figures of 1P1D+1M with such ranks (it has 1P1D)",
    ]  # fmt: skip


async def test_too_few_requests_are_no_check() -> None:
    d = FakeNode("decode", decode)
    async with running(d), serving(decode=[d]) as one:
        with pytest.raises(StartupError, match="20 requests were answered in 10 s: a check needs 100"):
            await seen_of([one], lambda: asked(one, 20))


def test_workers_are_counted_one_by_one() -> None:
    def text(*counts: int) -> str:
        family = "# HELP pd_n_total N.\n# TYPE pd_n_total counter\n"
        return labelled({at: f"{family}pd_n_total {count}\n" for at, count in enumerate(counts)}).decode()

    assert total([growth(text(5, 100), text(7, 130))], "pd_n_total") == 32
    with pytest.raises(ValueError, match="was started again"):
        growth(text(5, 100), text(200, 3))
    with pytest.raises(ValueError, match="one told nothing"):
        growth(text(5, 100), text(7))


BAD = {
    "needs the --json of a plan by this release: . is none": "plan --check http://127.0.0.1:9",
    "other.json is none": "plan --check http://127.0.0.1:9 --json other.json",
    "none.json is none": "plan --check http://127.0.0.1:9 --json none.json",
    "gives no answer": "plan --check http://127.0.0.1:9 --json plan.json",
    "--check nothing gives no answer": "plan --check nothing --json plan.json",
    "--minutes 0 is not above 0": "plan --check http://127.0.0.1:9 --json plan.json --minutes 0",
}


@pytest.mark.parametrize("problem", BAD)
def test_bad_input_is_one_sentence(
    problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "other.json").write_text("[]")
    assert main(shlex.split(BAD[problem])) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert problem in line


@pytest.mark.parametrize("answer", ["<html>", '{"nodes": 5}', ""])
async def test_what_is_not_a_router_is_said_to_be_none(answer: str) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=answer))
    async with httpx.AsyncClient(transport=transport) as client:
        with pytest.raises(StartupError, match="is not a router"):
            await watch(client, ["http://it"], lambda: asyncio.sleep(0))
