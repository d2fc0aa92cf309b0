"""The router's HTTP server: it leaves as every server of the cluster, and handles the router's signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING

from pd_http.leaving import LeavingServer
from pd_router.process.succession import SuccessionFailed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    import uvicorn

    from pd_router.config import RouterConfig
    from pd_router.process.succession import Succession
    from pd_router.sources.posted import PostedNodes

log = logging.getLogger("pd_router")
SUCCEEDED_S = 1.0  # at least so long an idle connection stays open after a successor serves, whatever --linger-s says


class RouterServer(LeavingServer):
    """The router's HTTP server. It calls `on_serving` when it serves, and exits with status 0 after a signal.

    It leaves after SIGINT or SIGTERM (a second SIGINT: at once), and after SIGHUP once a successor serves, or at once
    if `succession` is None. SIGHUP stays ignored if it was ignored when this process started (nohup).

    `leaving`: is set when it leaves without a successor. Balancers that ask /health then send no more.
    """

    has_successor = True  # after SIGHUP: another process takes over all ports

    def __init__(
        self, posted: PostedNodes, leaving: asyncio.Event, on_serving: Callable[[], None], config: uvicorn.Config,
        settings: RouterConfig,
    ) -> None:  # fmt: skip
        super().__init__(config, settings.linger_s, settings.drain_s)
        self.posted = posted
        self.succession: Succession | None = None
        self._leaving = leaving
        self._on_serving = on_serving
        self._had_terminal = os.isatty(0)
        self._handing_over: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, it does not raise the signal again at the end: that would make the exit code -15."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        receives_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        loop = asyncio.get_running_loop()
        if receives_hangup:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        try:
            yield
        finally:
            if receives_hangup:
                loop.remove_signal_handler(signal.SIGHUP)
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._on_serving()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._handing_over is not None and not self._handing_over.done():
            self._handing_over.cancel()  # stopped during the handover: the successor must end too
            await asyncio.gather(self._handing_over, return_exceptions=True)
        log.info("leaving: idle connections have %g s, running requests %g s", self.linger_s, self.drain_s or 0.0)
        if self.is_succeeded:
            self.leave(max(self.linger_s, SUCCEEDED_S))
        else:
            self._leaving.set()
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        if self.should_exit:
            return
        if self._had_terminal and not os.isatty(0):
            log.info("the terminal was closed: stopping")
            self.should_exit = True
        elif self.succession is None:
            log.info("SIGHUP: draining; the supervisor starts the next router")
            self.is_succeeded, self.should_exit = self.has_successor, True
        elif os.getpid() == 1:
            log.warning("SIGHUP ignored: this router is process 1 of its container, which would end with it")
        elif self._handing_over is None or self._handing_over.done():
            self._handing_over = asyncio.ensure_future(self._hand_over(self.succession))

    async def _hand_over(self, succession: Succession) -> None:
        log.info("SIGHUP: starting a successor")
        self.posted.is_handed_over = True
        try:
            successor = await succession.run()
        except (SuccessionFailed, OSError) as error:
            self.posted.is_handed_over = False
            log.error("there is no successor, this router continues: %s", error)
            return
        log.info("process %d serves now; this router drains", successor)
        self.is_succeeded = self.should_exit = True
