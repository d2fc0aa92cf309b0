"""Grammars of requests, written and checked in a process of their own before the engine gets them."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest, Overloaded, TooManyChecks
from pd_cluster.server.grammar.check_turns import Check, CheckTurns
from pd_cluster.worker.grammars import NO_PACKAGE

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.server.grammar.grammar_source import GrammarSource

# A schema of this size took 0.1 s of CPU on a vocabulary of 128,000 tokens
MAX_GRAMMAR_BYTES = 64 << 10
MAX_GRAMMARS_BYTES = 1 << 20  # of all prompts together: each has a copy on the engine
MAX_WRITTEN_CHARS = 4 * MAX_GRAMMAR_BYTES  # in llguidance's language, which escapes texts once more
CHECK_DEADLINE_S = 20.0  # with the start of the process, which takes 1 s; its CPU limit ends a long check before
REQUEST_DEADLINE_S = 10.0  # after the checks of others: one that ends the process takes up to 2 s
# Answers, so that the schema of many requests does not wait after the checks of others. Half of what the engine keeps:
# a grammar that passes unchecked is compiled there, and a client cannot make it compile faster than it is checked here
MAX_KEPT = 32


class GrammarChecks:
    """Writes and checks one grammar after the other, clients in turn. Close it to end its process and its thread.

    The process starts with the first grammar, and again after one that ended it.
    """

    def __init__(self, model_dir: Path, vocab_size: int) -> None:
        self._arguments = [str(model_dir / "tokenizer.json"), str(vocab_size)]
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._answers: OrderedDict[bytes, dict[str, str]] = OrderedDict()  # of the process, by request
        self._turns = CheckTurns()
        self._waiting: dict[Check, asyncio.Future[dict[str, str] | Exception | None]] = {}  # None: it ended the process
        self._serving: asyncio.Task[None] | None = None

    def close(self) -> None:
        while (check := self._turns.take()) is not None:
            self._waiting.pop(check).cancel()
        if (process := self._process) is not None:
            _kill(process)  # so that a check under way ends now
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    async def grammar(self, source: GrammarSource, num_prompts: int, client: str = "") -> str:
        """The checked grammar of a request with so many prompts. `client`: as the router names it.

        Raises InvalidRequest, Overloaded, TooManyChecks.
        """
        if source.kind == "written":
            await self.check(source.value, source.param, client)
            return str(source.value)
        choices = source.value if source.kind == "choice" else []
        if source.kind == "choice" and not (choices and all(choices)):
            raise InvalidRequest(f"{source.param}: a choice needs strings that are not empty", source.param)
        value = source.value if isinstance(source.value, str) else msgspec.json.encode(source.value).decode()
        message = source.message
        _check_size(value + (msgspec.json.encode(message).decode() if message else ""), num_prompts, source.param)
        options = {name: getattr(source, name) for name in ("coerces_one_of", "strict", "blanks")}
        asked = {"kind": source.kind, "value": value, "choices": choices, "message": message} | options
        return await self._written(source.param, asked, client)

    async def check(self, grammar: str, param: str, client: str = "") -> None:
        """Check a grammar that another node has written. Raises as `grammar` does; InvalidRequest names `param`."""
        if len(grammar) > MAX_WRITTEN_CHARS:
            raise InvalidRequest(f"{param}: the grammar has more than {MAX_WRITTEN_CHARS} characters", param)
        await self._written(param, {"kind": "", "value": grammar, "choices": [], "coerces_one_of": False}, client)

    async def _written(self, param: str, asked: dict[str, Any], client: str) -> str:
        """The answer to the arguments of `grammar_process.write`."""
        if importlib.util.find_spec("llguidance") is None:
            raise InvalidRequest(NO_PACKAGE, param, "unsupported_value")
        request = msgspec.json.encode(asked)
        answer = self._answers.get(request) or await self._checked((client, request))
        if request in self._answers:
            self._answers.move_to_end(request)
        if "grammar" not in answer:
            raise InvalidRequest(f"{param}: {answer['error']}", param)
        return str(answer["grammar"])

    async def _checked(self, check: Check) -> dict[str, str]:
        answered = self._waiting.get(check)
        if answered is None:
            answered = self._waiting[check] = asyncio.get_running_loop().create_future()
            if (refused := self._turns.push(check)) is not None:
                self._waiting.pop(refused).set_result(TooManyChecks("too many new grammars wait for their check"))
            if self._serving is None or self._serving.done():
                self._serving = asyncio.create_task(self._serve())
        try:
            async with asyncio.timeout(REQUEST_DEADLINE_S):
                answer = await asyncio.shield(answered)  # also for a retry of the client
        except TimeoutError as error:
            raise Overloaded(f"the grammar was not checked within {REQUEST_DEADLINE_S:g} s") from error
        if isinstance(answer, OSError):
            raise Overloaded(f"the process that checks grammars cannot be started: {answer}") from answer
        if isinstance(answer, Exception):
            raise answer
        return answer or {"error": "the grammar takes too much time or memory"}

    async def _serve(self) -> None:
        """Check what waits, until nothing does."""
        while (check := self._turns.take()) is not None:
            answer: dict[str, str] | Exception | None = self._answers.get(check[1])  # of another client's check
            if answer is None:
                try:
                    answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, check[1])
                except Exception as error:
                    answer = error
                self._turns.note(check[0], ended_process=answer is None)
            if isinstance(answer, dict):  # else not kept: something else may have ended the process
                self._answers[check[1]] = answer
                if len(self._answers) > MAX_KEPT:
                    self._answers.popitem(last=False)
            self._waiting.pop(check).set_result(answer)

    def _ask(self, request: bytes) -> dict[str, str] | None:
        """The answer of the process; None: it has ended, or was killed at the deadline."""
        if self._process is not None and _has_died(self._process):
            self._end()  # killed since its last answer, which does not speak against this grammar
        self._process = process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(CHECK_DEADLINE_S, _kill, (process,))  # ends the write and the read
        timer.start()
        try:
            process.stdin.write(request + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if not line.endswith(b"\n"):
            self._end()
            self._process = self._start()
            return None
        if line == b"\n":  # the grammar has ended the fork that checked it
            return None
        answer: dict[str, str] = msgspec.json.decode(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "pd_cluster.server.grammar.grammar_process", *self._arguments]
        # A process group of its own: an interrupt at the terminal is for the node, which ends the process by its input.
        # Not a session, because Linux gives each session an equal share of the cores, whatever the niceness in it is
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)

    def _end(self) -> None:
        if self._process is not None:
            _kill(self._process)
            self._process.communicate()
            self._process = None


def _has_died(process: subprocess.Popen[bytes]) -> bool:
    """Not by `poll`, which frees its id: the id names the group of a fork that may have outlived it."""
    if process.returncode is not None:
        return True
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, if it lives, and its fork, which are a process group.

    A fork that is stopped would stay, and hold the pipes: their end, for which `_end` waits, would never come.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _check_size(text: str, num_prompts: int, param: str) -> None:
    """Raises InvalidRequest for a grammar that is too long, alone or for all prompts together."""
    num_bytes = len(text.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"{param} has {num_bytes} bytes; {MAX_GRAMMAR_BYTES} are allowed", param)
    if num_bytes * num_prompts > MAX_GRAMMARS_BYTES:
        raise InvalidRequest(
            f"{param} has {num_bytes} bytes, for {num_prompts} prompts; {MAX_GRAMMARS_BYTES} are allowed in all", param
        )
