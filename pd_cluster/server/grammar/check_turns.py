"""Which grammar is checked next: clients take turns, and a client that ended a process goes last. Pure."""

from __future__ import annotations

from collections import OrderedDict

# Checks of one client that wait. One takes 0.3 s at most, with the next fork: more would not be checked in 10 s
MAX_OF_CLIENT = 32
MAX_WAITING = 256  # over all clients: 64 KiB each, or 256 of a grammar that another node wrote
MAX_BLAMED = 1024
Check = tuple[str, bytes]  # the client's name, and what is asked of the process


class CheckTurns:
    """The lines of the clients; the first one is next, with its oldest check."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, list[Check]] = OrderedDict()
        self._blamed: set[str] = set()

    def push(self, check: Check) -> Check | None:
        """Returns the check that has to leave for it: of a client that has the most, perhaps `check` itself."""
        line = self._lines.setdefault(check[0], [])
        line.append(check)
        if sum(map(len, self._lines.values())) > MAX_WAITING:
            line = max(reversed(self._lines.values()), key=len)
        elif len(line) <= MAX_OF_CLIENT:
            return None
        refused = line.pop()
        if not line:
            del self._lines[refused[0]]
        return refused

    def take(self) -> Check | None:
        client = next((name for name in self._lines if name not in self._blamed), next(iter(self._lines), None))
        if client is None:
            return None
        line = self._lines.pop(client)
        check = line.pop(0)
        if line:
            self._lines[client] = line
        return check

    def note(self, client: str, *, ended_process: bool) -> None:
        """Note how a check of the client ended. It is blamed until one of its checks ends no process."""
        self._blamed.discard(client)
        if ended_process and len(self._blamed) < MAX_BLAMED:
            self._blamed.add(client)
