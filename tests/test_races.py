"""No test depends on how fast the machine is, and the script that finds such tests finds them."""

from __future__ import annotations

import pytest

from tests.races import excused
from tests.races.code import Rule
from tests.races.rules import search
from tests.races.sources import Sources

HELPERS = """
import asyncio, time
SHORT_S = 5.0
LONG_S = 12 * SHORT_S
class Process:
    def wait_line(self, marker: str, deadline_s: float = LONG_S) -> str: ...
class Outcome:
    def close(self): self.seconds = time.monotonic() - self.began_s
async def settled(began_s: float) -> float:
    return time.monotonic() - began_s
def counted(node):
    text = node.metrics()
    return text["a"]
def again(node):
    return again(node)
def counted_at_last(node):
    wait_until(lambda: node.metric("a") > 0)
    return node.metric("a")
"""

CAUGHT = [
    (Rule.ELAPSED, "began = time.monotonic()\n act()\n assert time.monotonic() - began < 2.0"),
    (Rule.ELAPSED, "began = time.perf_counter()\n took = round(time.perf_counter() - began, 2)\n assert 1.0 < took"),
    (Rule.ELAPSED, "clock = time.monotonic\n began = clock()\n assert clock() - began < SHORT_S"),
    (Rule.ELAPSED, "a, b = time.process_time(), 1\n act()\n assert b and time.process_time() - a < 0.1"),
    (Rule.ELAPSED, "looks = []\n looks.append(time.monotonic())\n assert looks[1] - looks[0] > 0.9"),
    (Rule.ELAPSED, "assert await settled(1.0) < SHORT_S"),
    (Rule.ELAPSED, "assert outcome.seconds < SHORT_S"),
    (Rule.ELAPSED, "began = time.time()\n if time.time() - began > 3:\n  pytest.fail('slow')"),
    (Rule.DEADLINE, "end = time.monotonic() + SHORT_S\n while act():\n  assert time.monotonic() < end"),
    (Rule.DEADLINE, "end = time.monotonic() + 5\n while time.monotonic() < end:\n  act()"),
    (Rule.DEADLINE, "async with asyncio.timeout(SHORT_S):\n  act()"),
    (Rule.DEADLINE, "await asyncio.wait_for(act(), 4 * SHORT_S)"),
    (Rule.DEADLINE, "assert event.wait(SHORT_S)"),
    (Rule.DEADLINE, "assert event.wait(timeout=helpers.SHORT_S)"),
    (Rule.DEADLINE, "process.wait_line('ready', 10.0)"),
    (Rule.DEADLINE, "subprocess.run(['true'], timeout=30)"),
    (Rule.DEADLINE, "with pytest.raises(ValueError):\n  httpx.get('u', timeout=30)"),
    (Rule.DEADLINE, "try:\n  queue.get(timeout=3)\n except Empty:\n  raise AssertionError"),
    (Rule.DEADLINE, "end = time.monotonic() + 3\n changed.wait(max(0.0, end - time.monotonic()))"),
    (Rule.DEADLINE, "def until(what, deadline_s=SHORT_S): ..."),
    (Rule.SHARED, "was = threading.active_count()"),
    (Rule.SHARED, "for thread in threading.enumerate():\n  assert not thread.is_alive()"),
    (Rule.SHARED, "assert len(os.listdir('/proc/self/fd')) == was"),
    (Rule.PORT, "with socket.create_server(('127.0.0.1', 0)) as server:\n  return server.getsockname()[1]"),
    (Rule.PORT, "with socket.create_server((host, 0)) as one:\n  port = one.getsockname()[1]\n start(port)"),
    (Rule.PORT, "with socket.socket() as one:\n  one.bind(('', 0))\n  port = one.getsockname()[1]\n start(port)"),
    (Rule.SLEEP, "time.sleep(0.5)"),
    (Rule.SLEEP, "for one in range(3):\n  await asyncio.sleep(SHORT_S)"),
    (Rule.SLEEP, "while True:\n  await asyncio.sleep(unknown)"),
    (Rule.UNSETTLED, "answer = post()\n assert node.metric('a') == 1"),
    (
        Rule.UNSETTLED,
        "was = node.metrics()\n post()\n told = node.metrics()\n assert told['a'] == was['a'] + 1",
    ),
    (Rule.UNSETTLED, "post()\n assert counted(node) == 1"),
    (Rule.UNSETTLED, "post()\n assert 'a 1.0' in httpx.get(f'{url}/metrics').text"),
    (Rule.UNSETTLED, "post()\n assert 'told' in node.output"),
    (Rule.UNSETTLED, "wait_until(lambda: node.metric('a') == 1)\n post()\n assert node.metric('a') == 2"),
]

ALLOWED = [
    "end = time.monotonic() + LONG_S\n while act():\n  assert time.monotonic() < end",
    "began = time.monotonic()\n while act():\n  assert time.monotonic() - began < LONG_S",
    "began = time.monotonic()\n act()\n log(time.monotonic() - began)",
    "sent = time.time()\n assert paper == verify(key, time.time())\n assert sent <= time.time()",
    "now_s = model.seconds(5)\n assert now_s < 3.0 and world.now_s - now_s < 500",
    "async with asyncio.timeout(LONG_S):\n  act()",
    "with pytest.raises(TimeoutError):\n  await asyncio.wait_for(act(), 0.1)",
    "with contextlib.suppress(TimeoutError):\n  async with asyncio.timeout(0.1):\n   act()",
    "assert not event.wait(0.05)",
    "try:\n  queue.get(timeout=3)\n except queue.Empty:\n  pass",
    "while not stop.wait(0.05):\n  act()",
    "while not done():\n  channel.wait(0.05)",
    "link = Link(deadline_s=0.2)\n assert ', '.join(words) == table.get('a', 1)",
    "process.wait_line('ready')\n process.wait(0)",
    "while not done():\n  await asyncio.sleep(0.01)",
    "while True:\n  if done():\n   return\n  time.sleep(0.01)",
    "await asyncio.sleep(0)",
    "assert set(threading.enumerate()) <= was",
    "wait_until(lambda: node.metric('a') == 1, str)\n assert node.metric('b') == 1\n assert counted(node) == 2",
    "post()\n await until_equal(lambda: node.metric('a'), 1)\n told = await node.metrics()\n assert told['b'] == 1",
    "before = node.metrics()\n post()\n assert answer.status == 200",
    "post()\n assert counted_at_last(node) == 1",
    "assert up.stop() == 0\n assert up.lines[-1] == 'stopped'",
    "post()\n assert again(node) == 1",
    "with socket.create_server(('127.0.0.1', 0)) as server:\n  told = connect(server.getsockname())",
]


def found(body: str, marks: str = "") -> set[Rule]:
    """The rules that a test of this body breaks."""
    imports = "import asyncio, contextlib, httpx, pytest, queue, subprocess, threading, time\nfrom pd_x import Link\n"
    imports += "from tests import cluster, helpers\n"
    imports += "from tests.helpers import LONG_S, SHORT_S, Outcome, again, counted, counted_at_last, settled\n"
    test = f"{imports}\n{marks}\nasync def test_it():\n {body}\n"
    sources = Sources(texts={"tests.cluster": "", "tests.helpers": HELPERS, "tests.test_it": test})
    return {one.rule for one in search(sources) if one.path == "tests/test_it.py"}


@pytest.mark.parametrize(("rule", "body"), CAUGHT)
def test_each_form_is_found(rule: Rule, body: str) -> None:
    assert found(body) == {rule}


@pytest.mark.parametrize("body", ALLOWED)
def test_what_waits_for_an_event_is_allowed(body: str) -> None:
    assert found(body) == set()


@pytest.mark.parametrize(
    "marks",
    ["pytestmark = [pytest.mark.slow]", "@pytest.mark.slow", "GPU = pytest.mark.gpu\n@GPU"],
)
def test_slow_tests_are_left_out(marks: str) -> None:
    assert found("time.sleep(0.5)", marks) == set()


def test_some_slow_parameters_leave_nothing_out() -> None:
    marks = "@pytest.mark.parametrize('a', [1, pytest.param(2, marks=pytest.mark.slow)])"
    assert found("time.sleep(0.5)", marks) == {Rule.SLEEP}


def test_helpers_of_slow_tests_alone_are_left_out() -> None:
    slow = "import pytest\nfrom tests import storm\npytestmark = pytest.mark.slow"
    texts = {"tests.storm": "import time\ndef storm(): time.sleep(3)", "tests.test_slow": slow}
    assert "tests.storm" not in Sources(texts=texts).live
    assert "tests.storm" in Sources(texts=texts | {"tests.test_quick": "from tests.storm import storm"}).live


def test_excuses_excuse_something() -> None:
    text = "import time\ndef test_it():\n time.sleep(1)\ndef test_other():\n time.sleep(1)"
    sources = Sources(texts={"tests.test_it": text})
    all_of_them = search(sources)
    listed = {("tests/test_it.py::test_it", "sleep"): "", ("tests/test_it.py::gone", "sleep"): ""}
    remaining, unused = excused.left(all_of_them, listed)
    assert [one.function for one in remaining] == ["test_other"]
    assert unused == ["tests/test_it.py::gone sleep"]
    assert excused.left(all_of_them, {("tests/test_it.py::*", "sleep"): ""}) == ([], [])
    with pytest.raises(AssertionError):
        excused.read('[[excused]]\nplace = "a"\nrule = "sleep"\nreason = ""')


def test_no_test_depends_on_the_speed_of_the_machine() -> None:
    """`python -m tests.races` shows them."""
    remaining, unused = excused.left(search(Sources()), excused.read(excused.LIST.read_text()))
    assert remaining == []
    assert unused == []
