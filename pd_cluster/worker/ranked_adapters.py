"""The adapters in host memory, on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.worker.rank_frames import AdapterFrame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.worker.adapter_store import AdapterStore
    from pd_cluster.worker.ranks import Ranks


class RankedAdapters:
    """See HeldAdapters. `store`: that of this rank; None: adapters are off. `ranks`: the others; None: there are none,
    or this is one of them.
    """

    def __init__(self, store: AdapterStore | None, ranks: Ranks | None) -> None:
        self._store, self._ranks = store, ranks

    def read(self, digest: str, path: str, done: Callable[[str, int], None]) -> None:
        if self._ranks is not None:
            self._ranks.link.reads[digest] = len(self._ranks.link.ports), done
        self._order(digest, path, done)

    def drop(self, digest: str) -> None:
        self._order(digest, "", lambda error, num_bytes: None)

    def _order(self, digest: str, path: str, told: Callable[[str, int], None]) -> None:
        if self._ranks is not None:
            self._ranks.link.send(AdapterFrame(digest, path))
        self.take(digest, path, told)

    def take(self, digest: str, path: str, told: Callable[[str, int], None]) -> None:
        """The part of `read` that every rank runs; without a path that of `drop`."""
        assert self._store is not None, "adapters are off"
        if path:
            self._store.begin(digest, path, told)
        else:
            self._store.drop(digest)
