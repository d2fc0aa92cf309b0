"""Orders to the engine, which concern no single request, and the answer to the one that takes long."""

from __future__ import annotations

import msgspec


class ResetCache(msgspec.Struct, frozen=True, tag=True):
    """Forget the cached blocks that no request and no lease uses. Requests sent later find none of them."""


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Limit prompts beside decodes as a node of this role does: prefill, decode or mixed."""

    role: str


class StartProfile(msgspec.Struct, frozen=True, tag=True):
    """Record what the worker does, until StopProfile. Ignored while it records."""


class StopProfile(msgspec.Struct, frozen=True, tag=True):
    """End the record and write it to a new file of this directory. Ignored when there is none."""

    directory: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read an adapter on every rank, from a directory that all of them see. Answered by AdapterLoaded.

    Meanwhile streams go on. One that is loaded already is answered at once. One that is being unloaded stays. Not
    answered if an UnloadAdapter or another LoadAdapter of the digest comes before its end.
    """

    digest: str  # that the files must have
    path: str
    number: int = 0  # tells the answer from that to an order before


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests with this adapter from now on. Those that run or wait keep it."""

    digest: str


EngineOrder = ResetCache | SetRole | StartProfile | StopProfile | LoadAdapter | UnloadAdapter


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """Every rank has read the adapter, and requests sent from now on may name it."""

    digest: str
    error: str = ""  # why not: nothing of it was kept
    number: int = 0  # of the order
