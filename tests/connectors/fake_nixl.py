"""NIXL's bindings as a script: the tests say what each post, and each look at a read, answers."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class RemoteDisconnect(Exception): ...


class NotFound(Exception): ...


class BackendError(Exception): ...


class FakeNixl:
    """The module and its only agent in one. Handles are numbers; every list of descriptors is the list itself."""

    NIXL_SUCCESS, NIXL_IN_PROG, NIXL_READ, NIXL_INIT_AGENT = "SUCCESS", "IN_PROG", "READ", ""
    DRAM_SEG, VRAM_SEG = "DRAM", "VRAM"
    nixlRemoteDisconnectError = RemoteDisconnect
    nixlNotFoundError = NotFound

    def __init__(self) -> None:
        self.posts: deque[Exception | str] = deque()  # answers of the next posts; IN_PROG when there is none
        self.status: dict[int, Exception | str] = {}  # by handle; IN_PROG when there is none
        self.posted: list[int] = []
        self.released: list[int] = []
        self.loaded: list[str] = []
        self.forgotten: list[str] = []
        self.lists: set[int] = set()
        self.list_error: Exception | None = None  # of the next prepXferDlist of a remote agent
        self._numbers = itertools.count(1)

    # the module

    class nixlAgentConfig: ...

    def nixlAgent(self, name: str, config: object) -> FakeNixl:
        return self

    def nixlXferDList(self, segment: str, rows: object) -> object:
        return rows

    nixlRegDList = nixlXferDList

    # the agent

    def createBackend(self, name: str, options: dict[str, str]) -> str:
        return name

    def registerMem(self, regions: object, backends: object) -> None: ...

    def getLocalMD(self) -> bytes:
        return b"us"

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        self.loaded.append(metadata.decode())
        return metadata

    def invalidateRemoteMD(self, name: str) -> None:
        self.forgotten.append(name)

    def prepXferDlist(self, name: str, blocks: object, backends: object) -> int:
        if name and self.list_error is not None:
            raise self.list_error
        self.lists.add(number := next(self._numbers))
        return number

    def releasedDlistH(self, number: int) -> None:
        self.lists.remove(number)

    def createXferReq(self, *request: object) -> int:
        return next(self._numbers)

    makeXferReq = createXferReq

    def postXferReq(self, handle: int, message: bytes) -> str:
        self.posted.append(handle)
        return answer(self.posts.popleft() if self.posts else self.NIXL_IN_PROG)

    def getXferStatus(self, handle: int) -> str:
        assert handle not in self.released
        return answer(self.status.get(handle, self.NIXL_IN_PROG))

    def releaseXferReq(self, handle: int) -> None:
        assert handle not in self.released
        self.released.append(handle)


def answer(scripted: Exception | str) -> str:
    if isinstance(scripted, Exception):
        raise scripted
    return scripted


def bindings(fake: FakeNixl) -> Callable[[], Any]:
    """In place of the agent's own look-up of NIXL's module."""
    return lambda: fake
