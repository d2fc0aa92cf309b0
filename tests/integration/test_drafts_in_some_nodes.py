"""One cluster in which some nodes draft by lookup, some do not, and some are of the last release without drafts.

Each P hands over to each D, by both orders. Streams are cut at each frame and go on at each other D, which gets the KV
from a P. Nodes are processes; the old release is the code of a commit.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from pd_connectors.protocol.stream_codec import StreamParser
from pd_connectors.protocol.ticket import Offer, sign
from pd_http.frames import AnyFrame
from tests.cluster import Launched, Launcher
from tests.cut_streams import COMPLETIONS, Ask, Case, Refused, check_cuts, same_content
from tests.deadlines import HANG_S
from tests.integration.fault_cluster import fetch, parse_metrics, until
from tests.integration.system import Path, ask_url
from tests.integration.test_role_change import KEY
from tests.integration.test_sampling_parity import STORY, same_numbers
from tests.integration.upgraded_cluster import NODE_FLAGS, START_S, extract, importing
from tests.patient_node import PATIENT
from tests.server.fake_engine import FAR
from tests.server.test_continued_generation import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]
pytest.importorskip("llguidance")

COMMIT = "bb375f6fa0dab475b521576c48561e75fbc3b45f"  # its nodes read a stream's frames and tickets as ours do
ACCEPTED = "pd_spec_decode_num_accepted_tokens_total"
PREFILLED = 'pd_requests_total{endpoint="prefill",outcome="ok"}'
PREFILLS, DECODES = ("p-lookup", "p-plain", "p-old"), ("d-lookup", "d-plain", "d-old")
LONG = {"prompt": STORY, "max_tokens": 36, "ignore_eos": True}
CASES = [
    plain("greedy", COMPLETIONS, logprobs=2, temperature=0, **LONG),
    plain("few tokens", COMPLETIONS, n=2, temperature=0.9, seed=4, logprobs=1, **LONG,
          allowed_token_ids=[172, 253, 247, 222, 100]),
    plain("a regular expression", COMPLETIONS, guided_regex="(ab|cde){9}", max_tokens=40, temperature=0.9, seed=4),
    plain("a stop string", COMPLETIONS, guided_regex="(ab){9}c{9}", max_tokens=40, temperature=0, stop=["cccc"]),
]  # fmt: skip


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class SomeDraft:
    """The nodes by name, all of them ready."""

    def __init__(self, launcher: Launcher, old: dict[str, str]) -> None:
        """`old`: the environment of the old release's processes."""
        self.launcher = launcher
        self.nodes: dict[str, Launched] = {}
        hook = PATIENT | {"PD_TEST_ENGINE_HOOK": "tests.drafters:look_up_at_fixed_prices"}
        for name in (*PREFILLS, *DECODES):
            role, kind = "prefill" if name[0] == "p" else "decode", name.partition("-")[2]
            flags = [f"--node-id={name}", *NODE_FLAGS, *(["--speculation=lookup"] if kind == "lookup" else [])]
            environment = {"old": old, "plain": PATIENT, "lookup": hook}[kind]
            self.nodes[name] = launcher.node(role, *flags, environment=environment, wait=False, real=kind == "old")
        for node in self.nodes.values():
            node.wait_line("ready: ", START_S)

    def url(self, name: str) -> str:
        return self.nodes[name].url

    async def told(self, name: str, metric: str = ACCEPTED) -> float:
        """A sample of the node; 0 for one that has none."""
        return parse_metrics((await fetch(f"{self.url(name)}/metrics")).text).get(metric, 0.0)

    async def wait_more(self, name: str, before: float, metric: str = ACCEPTED) -> None:
        """Until more is told. An engine tells its counters a moment after an answer."""

        async def is_more() -> bool:
            return await self.told(name, metric) > before

        await until(is_more, f"{metric} of {name} is more than {before:g}")

    def asking(self, name: str, *prefills: str) -> Ask:
        """Asks the node for frames. A stream that goes on there gets an offer of these P."""

        async def ask(path: str, body: dict[str, Any]) -> list[AnyFrame]:
            if prefills and "kv_transfer_params" in body:
                offer = sign(KEY, Offer(tuple(map(self.url, prefills)), FAR))
                body = body | {"kv_transfer_params": body["kv_transfer_params"]
                               | {"do_remote_prefill": True, "offer": offer}}  # fmt: skip
            headers = {"x-request-id": "cut", "x-pd-frames": "1"}
            async with httpx.AsyncClient(timeout=HANG_S, trust_env=False) as client:
                answer = await client.post(self.url(name) + path, json=body, headers=headers)
            if answer.status_code != 200:
                raise Refused(answer.status_code, answer.content)
            return StreamParser[AnyFrame](AnyFrame).feed(answer.content)

        return ask


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SomeDraft]:
    folder = tmp_path_factory.mktemp("old")
    if why := extract(COMMIT, folder):
        pytest.skip(f"no code of commit {COMMIT}: {why}")
    with Launcher() as launcher:
        yield SomeDraft(launcher, importing(folder))


async def test_drafts_are_in_no_version(some: SomeDraft) -> None:
    told = [(await fetch(f"{some.url(name)}/health")).json() for name in some.nodes]
    for field in ("stream_version", "fingerprint", "kv_protocol"):
        assert len({one[field] for one in told}) == 1, field


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("decode", DECODES)
async def test_each_p_hands_over_to_each_d(some: SomeDraft, prefill: str, decode: str) -> None:
    nodes, before = some.nodes, {name: await some.told(name) for name in some.nodes}
    router = some.launcher.router(prefill=[nodes[prefill]], decode=[nodes[decode]])
    asked = [(case.path, case.body | {"cache_salt": f"{prefill} {decode} {case.name}"}) for case in CASES]
    wanted = await asyncio.to_thread(ask_url, some.url("d-plain"), [(case.path, case.body) for case in CASES])
    for route in (Path.P_FIRST, Path.D_FIRST):
        salted = [(path, body | {"cache_salt": f"{route} {body['cache_salt']}"}) for path, body in asked]
        for found, expected in zip(
            await asyncio.to_thread(ask_url, router.url, salted, route.value), wanted, strict=True
        ):
            assert (found.headers["x-pd-prefill"], found.headers["x-pd-decode"]) == (prefill, decode)
            same_numbers(found.choices, expected.choices)
            assert found.body["usage"]["completion_tokens"] == expected.body["usage"]["completion_tokens"]
    assert await asyncio.to_thread(router.stop) == 0
    if decode == "d-lookup":
        await some.wait_more(decode, before[decode])
    assert await some.told(prefill) == before[prefill], "P drafts nothing that it hands over"


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(DECODES, 2)))
async def test_a_stream_of_each_d_goes_on_at_each_other(some: SomeDraft, first: str, second: str) -> None:
    """Cut at each frame. KV of the prompt and of the known tokens comes from a P; two choices are computed at D."""
    before, legs = await some.told(second), {name: await some.told(name, PREFILLED) for name in PREFILLS}
    for case, prefills in zip(CASES, (("p-lookup",), (), ("p-plain",), ("p-old",)), strict=True):
        salted = Case(case.name, case.path, case.body | {"cache_salt": f"{first} {second} {case.name}"})
        await check_cuts(salted, some.asking(first), some.asking(second, *prefills), same=same_content)
    if second == "d-lookup":
        await some.wait_more(second, before)
    for name, num in legs.items():
        await some.wait_more(name, num, PREFILLED)
