"""The process that `fork_server` talks to, and what its children do until they run a command.

`python -P -m tests.forked_command FD all|none FILLER`: FD is the socket on which starts are ordered, then comes what is
imported before, and FILLER is room for the command lines that children show. If FD is a socket that listens, any number
of clients may connect to it, and the end of standard input ends the server.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tests.forking_server import MAX_ORDER_BYTES, ForkingServer
from tests.nursery import Nursery

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import NodeConfig

CLI_MODULE = "pd_cluster.launch.cli"
ENGINE_MODULE, RANK_MODULE = "pd_cluster.engine.process", "pd_cluster.worker.rank"
NODES = ("prefill", "decode", "mixed")
ENGINE_HOOK_ENV, NODE_HOOK_ENV = "PD_TEST_ENGINE_HOOK", "PD_TEST_NODE_HOOK"
PROGRESS_DELAY_US = 10_000  # the product's 1,000 take 1% of a core for each node that idles
FORK_SAFE_THREAD = "jemalloc_bg_thd"  # of pyarrow, if transformers finds it; jemalloc takes its locks around a fork
# What the commands of nodes and routers import by the time that they are ready
MODULES = (
    "torch",
    "numpy.random",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen3.configuration_qwen3",
    "transformers.tokenization_utils_tokenizers",
    "encodings.idna",
    "fastapi",
    "httpcore",
    "llguidance",
    "pydantic.v1",
    "uvicorn.lifespan.on",
    "uvicorn.loops.uvloop",
    CLI_MODULE,
    ENGINE_MODULE,
    RANK_MODULE,
    "pd_cluster.launch.node_process",
    "pd_cluster.launch.preflight",
    "pd_cluster.launch.node_commands",
    "pd_cluster.models.llama",
    "pd_cluster.server.app",
    "pd_cluster.server.state",
    "pd_cluster.worker.device_executor",
    "pd_connectors.nixl.connector",
    "pd_router.cli",
)


class Command:
    """`python -m MODULE ARGUMENTS` in the child that runs it."""

    def __init__(
        self, module: str, arguments: list[str], environment: dict[str, str], cwd: str, streams: list[int]
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._environment = environment
        self._cwd = cwd
        self._streams = streams

    def run(self) -> None:
        """Raises what the module raises, such as SystemExit with its status."""
        os.chdir(self._cwd)
        sys.path.insert(0, self._cwd)  # as -m does
        for number, fd in enumerate(self._streams):
            os.dup2(fd, number)
            os.close(fd)
        renew(self._environment)
        if self._module == CLI_MODULE and self._arguments[0] in NODES:
            fork_engine(self._arguments)
        elif self._module == CLI_MODULE and self._arguments[0] == "up":
            asyncio.create_subprocess_exec = Nursery(run_nursed).create_subprocess_exec  # type: ignore[assignment]
        run_module(self._module, [], self._arguments)


class Spare:
    """A child of the node that is forked before the node has a thread, and becomes its engine when one is spawned.

    So does a child of the engine become a rank. It ends when its parent ends without ordering it.
    """

    def __init__(self, name: str, become: Callable[[dict[str, Any]], None]) -> None:
        """`become`: called in the child with what it is told; it raises SystemExit, as a process of its own does."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if self._pid == 0:
            self._orders.close()
            become(_wait_for_order(name, theirs))
        theirs.close()

    def spawn(self, start: object, **told: str) -> Spawned:
        """`start`: comes as the first line of its standard input."""
        import msgspec

        theirs, ours = os.pipe()
        with self._orders, suppress(BrokenPipeError):
            socket.send_fds(self._orders, [json.dumps({**told, "environment": dict(os.environ)}).encode()], [theirs])
        os.close(theirs)
        child = Spawned(self._pid, ours)
        with suppress(BrokenPipeError):
            child.stdin.write(msgspec.json.encode(start) + b"\n")
            child.stdin.flush()
        return child


class Spawned:
    """What a node and an engine use of `subprocess.Popen`, for a child that exists already."""

    def __init__(self, pid: int, stdin: int) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if timeout is not None and self.returncode is None:
            pidfd, ends = os.pidfd_open(self.pid), select.poll()
            try:
                ends.register(pidfd, select.POLLIN)
                if not ends.poll(timeout * 1000):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            finally:
                os.close(pidfd)
        status = self._look(0)
        assert status is not None
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork_engine(arguments: list[str]) -> None:
    """This process is to become a node: its engine is forked from it. Call it before it has a thread."""
    tp = max([1, *(int(one.partition("=")[2]) for one in arguments if one.startswith("--tp="))])
    engine = Spare("engine", lambda told: _become_engine(told, num_others=tp - 1))

    def spawn(config: NodeConfig, address: str) -> Spawned:
        return engine.spawn(config, address=address)

    importlib.import_module(ENGINE_MODULE).spawn_engine = spawn  # type: ignore[attr-defined]
    call_hook(NODE_HOOK_ENV)


def fork_ranks(count: int) -> None:
    """This process is to become an engine: its other ranks are forked from it. Call it before it has a thread."""
    spares = [Spare("rank", _become_rank) for _ in range(count)]
    ranks: Any = importlib.import_module("pd_cluster.worker.ranks")
    execute = ranks.Ranks._spawn

    def spawn(self: Any, rank: int, store_port: int) -> Any:
        if not spares:
            return execute(self, rank, store_port)
        return spares.pop().spawn(ranks.RankStart(self.config, rank, self._address, store_port))

    ranks.Ranks._spawn = spawn


def call_hook(name: str) -> None:
    """The function that this variable names, if it is set."""
    if hook := os.environ.get(name):
        module, _, function = hook.partition(":")
        getattr(importlib.import_module(module), function)()


def run_nursed(arguments: list[str], environment: dict[str, str]) -> None:
    """What `up` has started, as `python -P -m pd_cluster.launch.cli ARGUMENTS`. Raises SystemExit."""
    del sys.path[0]  # because of -P
    renew(environment)
    if arguments[0] in NODES:
        fork_engine(arguments)
    run_module(CLI_MODULE, ["-P"], arguments)


def _wait_for_order(name: str, orders: socket.socket) -> dict[str, Any]:
    """What it is told, once standard input and the environment are as ordered. Never returns when its parent ends."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    show_command([sys.executable, "-c", f"a spare {name}"])
    with orders:
        order, fds, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 1)
    if not order:
        os._exit(0)
    for number, handler in before.items():
        signal.signal(number, handler)
    os.dup2(fds[0], 0)
    os.close(fds[0])
    told: dict[str, Any] = json.loads(order)
    renew(told["environment"])
    return told


def _become_engine(told: dict[str, Any], num_others: int) -> None:
    """As `python -P -m pd_cluster.engine.process ADDRESS`."""
    del sys.path[0]  # because of -P
    fork_ranks(num_others)
    call_hook(ENGINE_HOOK_ENV)
    run_module(ENGINE_MODULE, ["-P"], [told["address"]])


def _become_rank(told: dict[str, Any]) -> None:
    """As `python -P -m pd_cluster.worker.rank`, which the engine's path and environment are made for already."""
    run_module(RANK_MODULE, ["-P"], [])


def renew(environment: dict[str, str]) -> None:
    """Give a forked process what an executed one has of its own: environment, standard input, random numbers."""
    os.environ.clear()
    os.environ.update(environment)
    open_input()
    tempfile.tempdir = None  # it was chosen by the environment
    if "torch" in sys.modules:
        sys.modules["numpy"].random.seed()  # `random` does so itself
        sys.modules["torch"].default_generator.seed()


def open_input() -> None:
    """Read standard input from what it is now, as it is read at the start of the interpreter."""
    before: Any = sys.stdin
    buffer: Any = os.fdopen(0, "rb", closefd=False)
    buffer.raw.name = before.name
    stdin: Any = io.TextIOWrapper(
        buffer, before.encoding, before.errors, None, before.line_buffering, before.write_through
    )
    stdin.mode = before.mode
    sys.stdin = sys.__stdin__ = stdin  # type: ignore[misc]


def run_module(module: str, flags: list[str], arguments: list[str]) -> None:
    """Run it as `__main__`, as `python FLAGS -m MODULE ARGUMENTS` does. Raises SystemExit."""
    command = [sys.executable, *flags, "-m", module, *arguments]
    show_command(command)
    sys.orig_argv[:] = command  # a router starts its successor by it
    sys.argv[:] = ["-m", *arguments]
    imported = sys.modules.pop(module, None)  # it is imported under this name, too, but only later
    try:
        if module == CLI_MODULE and imported is not None:
            run_imported(imported)
        sys.modules["__main__"] = ModuleType("__main__")
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]
    except SystemExit as end:
        if isinstance(end.code, int):
            end_process(end.code)
        raise


def run_imported(command_line: Any) -> None:
    """Run the command line that the server has imported as `__main__`, with the parser built there: 0.05 s of CPU.

    Raises SystemExit.
    """
    command_line.__name__ = "__main__"
    sys.modules["__main__"] = command_line
    sys.argv[0] = command_line.__file__
    sys.exit(command_line.main())


def end_process(status: int) -> None:
    """End as the interpreter does, without clearing its modules one by one: all of them are copies of the server's.

    That would take 0.3 s of CPU, and 1 s in an engine.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def show_command(command: list[str]) -> None:
    """Let the kernel, and so `ps`, show this command line. Its words are separated by spaces, as by setproctitle(3)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49
    text = os.fsencode(" ".join(command))[: end - start - 2]
    # The last byte is not zero: by that the kernel knows that the text ends at the first zero
    ctypes.memmove(start, text.ljust(end - start - 1, b"\0") + b".", end - start)


def import_all() -> None:
    """Import what commands need. Asserts that no thread, no device and no file is left open by that."""
    from pd_connectors.nixl import agent
    from pd_connectors.protocol.errors import ConnectorUnavailable

    environment = dict(os.environ)
    opened = os.listdir("/proc/self/fd")
    engine: Any = importlib.import_module(ENGINE_MODULE)
    engine.bound_programs(os.environ)  # for engines: torch reads these variables when it is imported
    with suppress(ConnectorUnavailable):  # not every machine has NIXL
        agent._bindings()
    agent.PROGRESS_DELAY_US = PROGRESS_DELAY_US
    for name in MODULES:
        with suppress(ImportError):  # not every machine has LLGuidance
            importlib.import_module(name)
    command_line: Any = sys.modules[CLI_MODULE]
    command_line.build_parser = functools.cache(command_line.build_parser)
    command_line.build_parser()
    os.environ.clear()
    os.environ.update(environment)
    torch: Any = sys.modules["torch"]
    assert not torch.cuda.is_initialized()
    threads = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")]
    assert len(threads) - threads.count(FORK_SAFE_THREAD) == 1, f"an import has started a thread: {threads}"
    assert len(os.listdir("/proc/self/fd")) == len(opened), "an import has opened a file"
    gc.collect()
    gc.freeze()  # a search for garbage in a child would copy all of it


def main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    show_command([sys.executable, "-P", "-m", "tests.forked_command"])
    modules = sys.argv[2]
    assert modules in ("all", "none"), modules
    order = ForkingServer(orders, import_all if modules == "all" else lambda: None).serve()
    if order is None:
        os._exit(0)
    Command(*order).run()


if __name__ == "__main__":
    main()
