"""The file with the API keys of clients, which is followed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from pd_http.errors import StartupError
from pd_router.admission.api_keys import KeyRing, parse_keys

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("pd_router")
LOOK_EVERY_S = 0.5  # the content is compared, as that of a file with nodes


class KeyFile:
    """`ring`: its keys. Raises StartupError if it cannot be read at first."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        try:
            self._content = self._path.read_bytes()
            self.ring = parse_keys(self._content)
        except (OSError, ValueError) as error:
            raise StartupError(f"--api-keys {path}: {error}") from error

    async def follow(self, adopt: Callable[[KeyRing], None], count: Callable[[str], None]) -> None:
        """Call `adopt` with the keys when they change, until cancelled. A bad file changes nothing.

        `count`: called with "ok" or "bad" for each change.
        """
        last: bytes | str = self._content
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            content = await asyncio.to_thread(self._read)
            if content == last:
                continue
            last = content
            try:
                if isinstance(content, str):
                    raise ValueError(content)
                ring = parse_keys(content)
            except ValueError as error:
                log.error("--api-keys %s: %s; the keys stay as they were", self._path, error)
                count("bad")
            else:
                adopt(ring)
                log.info("--api-keys %s: %d keys", self._path, len(ring.by_name))
                count("ok")

    def _read(self) -> bytes | str:
        try:
            return self._path.read_bytes()
        except OSError as error:
            return f"cannot be read: {error.strerror or error}"
