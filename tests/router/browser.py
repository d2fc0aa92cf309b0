"""A headless Chromium, driven over its DevTools protocol. `find_chromium` says where it is, or that there is none."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.deadlines import HANG_S, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def find_chromium() -> str:
    """The program, by $PD_CHROMIUM or a usual name; "" if there is none."""
    return os.environ.get("PD_CHROMIUM", "") or next(filter(None, map(shutil.which, NAMES)), "")


class Page:
    """One tab. `problems`: what it logged as an error: exceptions, violations of its policy, failed loads."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.problems: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.problems.append(str(told["params"]["exceptionDetails"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.problems.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(HANG_S):
            told = await self._waiting[number]
        assert "error" not in told, told
        return told["result"]

    async def show(self, url: str, *, width: int = 1200, height: int = 900, is_dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        await self.call("Page.navigate", url=url)

    async def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        told = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Return the value of a JavaScript expression as soon as it is true."""
        async with asyncio.timeout(HANG_S):
            while not (value := await self.evaluate(condition)):  # noqa: ASYNC110  # in another process
                await asyncio.sleep(0.05)
        return value

    async def screenshot(self, path: Path) -> None:
        """A PNG of the whole page."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        told = await self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(told["data"]))


@contextlib.asynccontextmanager
async def browser(program: str) -> AsyncIterator[Page]:
    """A tab of a new browser without a profile. The browser ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-extensions",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with aiohttp.ClientSession() as session:
                url = await _page_url(session, Path(profile) / "DevToolsActivePort")
                async with session.ws_connect(url, max_msg_size=1 << 28) as socket:
                    page = Page(socket)
                    reading = asyncio.ensure_future(page.read())
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                    reading.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _page_url(session: aiohttp.ClientSession, told: Path) -> str:
    """The address of the first tab. `told`: the file in which the browser tells its port."""
    urls: list[str] = []

    async def look() -> bool:
        with contextlib.suppress(OSError, IndexError, aiohttp.ClientError):
            port = (await asyncio.to_thread(told.read_text)).split()[0]
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                urls.extend(tab["webSocketDebuggerUrl"] for tab in await answer.json() if tab["type"] == "page")
        return bool(urls)

    await until(look)
    return urls[0]
