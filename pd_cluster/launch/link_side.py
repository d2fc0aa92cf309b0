"""One side of a measured link, and why a slow link is slow. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection


class LinkSide(msgspec.Struct, frozen=True):
    """Where a process and its memory are. `gpu`: the UUID as nvidia-smi writes it; "": host memory."""

    boot_id: str  # of the host's kernel: equal in all of its containers
    pid_namespace: str
    gpu: str = ""

    def slow_cause(self, theirs: LinkSide, gpus_here: Collection[str]) -> str:
        """The likely cause if this side reads slowly. `gpus_here`: the GPUs that this container shows."""
        if self.boot_id != theirs.boot_id:
            return "two hosts, and UCX uses TCP: no RDMA device here or there, or UCX_TLS excludes it"
        if self.pid_namespace != theirs.pid_namespace:
            return "separate PID namespaces on one host: UCX copies over TCP (shareProcessNamespace joins them)"
        if not self.gpu:
            return "this machine is busy"
        if theirs.gpu not in gpus_here:
            return f"this container does not show the other side's GPU {theirs.gpu}, so UCX cannot use NVLink"
        return "UCX_TLS excludes cuda_ipc, or there is no NVLink between these GPUs"
