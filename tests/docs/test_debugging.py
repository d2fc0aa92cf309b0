"""The page about debugging: one chat through P, D and router in one process stops where the page says."""

from __future__ import annotations

import ast
import asyncio
import bdb
import re
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.docs.pages import ROOT
from tests.one_process import STOPS, one_process
from tests.shallow_model import shallow_model

if TYPE_CHECKING:
    from types import FrameType

    from tests.one_process import OneProcess

PAGE = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
PROMPT = "Mira 4831. Oskar 2210. Lena 7745. Oskar?"


class Place(NamedTuple):
    """A row of the page's table."""

    part: str
    file: str
    function: str

    @property
    def line(self) -> int:
        """The first line of the function that does something."""
        tree = ast.parse((ROOT / self.file).read_text(encoding="utf-8"))
        found: Any = tree
        for name in self.function.split("."):
            found = next(node for node in found.body if getattr(node, "name", "") == name)
        body = found.body[1:] if ast.get_docstring(found) else found.body
        return int(body[0].lineno)


PLACES = [Place(*row) for row in re.findall(r"^\| (\w+) \| `([\w/.]+\.py)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)]


class Debugger(bdb.Bdb):
    """Notes where it stops and goes on. pdb is this class with a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[Place] = []

    def user_line(self, frame: FrameType) -> None:
        file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
        self.stops.append(Place(_part(frame), file, frame.f_code.co_qualname))
        self.set_continue()


def _part(frame: FrameType) -> str:
    if "/pd_router/" in frame.f_code.co_filename:
        return "router"
    if (state := frame.f_locals.get("state")) is not None:
        return str(state.node_id)
    task = asyncio.current_task()
    return "" if task is None else task.get_name().removeprefix("steps of ")


async def chat(cluster: OneProcess) -> dict[str, str]:
    """The headers of the answer to one chat."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 6}
    async with cluster.router.session.post(f"{cluster.router.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        assert (await answer.json())["usage"]["completion_tokens"] == 6
        return dict(answer.headers)


@pytest.mark.long
@pytest.mark.parametrize("connector", ["loopback", "nixl"])
def test_each_part_stops_in_one_process(connector: str) -> None:
    if connector == "nixl":
        pytest.importorskip("nixl_cu13")
    stops = []

    def stop() -> None:
        caller = sys._getframe(1)
        part = "router" if caller.f_code.co_name == "stop_and_choose" else _part(caller)
        stops.append((part, threading.current_thread() is threading.main_thread()))

    async def run() -> tuple[dict[str, str], float]:
        async with one_process(shallow_model(), STOPS, stop, connector=connector) as cluster:
            headers = await chat(cluster)
            stats = cluster.decode.connector.stats()
            return headers, stats["kv_transfer_bytes_total"]

    headers, num_bytes = asyncio.run(run())
    assert stops == [("router", True), ("prefill", True), ("decode", True)]
    assert (headers["x-pd-prefill"], headers["x-pd-decode"]) == ("prefill", "decode")
    assert num_bytes > 0


@pytest.mark.long
def test_a_debugger_stops_where_the_page_says() -> None:
    assert len(PLACES) >= 10
    debugger = Debugger()
    for place in PLACES:
        assert debugger.set_break(str(ROOT / place.file), place.line) is None, place

    async def run() -> None:
        async with one_process(shallow_model()) as cluster:
            debugger.reset()
            debugger.set_continue()
            before = sys.gettrace()
            sys.settrace(debugger.trace_dispatch)
            try:
                await chat(cluster)
            finally:
                sys.settrace(before)

    asyncio.run(run())
    assert [place for place in PLACES if place not in debugger.stops] == []
    for part in ("router", "prefill", "decode"):  # two parts may pass their places in any order
        firsts = [debugger.stops.index(place) for place in PLACES if place.part == part]
        assert firsts == sorted(firsts), f"{part} has another order than the page"


def test_the_page_has_all_stops() -> None:
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE) == list(STOPS)
