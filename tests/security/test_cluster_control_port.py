"""The strangers' attacks on the control port of a whole cluster, while requests go P-first through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import psutil
import pytest

from tests.cluster import Launched, Launcher
from tests.integration.system import wait_until
from tests.ports import free_port
from tests.security.handover import listeners
from tests.security.test_control_port import (
    MAX_GROWTH_BYTES,
    Attack,
    endless_message,
    long_frames,
    under,
    unfinished_hellos,
)

if TYPE_CHECKING:
    from collections.abc import Callable

pytest.importorskip("nixl_cu13")
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_REQUESTS = 10  # at least so many while an attack goes on
DONE = "pd_loads_done_total "


def engine_of(node: Launched) -> psutil.Process:
    """The node's only child."""
    (engine,) = psutil.Process(node.pid).children()
    return engine


def ask(router: Launched, number: int) -> None:
    body = {"prompt": [(number * 37 + i) % 200 + 10 for i in range(96)], "max_tokens": 4}
    headers = {"x-pd-route": "p-first"}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, headers=headers, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text


def num_loads_done(node: Launched) -> int:
    text = httpx.get(f"{node.url}/metrics", trust_env=False).text
    return int(sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(DONE)))


def test_handoffs_go_on_under_attack_and_memory_comes_back() -> None:
    port, flags = free_port(), ("--min-remote-tokens=1", "--num-threads=1")
    with Launcher() as launcher:
        prefill = launcher.node("prefill", f"--control-port={port}", *flags, real=True)
        decode = launcher.node("decode", *flags, real=True)
        router = launcher.router(prefill=[prefill], decode=[decode])
        engines = [engine_of(prefill), engine_of(decode)]
        for engine in engines:
            assert {address for address, _ in listeners(engine.pid)} == {"127.0.0.1"}
        number = 0
        while number < 20:
            ask(router, number := number + 1)
        before = [engine.memory_info().rss for engine in engines]
        done = num_loads_done(decode)
        first = number
        attacks: list[tuple[Callable[[Attack], None], int]] = [
            (endless_message, 1), (long_frames, 4), (unfinished_hellos, 1),
        ]  # fmt: skip
        for run, num_threads in attacks:
            num_behind = 0
            with under(attack := Attack(port), run, num_threads):
                while num_behind < NUM_REQUESTS:
                    ask(router, number := number + 1)
                    num_behind += len(attack.over) == num_threads
                    growth = [engine.memory_info().rss - rss for engine, rss in zip(engines, before, strict=True)]
                    assert max(growth) < MAX_GROWTH_BYTES, growth
        wait_until(lambda: num_loads_done(decode) - done == number - first, lambda: f"{num_loads_done(decode)} done")
