"""Child processes on one machine: starts them with a lifeline, shows their output, waits for their ready lines,
notices their deaths, removes what they left running, and ends them within a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.launch.lifeline import Lifeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

logger = logging.getLogger("pd_cluster.launch")

MAX_LINE_BYTES = 1 << 20
HURRY_S = 5.0  # after a second signal, to close sockets and stop engines
KILL_WAIT_S = 5.0  # until a killed process has ended, unless the kernel blocks it
OUTPUT_TAIL_S = 1.0  # limit for reading the last output of a child that has ended
REMAINS_S = 10.0  # longer than an orphaned engine gives its leases
REMAINS_POLL_S = 0.1
REAP_POLL_S = 0.005


@dataclass(slots=True)
class Child:
    """One process. `ready` resolves to the first line that contains `ready_marker`."""

    name: str
    process: asyncio.subprocess.Process
    ready_marker: str
    ready: asyncio.Future[str]
    pump: asyncio.Task[None] = field(init=False)
    exited: asyncio.Task[int] = field(init=False)

    @property
    def pid(self) -> int:
        return self.process.pid


class Supervisor:
    """Owns its children: the exit of the `async with` block kills those that still run.

    `show(name, line)` gets every line that a child writes.
    """

    def __init__(self, show: Callable[[str, str], None]) -> None:
        self._show: Callable[[str, str], None] | None = show
        self._lifeline = Lifeline()
        self.children: list[Child] = []

    async def __aenter__(self) -> Supervisor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        try:
            await self.stop(self.children, 0)
        finally:
            self._lifeline.close()
            for child in self.children:
                _kill_session(child.pid)  # an engine that hangs does not notice that its API process has ended
                await asyncio.wait({child.pump}, timeout=OUTPUT_TAIL_S)

    async def start(
        self,
        name: str,
        arguments: Iterable[str],
        ready_marker: str,
        environment: Mapping[str, str],
        sockets: Sequence[int] = (),
    ) -> Child:
        """Start a child with `environment` added to this process's own. Raises OSError.

        `sockets`: file descriptors that the child inherits with the same numbers.
        """
        process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environment, **self._lifeline.environment()},
            pass_fds=(self._lifeline.read_fd, *sockets),
            # Ctrl-C reaches this process only, which stops its children in order; uvloop does not support process_group
            start_new_session=True,
            limit=MAX_LINE_BYTES,
        )
        child = Child(name, process, ready_marker, asyncio.get_running_loop().create_future())
        child.pump = asyncio.create_task(self._pump(child), name=f"pump {name}")
        child.exited = asyncio.create_task(_exit_of(process), name=f"wait {name}")
        self.children.append(child)
        return child

    async def wait_ready(self, children: Iterable[Child], deadline_s: float) -> None:
        """Wait until each child has printed its ready line. Raises StartupError if one exits, or after `deadline_s`."""
        waiting = list(children)
        ended = asyncio.create_task(self.first_death())
        ready = asyncio.create_task(_all([child.ready for child in waiting], None, None))
        try:
            await asyncio.wait({ended, ready}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise StartupError(f"{describe_death(ended.result())} before it was ready; see its last lines above")
            if not ready.done():
                late = ", ".join(child.name for child in waiting if not child.ready.done())
                raise StartupError(f"not ready after {deadline_s:g} s: {late} (raise --start-deadline-s)")
        finally:
            ended.cancel()
            ready.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    async def first_death(self) -> Child:
        """Wait until a child exits. Returns it."""
        exits = {child.exited: child for child in self.children}
        done, _ = await asyncio.wait(exits, return_when=asyncio.FIRST_COMPLETED)
        child = exits[next(iter(done))]
        await self.ended(child)
        return child

    async def ended(self, child: Child) -> None:
        """Wait until this child has exited and its last lines have been shown."""
        await asyncio.wait({child.exited})
        await asyncio.wait({child.pump}, timeout=OUTPUT_TAIL_S)

    async def clear(self, name: str) -> None:
        """Wait until the processes that an ended child left running have ended, so that its successor has room.

        When a node's API process was killed, its engine holds GPU memory and serves leases until it ends. Processes
        that still run after REMAINS_S are killed.
        """
        for child in [child for child in self.children if child.name == name and child.exited.done()]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REMAINS_S):
                    while session_members(child.pid):  # noqa: ASYNC110  # the kernel has no event for the end of a grandchild
                        await asyncio.sleep(REMAINS_POLL_S)
            _kill_session(child.pid)
            child.pump.cancel()
            self.children.remove(child)

    async def stop(
        self, children: Iterable[Child], deadline_s: float, hurry: asyncio.Event | None = None
    ) -> list[Child]:
        """Send SIGTERM and wait up to `deadline_s`; send a second signal when `hurry` is set; then send SIGKILL.

        Returns the children that were killed.
        """
        running = [child for child in children if child.process.returncode is None]
        if deadline_s > 0:
            _signal(running, signal.SIGTERM)
            await _all([child.exited for child in running], deadline_s, hurry)
            if hurry is not None and hurry.is_set():
                # nodes count signals; uvicorn (the router) accepts only SIGINT as the second
                _signal([child for child in running if child.process.returncode is None], signal.SIGINT)
                await _all([child.exited for child in running], min(deadline_s, HURRY_S), None)
        killed = [child for child in running if child.process.returncode is None]
        _signal(killed, signal.SIGKILL)
        await _all([child.exited for child in killed], KILL_WAIT_S, None)
        for child in running:
            await asyncio.wait({child.pump}, timeout=OUTPUT_TAIL_S)
            child.pump.cancel()
        return killed

    async def _pump(self, child: Child) -> None:
        stream = child.process.stdout
        assert stream is not None
        while True:
            try:
                raw = await stream.readline()
            except ValueError:  # longer than MAX_LINE_BYTES; readline has dropped it
                self._tell(child, f"(a line of more than {MAX_LINE_BYTES} bytes)")
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if child.ready_marker in line and not child.ready.done():
                child.ready.set_result(line)
            self._tell(child, line)

    def _tell(self, child: Child, line: str) -> None:
        """Never raises: a child blocks when its output is not read, and would have to be killed."""
        if self._show is None:
            return
        try:
            self._show(child.name, line)
        except Exception:
            logger.exception("the children's output can no longer be shown")
            self._show = None


def describe_death(child: Child) -> str:
    """ "prefill-0 was killed by SIGKILL", "router exited with status 2"."""
    status = child.process.returncode
    if status is not None and status < 0:
        return f"{child.name} was killed by {signal.Signals(-status).name}"
    return f"{child.name} exited with status {status}"


async def _exit_of(process: asyncio.subprocess.Process) -> int:
    """Wait for the exit. Returns the exit status.

    asyncio's `wait` also waits for the end of the output, which grandchildren hold open: an engine that hangs would
    hide the death of its API process.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    with contextlib.suppress(OSError):  # already reaped, or pidfds are forbidden here: poll below
        fd = os.pidfd_open(process.pid)
        loop.add_reader(fd, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
    while process.returncode is None:  # noqa: ASYNC110  # asyncio reaps it in a thread and sets no event
        await asyncio.sleep(REAP_POLL_S)
    return process.returncode


def _kill_session(session: int) -> None:
    for pid in session_members(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def session_members(session: int) -> list[int]:
    """Process ids of this session, without zombies. Each child of a Supervisor leads a session."""
    members: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # the name in parentheses may contain any character; after it come state, parent, group, session
            state, _, _, of, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, ValueError):
            continue  # it ended meanwhile
        if int(of) == session and state not in "ZX":
            members.append(int(entry.name))
    return members


def _signal(children: Iterable[Child], signum: signal.Signals) -> None:
    for child in children:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            child.process.send_signal(signum)


async def _all(futures: Sequence[asyncio.Future[Any]], deadline_s: float | None, hurry: asyncio.Event | None) -> None:
    """Wait until all are done, `deadline_s` has passed or `hurry` is set. Cancelling this wait cancels none of them."""
    if not futures:
        return
    all_done = asyncio.create_task(asyncio.wait(futures))
    hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
    try:
        await asyncio.wait({all_done, hurried}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        all_done.cancel()
        hurried.cancel()
