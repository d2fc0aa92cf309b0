"""What the workers of a router and their supervisor tell each other: lines of JSON on a socket pair.

worker                                        supervisor
  (starts)                                ◄──  State      what orders changed, sources reported
  Ready      it has applied that, polled  ──►
             the nodes, does not accept   ◄──  Go         from now on changes wait for its Applied
  Serving    it accepts                   ──►
  Known      by sources, when it changes  ──►
  Commit     of an order                  ──►
                                          ◄──  State      to every worker, in one order
  Applied                                 ──►
                                          ◄──  Committed  when every worker has applied it, or has ended
  Ask        for /metrics, /nodes         ──►
                                          ◄──  Asked      to every other worker
  Reported                                ──►
  Alive      every ALIVE_S                ──►
  Used       of limits of API keys        ──►
                                          ◄──  UsedBy     to every other worker
                                          ◄──  AllTold    when all have answered or ended, or time is over
"""

from __future__ import annotations

from typing import Any

import msgspec

from pd_router.admission.key_limits import KeyUsage
from pd_router.sources.base import NamedNode
from pd_router.sources.node_change import NodeChange, RestartState

# In a worker's environment: NUMBER:FD:COUNT, its end of the socket pair, and how many before it were found frozen
WORKER_ENV = "PD_ROUTER_WORKER"
ALIVE_S = 1.0
MAX_LINE_BYTES = 64 << 20  # a worker's /metrics with thousands of nodes


class State(msgspec.Struct, tag=True, frozen=True):
    version: int
    restart_state: RestartState


class Go(msgspec.Struct, tag=True, frozen=True):
    pass


class Committed(msgspec.Struct, tag=True, frozen=True):
    id: int
    is_refused: bool = False  # a successor has been sent the state before it


class Asked(msgspec.Struct, tag=True, frozen=True):
    worker: int  # that asks
    id: int
    topic: str


class AllTold(msgspec.Struct, tag=True, frozen=True):
    id: int
    answers: dict[int, Any]  # by worker; None: it did not answer in time


class Ready(msgspec.Struct, tag=True, frozen=True):
    pass


class Serving(msgspec.Struct, tag=True, frozen=True):
    pass


class Alive(msgspec.Struct, tag=True, frozen=True):
    pass


class Known(msgspec.Struct, tag=True, frozen=True):
    nodes: dict[str, tuple[NamedNode, ...]]  # by source: in use at this worker


class Commit(msgspec.Struct, tag=True, frozen=True):
    id: int
    change: NodeChange


class Applied(msgspec.Struct, tag=True, frozen=True):
    version: int


class Ask(msgspec.Struct, tag=True, frozen=True):
    id: int
    topic: str


class Reported(msgspec.Struct, tag=True, frozen=True):
    worker: int  # that asked
    id: int
    answer: Any


class Used(msgspec.Struct, tag=True, frozen=True):
    usage: KeyUsage  # of API keys, since the last message


class UsedBy(msgspec.Struct, tag=True, frozen=True):
    worker: int
    usage: KeyUsage | None  # None: the worker has ended, and so have its requests


ToWorker = State | Go | Committed | Asked | AllTold | UsedBy
ToSupervisor = Alive | Ready | Serving | Known | Commit | Applied | Ask | Reported | Used


def line_of(message: ToWorker | ToSupervisor) -> bytes:
    return msgspec.json.encode(message) + b"\n"
