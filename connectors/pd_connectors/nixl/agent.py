"""A thin, typed wrapper of NIXL's agent: registration, endpoints, reads.

It calls NIXL 1.5's bindings, not its Python API: that one starts the progress thread with no delay, which burns 0.7 to
0.9 of a core per idle engine (measured; with 1 ms 0.02, at equal throughput). UCX_TLS stays as the operator set it,
normally unset: a list without tcp breaks UCX's own error handling.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pd_connectors.nixl.machine import check_free_port, listening_sockets
from pd_connectors.nixl.resets import drop_resets
from pd_connectors.protocol.errors import ConnectorUnavailable, HandoffError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from numpy.typing import NDArray

    from pd_connectors.nixl.network import KvNetwork
    from pd_connectors.protocol.slices import SliceRead
    from pd_connectors.transport import GroupIds

_Place = tuple[int, int, int]  # group, offset in a block, number of bytes

PROGRESS_DELAY_US = 1000
WARM_UP_BYTES = 64


class NixlError(HandoffError):
    """A NIXL call failed. The message names the call and NIXL's own error."""


class EndpointFailed(NixlError):
    """UCX has given the connection up: no read over it is under way any more."""


class MayStillLand(NixlError):
    """A read failed, but parts of it may still be written into our memory: keep `handle`, and see `post_warm_up`.

    NIXL keeps the first error of a read and never looks at that read again. After a post that failed half way, NIXL has
    no record of the descriptors that it did post. So of all errors only the failure of the whole endpoint is terminal.
    """

    def __init__(self, text: str, handle: int) -> None:
        super().__init__(text)
        self.handle = handle


class Region(msgspec.Struct, frozen=True):
    """A cache tensor, of one group: `num_blocks` blocks of `block_bytes`, the first at `base`, each contiguous."""

    base: int
    num_blocks: int
    block_bytes: int
    stride: int  # bytes from one block to the next; other groups' blocks may lie in the same memory
    segment: str  # "DRAM" or "VRAM"
    device: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """The region of a tensor [num_blocks, ...], of which each block is contiguous."""
        assert tensor[0].is_contiguous(), tensor.stride()
        return cls(
            base=tensor.data_ptr(),
            num_blocks=tensor.shape[0],
            block_bytes=tensor[0].nbytes,
            stride=tensor.stride(0) * tensor.element_size(),
            segment="VRAM" if tensor.is_cuda else "DRAM",
            device=tensor.get_device() if tensor.is_cuda else 0,
        )


@dataclass(frozen=True, slots=True)
class Remote:
    """Another agent, ready to be read. The lists are NIXL's handles of the blocks' slices that are read, and filled."""

    name: str
    regions: tuple[Region, ...]
    slices: tuple[SliceRead, ...]
    block_list: int
    own_list: int


class NixlAgent:
    """One agent over the tensors of one cache. Not thread-safe: one thread at a time.

    name: unique among all agents that can connect. network: where UCX may listen.
    Raises ConnectorUnavailable when NIXL is missing or does not start, or no port of the network is free.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], network: KvNetwork) -> None:
        self.name = name
        self._bind = _bindings()
        self._scratch = bytearray(WARM_UP_BYTES)
        self._scratch_base = np.frombuffer(self._scratch, np.uint8).ctypes.data
        self.regions = tuple(map(Region.of, tensors))
        self._own_lists: dict[tuple[_Place, ...], int] = {}  # one for each way in which peers cut their heads
        config = self._bind.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PROGRESS_DELAY_US
        check_free_port(network)
        try:
            self._agent = self._bind.nixlAgent(name, config)
            before = set(listening_sockets())
            with _environment(network.settings):
                self._backends = [self._agent.createBackend("UCX", {})]
            self.listeners = tuple(set(listening_sockets()) - before)  # UCX's
            drop_resets(self.listeners)
            for base, num_bytes in {(s.data_ptr(), s.nbytes()) for s in (each.untyped_storage() for each in tensors)}:
                self._register(self.regions[0].segment, base, num_bytes, self.regions[0].device)
            self._register("DRAM", self._scratch_base, WARM_UP_BYTES, 0)
        except Exception as error:
            raise ConnectorUnavailable(f"NIXL did not start: {type(error).__name__}: {error}") from error

    def metadata(self) -> bytes:
        """The metadata that `connect` on another agent needs, beside the regions."""
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes, regions: tuple[Region, ...], slices: tuple[SliceRead, ...]) -> Remote:
        """Load another agent, or this one itself (a node that reads its own lease). Raises NixlError.

        slices: the part of each block that is read, at most one a group; groups without are not read from there.
        """
        try:
            name = self.name
            if metadata != self.metadata():
                name = self._agent.loadRemoteMD(metadata).decode()
        except Exception as error:
            raise NixlError(f"connect: {type(error).__name__}: {error}") from error
        try:
            own_list = self._own_list(slices)
            places = [(part.group, part.remote_offset, part.num_bytes) for part in slices]
            return Remote(name, regions, slices, self._list_blocks(name, regions, places), own_list)
        except Exception as error:
            self.disconnect(name)
            raise NixlError(f"connect: {type(error).__name__}: {error}") from error

    def disconnect(self, name: str) -> None:
        """Forget another agent; UCX closes its endpoint. Raises NixlError."""
        if name == self.name:
            return
        try:
            self._agent.invalidateRemoteMD(name)
        except Exception as error:
            raise NixlError(f"disconnect: {type(error).__name__}: {error}") from error

    def forget_blocks(self, remote: Remote) -> None:
        """Free the block list of a disconnected agent. Raises NixlError."""
        try:
            self._agent.releasedDlistH(remote.block_list)
        except Exception as error:
            raise NixlError(f"forget_blocks: {type(error).__name__}: {error}") from error

    def post_warm_up(self, remote: Remote) -> int:
        """Start reading a few bytes into memory of its own. Returns a handle. Raises as `post_read` does.

        The first read of an endpoint takes 5 to 40 ms longer. And it is a fence: with each read NIXL's UCX backend
        flushes the endpoint, so when it is done, so is every read of the endpoint that was posted before it.
        """
        bind, there = self._bind, remote.regions[0]
        try:
            handle = self._agent.createXferReq(
                bind.NIXL_READ,
                bind.nixlXferDList(bind.DRAM_SEG, [(self._scratch_base, WARM_UP_BYTES, 0)]),
                bind.nixlXferDList(_segment(bind, there.segment), [(there.base, WARM_UP_BYTES, there.device)]),
                remote.name,
                b"",
                self._backends,
            )
        except Exception as error:
            raise self._refusal("warm-up", error) from error
        return self._post(int(handle))

    def post_read(self, remote: Remote, theirs: GroupIds, ours: GroupIds) -> int:
        """Start reading blocks `theirs` of the remote cache into our blocks `ours`, in every group of `remote.slices`.

        Returns a handle.

        Raises MayStillLand when a part of the read may be under way. Raises another NixlError when no part is: NIXL
        posted nothing, or the endpoint has failed (EndpointFailed).

        Between processes of one host UCX copies inside this call (CMA), with the GIL released. NIXL joins neighbours:
        256 blocks that are consecutive on both sides are one descriptor.
        """
        groups = [part.group for part in remote.slices]
        remote_places, local_places = _places(remote.regions, groups, theirs), _places(self.regions, groups, ours)
        try:
            handle = self._agent.makeXferReq(
                self._bind.NIXL_READ,
                remote.own_list,
                local_places,
                remote.block_list,
                remote_places,
                b"",
                self._backends,
                False,
            )
        except Exception as error:
            raise self._refusal("post_read", error) from error
        return self._post(int(handle))

    def is_done(self, handle: int) -> bool:
        """Whether every byte is in. Raises EndpointFailed, after which the read is terminal too, or MayStillLand."""
        try:
            status = self._agent.getXferStatus(handle)
        except Exception as error:
            raise self._failure("read", handle, error) from error
        if status not in (self._bind.NIXL_SUCCESS, self._bind.NIXL_IN_PROG):
            raise MayStillLand(f"read: {status}", handle)
        return bool(status == self._bind.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Free a terminal read's handle, or abort one that is not. Raises NixlError when NIXL cannot."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception as error:
            raise NixlError(f"release: {type(error).__name__}: {error}") from error

    def _post(self, handle: int) -> int:
        try:
            status = self._agent.postXferReq(handle, b"")
        except Exception as error:
            failure = self._failure("post", handle, error)
            if not isinstance(failure, MayStillLand):
                self.release(handle)
            raise failure from error
        if status not in (self._bind.NIXL_SUCCESS, self._bind.NIXL_IN_PROG):
            raise MayStillLand(f"post: {status}", handle)
        return handle

    def _failure(self, call: str, handle: int, error: Exception) -> NixlError:
        """Classify the failure of a read that was, or may have been, posted."""
        refusal = self._refusal(call, error)
        return refusal if isinstance(refusal, EndpointFailed) else MayStillLand(str(refusal), handle)

    def _refusal(self, call: str, error: Exception) -> NixlError:
        """Classify an error of a call that posted nothing.

        The first read that is looked at says that the peer has disconnected. NIXL then forgets the peer by itself, and
        says of the endpoint's other reads that it was not found. (We never make it forget a peer that is read.)
        """
        is_over = isinstance(error, (self._bind.nixlRemoteDisconnectError, self._bind.nixlNotFoundError))
        return (EndpointFailed if is_over else NixlError)(f"{call}: {type(error).__name__}: {error}")

    def _register(self, segment: str, base: int, num_bytes: int, device: int) -> None:
        regions = self._bind.nixlRegDList(_segment(self._bind, segment), [(base, num_bytes, device, "")])
        self._agent.registerMem(regions, self._backends)

    def _own_list(self, slices: Sequence[SliceRead]) -> int:
        places = tuple((part.group, part.local_offset, part.num_bytes) for part in slices)
        if places not in self._own_lists:
            self._own_lists[places] = self._list_blocks(self._bind.NIXL_INIT_AGENT, self.regions, places)
        return self._own_lists[places]

    def _list_blocks(self, agent: str, regions: Sequence[Region], places: Sequence[_Place]) -> int:
        """One list over all groups, group after group, so that one read, with one handle and one end, covers them all.

        places: the part of a block that is read, by group.
        """
        rows = np.zeros((sum(regions[group].num_blocks for group, _, _ in places), 3), np.uint64)
        start = 0
        for group, offset, num_bytes in places:
            region = regions[group]
            part = rows[start : start + region.num_blocks]
            part[:, 0] = np.arange(region.num_blocks, dtype=np.uint64) * np.uint64(region.stride)
            part[:, 0] += np.uint64(region.base + offset)
            part[:, 1] = num_bytes
            part[:, 2] = region.device
            start += region.num_blocks
        blocks = self._bind.nixlXferDList(_segment(self._bind, regions[0].segment), rows)
        return int(self._agent.prepXferDlist(agent, blocks, self._backends))


def _places(regions: Sequence[Region], groups: Sequence[int], ids: GroupIds) -> NDArray[np.int32]:
    """Where the blocks `ids` lie in the list of these groups' blocks. Raises NixlError for ids outside their region."""
    places, start = [], 0
    for region, group_ids in ((regions[group], ids[group]) for group in groups):
        if group_ids and not 0 <= min(group_ids) <= max(group_ids) < region.num_blocks:
            raise NixlError(f"post_read: block ids outside 0..{region.num_blocks - 1}")
        places.append(np.asarray(group_ids, np.int32) + start)
        start += region.num_blocks
    found = np.concatenate(places)
    if not found.size:
        raise NixlError("post_read: no blocks")
    return found


def _segment(bind: Any, name: str) -> Any:
    return bind.VRAM_SEG if name == "VRAM" else bind.DRAM_SEG


@contextmanager
def _environment(settings: Sequence[tuple[str, str]]) -> Iterator[None]:
    """The process's environment with `settings`, for the length of the block.

    UCX reads it when a backend is created. NIXL's own option for UCX settings splits at commas, which lists have.
    """
    before = {name: os.environ.get(name) for name, _ in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _bindings() -> Any:
    """NIXL's compiled module. Its log is reduced: a peer's death is reported as our error value."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    try:
        from nixl_cu13 import _bindings as bind
    except ImportError as error:
        raise ConnectorUnavailable(f"NIXL is not installed (pip install 'pd-cluster[nixl]'): {error}") from error
    return bind
