"""Grammars of requests, written and checked in a process of their own before the engine gets them."""

from __future__ import annotations

import asyncio
import importlib.util
import select
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.worker.grammars import NO_PACKAGE

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.server.grammar_source import GrammarSource

# A schema of this size took 0.1 s of CPU on a vocabulary of 128,000 tokens
MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMARS_BYTES = 1 << 20  # of all prompts together: each has a copy on the engine
MAX_WRITTEN_CHARS = 4 * MAX_GRAMMAR_BYTES  # in llguidance's language, which escapes texts once more
CHECK_DEADLINE_S = 20.0  # with the start of the process, which takes 1 s; its CPU limit ends a long check before


class GrammarChecks:
    """Writes and checks one grammar after the other. Close it to end its process and its thread.

    The process starts with the first grammar, and again after one that ended it.
    """

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._arguments = [str(model_dir / "tokenizer.json"), str(vocab_size)]
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def close(self) -> None:
        self._thread.submit(self._end)
        self._thread.shutdown(wait=True)

    async def grammar(self, source: GrammarSource | None, num_prompts: int) -> str:
        """The checked grammar of a request with so many prompts; "" for none. Raises InvalidRequest."""
        if source is None:
            return ""
        choices = source.value if source.kind == "choice" else []
        if source.kind == "choice" and not (choices and all(choices)):
            raise InvalidRequest(f"{source.param}: a choice needs strings that are not empty", source.param)
        value = source.value if isinstance(source.value, str) else msgspec.json.encode(source.value).decode()
        _check_size(value, num_prompts, source.param)
        return await self._written(source.param, source.kind, value, choices, source.coerces_one_of)

    async def check(self, grammar: str, param: str) -> None:
        """Check a grammar that another node has written. Raises InvalidRequest that names `param`."""
        if len(grammar) > MAX_WRITTEN_CHARS:
            raise InvalidRequest(f"{param}: the grammar has more than {MAX_WRITTEN_CHARS} characters", param)
        await self._written(param, "", grammar)

    async def _written(
        self, param: str, kind: str, value: str, choices: list[str] | None = None, coerces_one_of: bool = False
    ) -> str:
        if importlib.util.find_spec("llguidance") is None:
            raise InvalidRequest(NO_PACKAGE, param, "unsupported_value")
        request = {"kind": kind, "value": value, "choices": choices or [], "coerces_one_of": coerces_one_of}
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, request)
        if "grammar" not in answer:
            raise InvalidRequest(f"{param}: {answer['error']}", param)
        return str(answer["grammar"])

    def _ask(self, request: dict[str, Any]) -> dict[str, str]:
        self._process = self._process or self._start()
        process, poll = self._process, select.poll()
        assert process.stdin is not None
        assert process.stdout is not None
        poll.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline() if poll.poll(CHECK_DEADLINE_S * 1000) else b""
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._end()
            self._process = self._start()
            return {"error": "the grammar takes too much time or memory"}
        answer: dict[str, str] = msgspec.json.decode(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pd_cluster.server.grammar_process", *self._arguments]
        # A session of its own: an interrupt at the terminal is for the node, which ends the process by its input
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _check_size(text: str, num_prompts: int, param: str) -> None:
    """Raises InvalidRequest for a grammar that is too long, alone or for all prompts together."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} has {num_bytes} bytes; {MAX_GRAMMAR_BYTES} are allowed", param)
    if num_bytes * num_prompts > MAX_GRAMMARS_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes} bytes, for {num_prompts} prompts; {MAX_GRAMMARS_BYTES} are allowed in all", param
        )
