"""The mean context of streams, of the nodes that tell theirs: what the others' streams are taken for."""

from __future__ import annotations

from pd_router.nodes.ledger import USUAL_CONTEXT

MEMORY = 16  # words of nodes that decide the mean: a newer one weighs a part in so many


class ToldContext:
    """Tokens of one stream. During an upgrade, a node that counted fewer than others would get the long ones."""

    __slots__ = ("_is_told", "mean")

    def __init__(self) -> None:
        self.mean = float(USUAL_CONTEXT)
        self._is_told = False

    def note(self, num_context: int, num_streams: int) -> None:
        """Note a node's word, which is one of nothing while it has no streams."""
        if num_context > 0 < num_streams:
            share = 1 / MEMORY if self._is_told else 1.0
            self.mean += (num_context / num_streams - self.mean) * share
            self._is_told = True
