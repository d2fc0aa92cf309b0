"""The engine process: how the API process starts one, and what runs in it.

The configuration travels on the child's standard input, which stays open for as long as the API process lives. The end
of the input tells the engine that its parent is gone, whatever killed it.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from pd_cluster.config import NodeConfig
from pd_cluster.engine.core import EngineCore
from pd_cluster.engine.ipc import EngineSockets, SignsOfLife, send_last_words
from pd_cluster.errors import PdError
from pd_cluster.protocol.messages import EngineDied, EngineReady, StartupProgress
from pd_cluster.scheduling.sequence_room import cache_tokens
from pd_cluster.worker.disk_cache.disk_cache import DiskCache
from pd_connectors.base import ConnectorContext
from pd_connectors.protocol.errors import HandoffError
from pd_connectors.protocol.keys import load_cluster_key
from pd_connectors.registry import create_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping

    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.worker.device_executor import DeviceDescribed

logger = logging.getLogger("pd_cluster.engine")

ORPHAN_EXIT_CODE = 3
STOP_GRACE_S = 8.0  # for ending leases and loads after an order to stop; then the process exits at once
LOSS_GRACE_S = 0.3  # for the step loop to end by itself after a rank was lost
EPOCH_BITS = 52  # JSON readers that use doubles keep such numbers exactly
# On a CPU torch and oneDNN each keep the programs of 1,024 shapes, and each number of tokens in a step is one: 1.2 GB
# after 3,000 steps of varied length, 0.12 GB with 64 of each. A program that is made again costs 0.6 ms.
KEPT_PROGRAMS = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
YOUNG_OBJECTS = 20_000  # more than one step makes: four for each of 1024 sequences; CPython's default is 700
SWITCH_INTERVAL_S = 0.0001  # with CPython's 5 ms the step loop would delay a confirmation by more than a handover takes


def bound_programs(environment: MutableMapping[str, str]) -> None:
    """Limit in `environment` how many compiled programs torch and oneDNN keep: see KEPT_PROGRAMS.

    Call it before torch is imported, because torch reads these variables then. A variable that the operator has set
    stays.
    """
    for name, number in KEPT_PROGRAMS.items():
        environment.setdefault(name, number)


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Exempt the objects that exist now from garbage collection, and collect only after `YOUNG_OBJECTS` new ones.

    The step loop makes no reference cycles, so there is next to nothing to collect. But a step makes more objects than
    CPython's threshold, each collection moves those that are alive to the next generation, and a collection of the
    oldest one reads every cached block and every prompt while all streams stand still. Objects that were
    exempted before stay so.
    """
    young, *older = gc.get_threshold()
    had_exempted = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *older)
    try:
        yield
    finally:
        gc.set_threshold(young, *older)
        if not had_exempted:
            gc.unfreeze()


def spawn_engine(config: NodeConfig, address: str) -> subprocess.Popen[bytes]:
    """Start an engine that connects to the ipc sockets `{address}.in` and `{address}.out`.

    The caller keeps the returned process's `stdin` open for as long as the engine shall live.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pd_cluster.engine.process", address], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it died at once; the caller watches the process and reports that
    return process


class ParentWatch:
    """A thread that reads standard input to its end, then stops the engine: the parent has closed it, or is gone."""

    def __init__(self) -> None:
        self.core: EngineCore | None = None  # None: there is nothing to stop in order
        threading.Thread(target=self._run, name="parent-watch", daemon=True).start()

    def _run(self) -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        if self.core is not None:
            self.core.stop()
            time.sleep(STOP_GRACE_S)
        os._exit(ORPHAN_EXIT_CODE)


def _end_after_loss(address: str, error: PdError) -> None:
    """End the process, whatever its step loop is in: a collective may never return when a rank is gone."""
    send_last_words(address, EngineDied(str(error)))
    time.sleep(LOSS_GRACE_S)
    os._exit(1)


def _describe(config: NodeConfig, address: str, progress: Callable[[str], None], cleanup: ExitStack) -> DeviceDescribed:
    # Imported here, because they import torch: configuration errors are reported before
    from pd_cluster.worker.device_executor import DeviceDescribed

    if config.model.tp > 1:
        from pd_cluster.worker.ranks import Ranks

        signs = SignsOfLife(address)
        cleanup.callback(signs.close)
        on_loss = partial(_end_after_loss, address)
        return DeviceDescribed.over(Ranks(config, f"{address}.rank", on_loss, signs.send), progress)
    return DeviceDescribed.of(config, progress)


def _build(config: NodeConfig, address: str, mailbox: Mailbox, cleanup: ExitStack) -> tuple[EngineCore, EngineReady]:
    from pd_cluster.worker.device_executor import run_phases

    def progress(text: str) -> None:
        mailbox.send(StartupProgress(text))
        mailbox.flush()

    executor = run_phases(_describe(config, address, progress, cleanup), config.cache, progress)
    cleanup.callback(executor.close)
    epoch = secrets.randbits(EPOCH_BITS)
    context = ConnectorContext(
        engine_id=config.server.node_id or f"engine-{secrets.token_hex(4)}",
        epoch=epoch,
        fingerprint=executor.model.fingerprint,
        layout=executor.layout,
        cluster_key=load_cluster_key(config.handoff.cluster_key_file),
        host=config.handoff.advertise_host,
        port=config.handoff.control_port,
        kv_ports=config.handoff.kv_port_range,
        max_readers=config.handoff.max_readers,
        lease_ttl_s=config.handoff.lease_ttl_s,
        read_deadline_s=config.handoff.read_deadline_s,
        options=(
            ("pool_url", config.handoff.pool_url),
            ("pool_segment_gb", config.handoff.pool_segment_gb),
            ("pool_deadline_s", config.handoff.pool_deadline_s),
            ("handoff", config.handoff.pool_handoff),
        ),
    )
    context = replace(context, rank_ports=executor.connect(config.handoff.connector, context))
    connector = create_connector(config.handoff.connector, context)
    cleanup.callback(connector.close)
    connector.register_kv_cache(executor.cache)
    disk = None
    if folder := config.cache.disk_cache_dir:
        disk = DiskCache(Path(folder), int(config.cache.disk_cache_gb * 1e9), context, mailbox.wake)
        cleanup.callback(disk.close)
    core = EngineCore(executor.config, executor, connector, mailbox, disk=disk)
    ready = EngineReady(
        engine_id=context.engine_id,
        epoch=epoch,
        num_blocks=cache_tokens(executor.layout.groups, executor.slabs) // executor.block_size,
        block_size=executor.block_size,
        max_model_len=executor.model.max_model_len,
        fingerprint=context.fingerprint,
        connector=config.handoff.connector,
        control_port=connector.control_port,
        max_num_seqs=executor.config.scheduler.max_num_seqs,
        num_ranks=config.model.tp,
    )
    return core, ready


def main() -> int:
    """Entry point of the child: `python -m pd_cluster.engine.process ADDRESS` with a NodeConfig on standard input."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=NodeConfig)
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for signum in (signal.SIGINT, signal.SIGTERM):  # both may reach the whole group; the API process decides
        signal.signal(signum, signal.SIG_IGN)
    watch = ParentWatch()
    bound_programs(os.environ)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    context = zmq.Context()
    mailbox = EngineSockets(context, sys.argv[1])
    try:
        with ExitStack() as cleanup:
            core, ready = _build(config, sys.argv[1], mailbox, cleanup)
            watch.core = core
            cleanup.enter_context(rare_garbage_collection())
            mailbox.send(ready)
            core.settle()  # a node that is ready has statistics
            core.run()
    except Exception as error:
        expected = isinstance(error, PdError | HandoffError | OSError)
        if not expected:
            logger.exception("the engine died")
        mailbox.send(EngineDied(str(error) if expected else f"{type(error).__name__}: {error}"))
        return 1
    finally:
        mailbox.close()
        context.term()
    return 0


if __name__ == "__main__":
    status = main()
    if "pd_cluster.worker.ranks" in sys.modules:
        # The destructors of a process group may crash: a segmentation fault was seen on two GPUs. All else is closed
        logging.shutdown()
        os._exit(status)
    sys.exit(status)
