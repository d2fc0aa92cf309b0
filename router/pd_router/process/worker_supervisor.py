"""`--workers N`: the process that holds the listening socket and starts, replaces and stops the workers.

All workers accept from one queue of connections, so a worker that dies refuses none: only its own ones break.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from pd_connectors.protocol.clock import PatientClock
from pd_router.process.succession import Succession, SuccessionFailed
from pd_router.process.worker_hub import WorkerHub
from pd_router.process.worker_messages import MAX_LINE_BYTES, WORKER_ENV, ToSupervisor, line_of

if TYPE_CHECKING:
    from pd_router.process.succession import OldRouter

log = logging.getLogger("pd_router")
FIRST_RESTART_S, LAST_RESTART_S = 0.1, 5.0  # until a worker that ended is replaced; doubled while they end early
EARLY_S = 10.0  # a worker that ended sooner ended early
LOOK_S = 0.5  # between two looks for workers that missed a deadline
KILL_S = 5.0  # beyond --drain-s, for a worker to end


class WorkerSupervisor:
    """Runs `num_workers` processes of this command on `listener`, which listens. Call `run` once."""

    def __init__(
        self, num_workers: int, listener: socket.socket, old_router: OldRouter, drain_s: float, *,
        scheme: str, is_supervised: bool,
    ) -> None:  # fmt: skip
        self._num_workers = num_workers
        self._listener = listener
        self._old_router = old_router
        self._drain_s = drain_s
        self._scheme = scheme
        self._clock = PatientClock(time.monotonic, patience_s=LOOK_S)
        self._hub = WorkerHub(old_router.restart_state, self._now_s)
        self._num_frozen = [0] * num_workers
        self._succession = None if is_supervised else Succession(listener, lambda: self._hub.restart_state)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._handing_over: asyncio.Task[None] | None = None
        self._told_ready = False
        self._had_terminal = os.isatty(0)

    async def run(self) -> int:
        """Serve until SIGINT, SIGTERM, or a successor serves. Exit code 1 if a worker ended before all served once."""
        loop = asyncio.get_running_loop()
        self._ending = loop.create_future()  # the signal for the workers, or None if they cannot start
        loop.add_signal_handler(signal.SIGTERM, self._end, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        tasks = [asyncio.ensure_future(self._keep(number)) for number in range(self._num_workers)]
        tasks.append(asyncio.ensure_future(self._replace_late()))
        number = await self._ending
        if self._handing_over is not None:  # done, or stopped meanwhile: the successor must end too
            self._handing_over.cancel()
            await asyncio.gather(self._handing_over, return_exceptions=True)
        self._listener.close()  # the workers' copies, or a successor's, are the last: they empty the queue
        for process in self._processes.values():
            process.send_signal(number or signal.SIGTERM)
        await asyncio.wait(tasks[:-1], timeout=self._drain_s + KILL_S)
        for process in self._processes.values():
            process.kill()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return 1 if number is None else 0

    def _end(self, number: signal.Signals | None) -> None:
        if not self._ending.done():
            self._ending.set_result(number)

    def _interrupt(self) -> None:
        """The second time nothing is waited for."""
        if self._ending.done():
            for process in self._processes.values():
                process.send_signal(signal.SIGINT)
        self._end(signal.SIGTERM)

    def _hang_up(self) -> None:
        if self._ending.done():  # the listener is closed
            return
        if self._had_terminal and not os.isatty(0):
            log.info("the terminal was closed: stopping")
            self._end(signal.SIGTERM)
        elif self._succession is None:
            self._end(signal.SIGHUP)
        elif os.getpid() == 1:
            log.warning("SIGHUP ignored: this router is process 1 of its container, which would end with it")
        elif self._handing_over is None or self._handing_over.done():
            self._handing_over = asyncio.ensure_future(self._hand_over(self._succession))

    async def _hand_over(self, succession: Succession) -> None:
        log.info("SIGHUP: starting a successor")
        self._hub.is_handed_over = True
        try:
            successor = await succession.run()
        except (SuccessionFailed, OSError) as error:
            self._hub.is_handed_over = False
            log.error("there is no successor, this router continues: %s", error)
            return
        log.info("process %d serves now; this router drains", successor)
        self._end(signal.SIGHUP)

    async def _keep(self, number: int) -> None:
        """Start a worker whenever there is none."""
        wait_s = FIRST_RESTART_S
        while not self._ending.done():
            begun_s = time.monotonic()
            try:
                status = await self._run_one(number)
            except Exception:  # also a bug in a message: a port without workers would refuse nothing and answer nothing
                log.exception("worker %d cannot be run", number)
                status = 1
            if self._ending.done():
                return
            if not self._told_ready:
                log.error("worker %d ended with status %d before the router served", number, status)
                self._end(None)
                return
            wait_s = FIRST_RESTART_S if time.monotonic() - begun_s > EARLY_S else min(2 * wait_s, LAST_RESTART_S)
            log.error("worker %d ended with status %d; the next one starts in %.1f s", number, status, wait_s)
            await asyncio.wait([self._ending], timeout=wait_s)

    async def _run_one(self, number: int) -> int:
        """One process, from its start to its end. Returns its exit status."""
        own, theirs = socket.socketpair()
        with theirs:
            process = self._processes[number] = self._spawn(number, theirs)
        reader, writer = await asyncio.open_connection(sock=own, limit=MAX_LINE_BYTES)
        decoder = msgspec.json.Decoder(ToSupervisor)
        self._hub.join(number, lambda message: writer.write(line_of(message)))
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._hub.take(number, decoder.decode(line))
                    self._tell_ready()
        finally:
            self._hub.leave(number)
            writer.close()
            status = await asyncio.to_thread(process.wait)
            del self._processes[number]
        return status

    def _spawn(self, number: int, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Its session is its own: a terminal's signals are for the supervisor, which passes them on."""
        fds = self._listener.fileno(), theirs.fileno()
        command = [sys.executable, *sys.orig_argv[1:], f"--listen-fd={fds[0]}"]
        environ = {**os.environ, WORKER_ENV: f"{number}:{fds[1]}:{self._num_frozen[number]}"}
        return subprocess.Popen(command, pass_fds=fds, env=environ, stdin=subprocess.DEVNULL, start_new_session=True)

    def _tell_ready(self) -> None:
        if not self._told_ready and self._hub.num_serving == self._num_workers:
            self._told_ready = True
            self._old_router.serving(self._listener, self._scheme)

    def _now_s(self) -> float:
        """Called at least every LOOK_S, unless this process does not run: that time does not count."""
        self._clock.resume()
        self._clock.sleep(LOOK_S)
        return self._clock()

    async def _replace_late(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for number in self._hub.late():
                log.error("worker %d is frozen: it was silent, or did not obey an order in time. It is killed", number)
                self._num_frozen[number] += 1
                self._processes[number].kill()
                self._hub.leave(number)
