"""How long a decode node listens to a prefill node that sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pd_cluster.server.requests import prefill_client
from tests.deadlines import HANG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import pytest

T = TypeVar("T")
SOON_S = 0.02


def impatient(monkeypatch: pytest.MonkeyPatch, is_silent: Callable[[str], bool]) -> list[str]:
    """A wait for a node that is silent by order ends at once, and no other on a busy machine.

    `is_silent`: by the node's URL. Returns the URLs of all waits, which grow: each is bounded by itself.
    """
    heard = prefill_client._received
    waits: list[str] = []

    async def noted(url: object, work: Coroutine[None, None, T]) -> T:
        waits.append(str(url))
        monkeypatch.setattr(prefill_client, "PEER_SILENCE_S", SOON_S if is_silent(str(url)) else HANG_S)
        return await heard(url, work)

    monkeypatch.setattr(prefill_client, "_received", noted)
    return waits
