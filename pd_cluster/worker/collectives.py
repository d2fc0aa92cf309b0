"""The ranks' process group, and the Reduce over it: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import socket
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed has them only in builds with it

if TYPE_CHECKING:
    from pd_cluster.models.shard import Shard
    from pd_kernels.backends import Kernels

# A rank may wait in a collective for another rank's first compilation. A rank that is lost is noticed by RankLink,
# which ends the process, and not by this limit
COLLECTIVE_S = 1800.0
LEAVE_S = 2.0
HOST = "127.0.0.1"
_LOW = (1 << 32) - 1


def open_store(size: int) -> tuple[Store, int]:
    """Rank 0's store, and its port. torch's own listener would accept connections from other hosts."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=COLLECTIVE_S)
    store = TCPStore(
        HOST, port, size, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect_store(size: int, port: int) -> Store:
    """Another rank's connection to the store."""
    return TCPStore(HOST, port, size, is_master=False, timeout=timedelta(seconds=COLLECTIVE_S))


class GroupReduce:
    """The Reduce over a process group. On CPUs it adds in the order of ranks; NCCL gives all ranks the same bits."""

    def __init__(self, shard: Shard, store: Store, device: torch.device, kernels: Kernels) -> None:
        """Join the group. Returns when every rank has joined."""
        self._size, self._device, self._kernels = shard.size, device, kernels
        self._is_nccl = device.type == "cuda"
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")  # the ranks of a node share a host
        dist.init_process_group(
            "nccl" if self._is_nccl else "gloo", store=store, rank=shard.rank, world_size=shard.size,
            timeout=timedelta(seconds=COLLECTIVE_S), device_id=device if self._is_nccl else None,
        )  # fmt: skip
        if not self._is_nccl:
            dist.barrier()  # gloo returns when this rank is connected: one that left then held another for COLLECTIVE_S

    def add(self, partial: torch.Tensor) -> torch.Tensor:
        if self._is_nccl:
            partial = partial.contiguous()
            dist.all_reduce(partial)
            return partial
        total, *others = self._parts(partial)
        for part in others:
            total += part
        return total

    def add_norm(self, partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        return self._kernels.add_rms_norm(self.add(partial), residual, norm, eps)[0]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._parts(part), dim=1)

    def best(self, scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        keys = keys_of(scores, token_ids)
        dist.all_reduce(keys, op=dist.ReduceOp.MAX)
        return ids_of(keys)

    def broadcast(self, values: torch.Tensor) -> None:
        dist.broadcast(values, src=0)

    def agree(self, is_ready: bool) -> bool:
        """Whether every rank is ready."""
        flag = torch.tensor([is_ready], dtype=torch.int32, device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def close(self) -> None:
        """Leave the group, in at most LEAVE_S: NCCL may wait for graphs and peers that still have the group."""
        leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
        leaving.start()
        leaving.join(LEAVE_S)

    def _parts(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `part`, in the order of ranks."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self._size)]
        dist.all_gather(parts, part.contiguous())
        return parts


def keys_of(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64 [R], in the order of `scores` (float32 [R]), of equal ones in the opposite order of `token_ids`.

    One maximum of 8 bytes a row decides. The high half has the score's bits as an integer of the same order, the low
    half the complement of the id.
    """
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0, which equals it and has other bits
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (ordered << 32) | (_LOW - token_ids)


def ids_of(keys: torch.Tensor) -> torch.Tensor:
    """The `token_ids` of `keys_of`."""
    return _LOW - (keys & _LOW)
