"""Half a megabyte of request that asks for the most of each kind of answer: memory of every process, and the answers.

A peak is `VmHWM` of the process, which is set back before each attack.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import psutil
import pytest

from tests.deadlines import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.cluster import Launcher

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(1800)]
MOST_MB = 200  # above the memory before, in every process
LEFT_MB = 100  # after it: the engine's first large step takes 70 for good
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BOTH = {"max_tokens": 0, "echo": True, "logprobs": 20, "prompt_logprobs": 20}


def prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    return [[(i * 7 + (seed + n) * 13) % 250 + 1 for i in range(num_tokens)] for n in range(count)]


ATTACKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "24 prompts": (COMPLETIONS, [BOTH | {"prompt": prompts(24, 4095, seed)} for seed in (1, 50, 99)]),
    "7 prompts, with room": (COMPLETIONS, [BOTH | {"prompt": prompts(7, 4095, seed)} for seed in (150, 200, 250)]),
    "64 choices": (
        CHAT,
        [
            {
                "messages": [{"role": "user", "content": "count"}], "n": 64, "max_tokens": 300, "min_tokens": 300,
                "logprobs": True, "top_logprobs": 20,
            }
        ],
    ),
}  # fmt: skip


class Memory:
    """MB of every process."""

    def __init__(self, roots: Sequence[int]) -> None:
        main = [psutil.Process(pid) for pid in roots]
        self._processes = [one for parent in main for one in (parent, *parent.children(recursive=True))]
        self.before = self.now()
        for process in self._processes:
            Path(f"/proc/{process.pid}/clear_refs").write_text("5")

    def now(self) -> list[float]:
        return [process.memory_info().rss / 1e6 for process in self._processes]

    def above(self, now: list[float]) -> float:
        return max(after - before for after, before in zip(now, self.before, strict=True))

    def is_back(self) -> bool:
        return self.above(self.now()) < LEFT_MB

    @property
    def peak(self) -> float:
        """Above the memory before, of the process that grew most."""
        found = [Path(f"/proc/{one.pid}/status").read_text().partition("VmHWM:")[2] for one in self._processes]
        return self.above([int(text.split()[0]) * 1024 / 1e6 for text in found])


async def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """The status, and the bytes of the answer: they are not kept."""
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(url + path, json=body) as answer:
        size = 0
        async for part in answer.content.iter_any():
            size += len(part)
        return answer.status, size


async def test_one_request_does_not_take_the_memory(launcher: Launcher) -> None:
    p, d = (launcher.node(role, "--max-num-seqs=64", real=True) for role in ("prefill", "decode"))
    router = launcher.router(prefill=[p], decode=[d], real=True)
    status, size = await post(router.url, COMPLETIONS, BOTH | {"prompt": prompts(1, 4095, 9)})
    assert (status, size > 8e6) == (200, True)
    for name, (path, bodies) in ATTACKS.items():
        memory = Memory([p.pid, d.pid, router.pid])
        answers = await asyncio.gather(*(post(router.url, path, body) for body in bodies))
        assert {status for status, _ in answers} <= {200, 400, 429, 503}, (name, answers)
        assert memory.peak < MOST_MB, (name, answers)
        await until(memory.is_back, f"the memory is back after {name}", poll_s=0.5)
    for prompt in prompts(64, 2000, 300):  # what evaluation tools send
        body = {"prompt": [prompt], "echo": True, "logprobs": 1, "max_tokens": 1}
        assert (await post(router.url, COMPLETIONS, body))[0] == 200
