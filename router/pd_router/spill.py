"""When a decode node prefills although there are prefill nodes: they queue, and it would finish clearly sooner.

A decode node has spare arithmetic: its steps are bound by reading weights, so a prompt token beside decodes costs half
of what it costs a prefill node (benchmarks/LOG.md). A decode node prefills more slowly, but begins at once.
Pure: reads nodes, changes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_router.node_table import Role
from pd_router.policy import best_prefill

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pd_router.node_table import Node

# Assumed speed of a node without samples, as a share of the best prefill node's.
GUESSES = {Role.PREFILL: 1.0, Role.MIXED: 1.0, Role.DECODE: 0.5}
MARGIN = (
    0.25  # least saving, as a share of the shorter time, that is worth slower decodes (simulated: benchmarks/LOG.md)
)
SLACK_S = 0.03  # least saving in seconds: a step or two of each node, which this estimate does not include


def sooner_node(
    prefills: Sequence[Node], decodes: Iterable[Node], num_bytes: int, num_sequences: int, now_s: float
) -> Node | None:
    """A healthy node of `decodes` that would prefill `num_bytes` clearly sooner than the best prefill node.

    Of several, the one with the fewest generations, unless another is clearly sooner. None: no node would, or the
    prefill node is idle, or the speed of no prefill node is known.

    A node without room for `num_sequences` more is left out: there a prompt waits for another sequence's end, while a
    sequence that is handed over already has its first token.
    """
    first = best_prefill(prefills, now_s)
    if first is None or not first.prefill_bytes:
        return None
    usual = _usual_speed(prefills, now_s)
    if usual is None:
        return None

    def wait_s(node: Node) -> float:
        return (node.prefill_bytes + num_bytes) / _speed(node, usual, now_s)

    ready = [n for n in decodes if n.is_healthy(now_s) and n.has_room(num_sequences)]
    sooner = [n for n in ready if _is_clearly_less(wait_s(n), wait_s(first))]
    if not sooner:
        return None
    best_s = min(map(wait_s, sooner))
    equals = [n for n in sooner if not _is_clearly_less(best_s, wait_s(n))]
    return min(equals, key=lambda n: (n.decode_sequences, wait_s(n)))


def _is_clearly_less(short_s: float, long_s: float) -> bool:
    return long_s - short_s > max(SLACK_S, MARGIN * short_s)


def reading_s(node: Node, prefills: Iterable[Node], now_s: float) -> float | None:
    """Seconds that `node` needs for its outstanding prompt bytes. None: the speed of no prefill node is known."""
    usual = _usual_speed(prefills, now_s)
    return None if usual is None else node.prefill_bytes / _speed(node, usual, now_s)


def _usual_speed(prefills: Iterable[Node], now_s: float) -> float | None:
    """The speed of the fastest prefill node, if known."""
    speeds = (node.speed.at(now_s) for node in prefills)
    return max((speed for speed in speeds if speed is not None), default=None)


def _speed(node: Node, usual: float, now_s: float) -> float:
    speed = node.speed.at(now_s, guess=GUESSES[node.role] * usual)
    assert speed is not None
    return speed
