"""The role of this node. It is a policy, so an order can change it while requests run.

The node serves every kind of request in every role: one that a router sent before it learned of the change is answered.
What changes is what routers send here, and how far prompts may hold up streams (`Targets.on`).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import InvalidRequest, RoleMoved
from pd_cluster.protocol.orders import SetRole
from pd_connectors.protocol.ticket import NOT_SEEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.protocol.messages import ToEngine

logger = logging.getLogger("pd_cluster.server")
ROLES = ("prefill", "decode", "mixed")


class NodeRole:
    """The present role, and how many requests of earlier roles still run. `on_change` is called after each change."""

    def __init__(
        self, name: str, send: Callable[[ToEngine], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.changes = 0  # since the node's start: routers tell a newer word from an older one by it
        self.num_draining = 0  # requests that arrived under an earlier role
        self.on_change: Callable[[], None] = lambda: None
        self._send = send
        self._clock = clock
        self._order: tuple[str, str, float] | None = None  # the last one: its sender and reason, when it came
        self._num_running = 0  # requests that arrived under this role
        self._is_due = False  # the engine gets the role when `num_draining` is 0

    def change(self, name: str, sender: str = "", reason: str = "", seen_changes: int = NOT_SEEN) -> None:
        """Routers learn the new role at once, so that no more work of the old one comes. Idempotent.

        A limit for the sake of streams is set at once, and lifted only when the streams of the old role have ended.
        Raises InvalidRequest for a word that is no role, RoleMoved if the sender saw another number of changes: its
        reasons are those of a state that is over. The role that it wants it may have all the same.
        """
        if name not in ROLES:
            raise InvalidRequest(f"bad role {name!r}: write one of {', '.join(ROLES)}")
        is_late = seen_changes not in (NOT_SEEN, self.changes)
        if is_late and name != self.name:
            raise RoleMoved(
                f"its role has changed {self.changes} times, the sender of the order saw {seen_changes}: it is "
                f"{self.name} now, by {self._order[0] or 'an operator' if self._order else 'its command line'}"
            )
        if not is_late:
            self._order = (sender, reason, self._clock())
        if name == self.name:
            return
        self.num_draining += self._num_running
        self._num_running = 0
        logger.info(
            "role: %s, no longer %s, by %s%s; %d requests of before run on",
            name, self.name, sender or "an operator", f" ({reason})" if reason else "", self.num_draining,
        )  # fmt: skip
        self.name = name
        self.changes += 1
        self._is_due = True
        if name == "decode" or not self.num_draining:
            self._tell_engine()
        self.on_change()

    def take(self) -> int:
        """Count a request that arrives. Returns what `drop` needs at its end."""
        self._num_running += 1
        return self.changes

    def drop(self, changes: int) -> None:
        if changes == self.changes:
            self._num_running -= 1
            return
        self.num_draining -= 1
        if self._is_due and not self.num_draining:
            self._tell_engine()

    def report(self) -> dict[str, Any]:
        """The fields of /health, and of the answer to a role order."""
        order = None  # an order, or none: told in any case, so that routers tell this release from earlier ones
        if self._order is not None:  # an age, because clocks differ
            sender, reason, at_s = self._order
            order = {"sender": sender, "reason": reason, "age_s": round(self._clock() - at_s, 1)}
        counts = {"role_changes": self.changes, "num_draining": self.num_draining}
        return {"role": self.name, **counts, "role_order": order}

    def _tell_engine(self) -> None:
        self._is_due = False
        self._send(SetRole(self.name))
