"""The router's HTTP server: uvicorn with the router's signal handling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING

import uvicorn

from pd_router.succession import SuccessionFailed

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from pd_router.farewell import Farewell
    from pd_router.sources.posted import PostedNodes
    from pd_router.succession import Succession

log = logging.getLogger("pd_router")
# How long connections stay open after a successor serves: the first request on a new connection may be on its way, and
# the answer to the next request on an idle connection asks its client to close it.
LINGER_S = 1.0


class RouterServer(uvicorn.Server):
    """The router's HTTP server. It calls `on_serving` when it serves, and exits with status 0 after a signal.

    After SIGINT or SIGTERM the server accepts no new connection, and running requests get drain_s seconds to end. After
    SIGHUP the server does the same once a successor serves, or at once if `succession` is None. SIGHUP stays ignored if
    it was ignored when this process started (nohup).
    """

    def __init__(
        self, posted: PostedNodes, farewell: Farewell, on_serving: Callable[[], None], config: uvicorn.Config
    ) -> None:
        super().__init__(config)
        self.posted = posted
        self.succession: Succession | None = None
        self._farewell = farewell
        self._on_serving = on_serving
        self._had_terminal = os.isatty(0)
        self._handing_over: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Unlike uvicorn's, it does not raise the signal again at the end: that would make the exit code -15."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        hears_hangup = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        loop = asyncio.get_running_loop()
        if hears_hangup:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        try:
            yield
        finally:
            if hears_hangup:
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
        if self._farewell.begun:
            for server in self.servers:
                server.close()  # the successor has its own copy of the socket
            await asyncio.sleep(LINGER_S)
        await super().shutdown(sockets)

    def _hang_up(self) -> None:
        if self.should_exit:
            return
        if self._had_terminal and not os.isatty(0):
            log.info("the terminal was closed: stopping")
            self.should_exit = True
        elif self.succession is None:
            log.info("SIGHUP: draining; the supervisor starts the next router")
            self._farewell.begun = self.should_exit = True
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
        self._farewell.begun = self.should_exit = True
