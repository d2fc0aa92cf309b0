"""Measures a real NIXL transfer between two processes. Run as a module, because native code may crash or hang: then
only this process does.

    python -m pd_cluster.launch.transfer_check serve HOST PORTS           prints a line that describes this side, and
                                                                          serves its memory until standard input ends;
                                                                          if that is /dev/null, until a signal
    python -m pd_cluster.launch.transfer_check read HOST PORTS [FILE]     prints {"bytes": ..., "seconds": ..., ...} or
                                                                          {"error": ...}

HOST: the node's --advertise-host. PORTS: its --kv-ports, may be empty. FILE: has the other side's line; without it, the
other side is a process of this machine, on its last GPU where there are several.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from pd_cluster.config import HandoffConfig
from pd_cluster.launch.link_side import LinkSide
from pd_cluster.launch.node_plan import visible_gpus
from pd_cluster.worker.plain_memory import plain_memory
from pd_connectors.nixl.agent import NixlAgent, Region
from pd_connectors.nixl.machine import listening_sockets, local_network
from pd_connectors.protocol.errors import HandoffError
from pd_connectors.protocol.slices import SliceRead

if TYPE_CHECKING:
    from pd_connectors.nixl.agent import Remote

NUM_BLOCKS = 256
BLOCK_BYTES = 1 << 20
PATTERN = 167  # every byte of the other process's memory
READ_DEADLINE_S = 20.0
POLL_S = 0.0005
PEER_STOP_S = 5.0


class _Description(msgspec.Struct):
    metadata: bytes
    regions: tuple[Region, ...]
    side: LinkSide


def main() -> int:
    """Entry point."""
    _, command, host, ports, *link = sys.argv
    if command == "serve":
        return _serve(host, ports)
    sys.stdout.write(
        json.dumps(_measure(Path(link[0]).read_text(encoding="utf-8"), host, ports) if link else _read(host, ports))
        + "\n"
    )
    return 0


def _serve(host: str, ports: str) -> int:
    memory = _memory(PATTERN)  # referenced here, because the agent does not keep it alive
    agent = _agent(memory, host, ports)
    description = msgspec.msgpack.encode(_Description(agent.metadata(), agent.regions, _side(memory)))
    sys.stdout.write(description.hex() + "\n")
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        if stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode) and not sys.stdin.isatty():
            signal.pause()  # /dev/null, as of a container or a service: its end says nothing
        sys.stdin.read()  # until the reading process closes it or dies
    return 0


def _read(host: str, ports: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "pd_cluster.launch.transfer_check", "serve", host, ports]
    gpus = visible_gpus(os.environ)
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[-1]} if len(gpus) > 1 else None
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    try:
        assert peer.stdout is not None
        return _measure(peer.stdout.readline(), host, ports)
    finally:
        try:
            peer.communicate(timeout=PEER_STOP_S)
        except subprocess.TimeoutExpired:
            peer.kill()
            peer.wait()


def _measure(link: str, host: str, ports: str) -> dict[str, Any]:
    """Read all memory of the side that `link` describes. -> the result, as this module prints it."""
    try:
        return _timed(msgspec.msgpack.decode(bytes.fromhex(link), type=_Description), host, ports)
    except (ValueError, msgspec.MsgspecError) as error:
        return {"error": f"the other side's line cannot be read: {error}"}
    except HandoffError as error:
        return {"error": str(error)}


def _timed(theirs: _Description, host: str, ports: str) -> dict[str, Any]:
    memory = _memory(0)
    agent = _agent(memory, host, ports)
    remote = agent.connect(theirs.metadata, theirs.regions, (SliceRead(0, 0, 0, 0, 0, BLOCK_BYTES),))
    _finish(agent, agent.post_warm_up(remote))
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    seconds = min(_timed_read(agent, remote, order) for _ in range(3))
    if not bool((memory == PATTERN).all()):
        return {"error": "the bytes received differ from those sent"}
    return {
        "bytes": NUM_BLOCKS * BLOCK_BYTES,
        "seconds": seconds,
        "device": memory.device.type,
        "slow_cause": _side(memory).slow_cause(theirs.side, visible_gpus({})),
        "listeners": listening_sockets(),
    }


def _side(memory: torch.Tensor) -> LinkSide:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    gpu = f"GPU-{torch.cuda.get_device_properties(memory.device).uuid}" if memory.is_cuda else ""
    return LinkSide(boot_id, os.readlink("/proc/self/ns/pid"), gpu)


def _agent(memory: torch.Tensor, host: str, ports: str) -> NixlAgent:
    network = local_network(host, HandoffConfig(kv_ports=ports).kv_port_range)
    return NixlAgent(f"check-{secrets.token_hex(8)}", [memory], network)


def _timed_read(agent: NixlAgent, remote: Remote, order: list[int]) -> float:
    start_s = time.perf_counter()
    _finish(agent, agent.post_read(remote, (tuple(order),), (tuple(range(NUM_BLOCKS)),)))
    return time.perf_counter() - start_s


def _finish(agent: NixlAgent, handle: int) -> None:
    deadline_s = time.monotonic() + READ_DEADLINE_S
    while not agent.is_done(handle):
        if time.monotonic() > deadline_s:
            raise HandoffError(f"a read did not finish within {READ_DEADLINE_S:g} s")
        time.sleep(POLL_S)
    agent.release(handle)


def _memory(value: int) -> torch.Tensor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with plain_memory(device):  # as a node's cache
        return torch.full((NUM_BLOCKS, BLOCK_BYTES), value, dtype=torch.uint8, device=device)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Does not unload libraries: where the system's libefa is installed, NIXL's libibverbs meets the system's, and the
    # process crashes at exit although the transfer worked.
    os._exit(status)
