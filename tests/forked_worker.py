"""The process that collects the tests and forks workers of xdist, see forked_workers.py, and what a worker then does.

A worker runs xdist's own code, which expects to make the configuration and to collect. It gets the configuration of
the process that collected, and is told what was collected.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import _pytest.config
import pytest

from tests.forked_command import FORK_SAFE_THREAD, end_process
from tests.forking_server import end_with

if TYPE_CHECKING:
    from collections.abc import Sequence

PLUGIN = "forked-worker"
# Imported when a test first loads a model: 2.4 s of CPU, once before the fork and not once in each worker
SHARED = ("transformers.modeling_utils",)
MANY_TESTS = 1000  # some of so many load one, on all workers, if any of them is long
READ_ALL = ("record_seconds", "record_slow", "durations", "xmlpath")  # options that need each report of a test
LATE = ("helm_python",)  # packages that start threads when they are imported
NO_THREADS_ENV = "TOKENIZERS_PARALLELISM"  # read when text is tokenized, which a test file does when it is imported


class WorkerForks:
    """Takes the streams of a stand-in and forks a worker, until the process that runs pytest is gone."""

    def __init__(self, door: socket.socket, lifeline: int) -> None:
        self._door = door
        self._lifeline = lifeline
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        self._poll = select.poll()
        for fd in (door.fileno(), lifeline):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> list[int]:
        """Returns in a worker only: its standard input and output."""
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # workers end by themselves, and this after them
        is_open = True
        while is_open or self._workers:
            for fd, _ in self._poll.poll():
                if fd == self._door.fileno():
                    if streams := self._fork():
                        signal.signal(signal.SIGINT, interrupt)
                        return streams
                elif fd == self._lifeline:
                    is_open = False
                    self._poll.unregister(self._door)
                    self._poll.unregister(fd)
                elif fd in self._workers:
                    self._bury(fd)
                else:
                    self._kill_without_stand_in(fd)
        os._exit(0)

    def _fork(self) -> list[int]:
        stand_in, _ = self._door.accept()
        word, streams, _, _ = socket.recv_fds(stand_in, 1, 2, socket.MSG_CMSG_CLOEXEC)
        if not word:
            stand_in.close()
            return []
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(parent)
            stand_in.close()
            self._close()
            return streams
        for fd in streams:
            os.close(fd)
        with suppress(OSError):
            stand_in.send(word)
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid, stand_in
        for one in (pidfd, stand_in.fileno()):
            self._poll.register(one, select.POLLIN)
        return []

    def _bury(self, pidfd: int) -> None:
        pid, stand_in = self._workers.pop(pidfd)
        for fd in (pidfd, stand_in.fileno()):
            self._poll.unregister(fd)
        os.close(pidfd)
        os.waitpid(pid, 0)
        stand_in.close()

    def _kill_without_stand_in(self, fd: int) -> None:
        """xdist has killed it: the worker did not end in time."""
        for pid, stand_in in self._workers.values():
            if stand_in.fileno() == fd:
                self._poll.unregister(fd)
                self._poll.register(fd, 0)
                os.kill(pid, signal.SIGKILL)

    def _close(self) -> None:
        self._door.close()
        os.close(self._lifeline)
        for pidfd, (_, stand_in) in self._workers.items():
            os.close(pidfd)
            stand_in.close()


class ForkedWorker:
    """A plugin: forks between the collection and the first test."""

    def __init__(self, config: pytest.Config, forks: WorkerForks) -> None:
        self._config = config
        self._forks = forks
        self._collected: list[tuple[str, dict[str, Any]]] = []  # calls of hooks that xdist tells the process that runs
        self._open_files: set[str] = set()  # before test files are imported
        self._patch = pytest.MonkeyPatch()
        self._is_worker = False
        self._is_set_up, self._has_ended, self._is_released = (threading.Event() for _ in range(3))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        self._open_files = open_files()
        self._patch.setenv(NO_THREADS_ENV, "false")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._collected.append(("pytest_collectreport", {"report": report}))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        call = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._collected.append(("pytest_warning_recorded", call))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> object:
        self._patch.undo()
        if load_models(session.items):
            import_what_is_shared()
        gc.collect()
        gc.freeze()  # a search for garbage in a worker would copy all of it
        if left := [*threads_but_this(), *(open_files() - self._open_files)]:
            sys.stderr.write(f"workers are not forked, collecting has left open: {left}\n")
            os._exit(1)
        streams = self._forks.serve()
        self._is_worker = True
        self._renew(*streams)
        [interactor] = [one for one in self._config.pluginmanager.get_plugins() if _is_interactor(one)] or [None]
        if interactor is None:
            os._exit(0)  # the process that runs pytest is gone
        tell = interactor.sendevent
        interactor.sendevent = lambda name, **event: (
            tell(name, **event) if is_told(self._config.option, name, event) else None
        )
        interactor.pytest_sessionstart(session=session)
        interactor.pytest_collection()
        for hook, call in self._collected:
            getattr(interactor, hook)(**call)
        interactor.pytest_collection_modifyitems(config=self._config, items=session.items)
        interactor.pytest_collection_finish(session=session)
        return interactor.pytest_runtestloop(session=session)

    def _renew(self, stdin: int, stdout: int) -> None:
        """Give a worker what is its own, and let xdist set it up."""
        path = sys.path
        for module, seeded in (("numpy.random", "seed"), ("torch", "seed")):  # `random` does so itself
            if module in sys.modules:
                getattr(sys.modules[module], seeded)()
        capture: Any = self._config.pluginmanager.getplugin("capturemanager")
        for own in (capture._global_capturing.out, capture._global_capturing.err):
            with suppress(AttributeError, OSError), tempfile.TemporaryFile() as file:  # by --capture it has none
                os.dup2(file.fileno(), own.tmpfile.fileno(), inheritable=False)
        _pytest.config._prepareconfig = lambda *_: self._config
        threading.Thread(target=self._talk, args=(stdin, stdout), name="xdist", daemon=True).start()
        self._is_set_up.wait()
        sys.path = path
        if self._config.option.basetemp:
            factory: Any = self._config._tmp_path_factory  # type: ignore[attr-defined]
            factory._given_basetemp = Path(self._config.option.basetemp)

    def _talk(self, stdin: int, stdout: int) -> None:
        """What a worker's main thread does when it is a process of its own."""
        base: Any = import_module("execnet.gateway_base")
        source, answers = os.fdopen(stdin, "rb"), os.fdopen(stdout, "wb")
        source.readline()  # a program for a bare interpreter: it is what follows here
        io = base.Popen2IO(answers, source, base.get_execmodel("main_thread_only"))
        io.write(b"1")
        try:
            base.serve(io, id="forked-worker")
        finally:
            self._is_set_up.set()
            self._is_released.set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int | None:
        """In a worker: called by xdist when all is set up. Its tests run in the main thread meanwhile."""
        if not self._is_worker:
            return None
        self._is_set_up.set()
        self._has_ended.wait()
        return 0

    def end(self) -> None:
        self._has_ended.set()
        self._is_released.wait()
        end_process(0)


def is_told(option: Any, name: str, event: dict[str, Any]) -> bool:
    """Whether the process that runs pytest needs an event of a worker.

    Not a setup or an end that passed and wrote nothing, unless times or a report in XML are wanted: two of six messages
    of a test, and the larger ones.
    """
    asked = (getattr(option, one, None) for one in READ_ALL)
    if name != "testreport" or any(one is not None and one is not False for one in asked):  # --durations=0: of all
        return True
    report = event["data"]
    return bool(report["when"] == "call" or report["outcome"] != "passed" or report["sections"])


def _is_interactor(plugin: object) -> bool:
    return type(plugin).__name__ == "WorkerInteractor"  # a class that xdist has made anew


class LateModule(ModuleType):
    """Imports a package when a test first uses it: for test files that say `import PACKAGE`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for such names in all that a test file has
            raise AttributeError(name)
        if sys.modules[self.__name__] is self:
            del sys.modules[self.__name__]
        return getattr(import_module(self.__name__), name)


def load_models(items: Sequence[pytest.Item]) -> bool:
    """Whether tests on all workers will load a model of transformers. Such a test is long: make test-fast has none."""
    return len(items) >= MANY_TESTS and any(item.get_closest_marker("long") for item in items)


def import_what_is_shared() -> None:
    """A test that needs a package which is not there says so itself."""
    for name in SHARED:
        with suppress(ImportError):
            import_module(name)


def threads_but_this() -> list[str]:
    """Names of threads that a fork would lose."""
    names = [Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")]
    return [name for name in names if name != FORK_SAFE_THREAD][1:]


def open_files() -> set[str]:
    """What all forks would share."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def collect(arguments: Sequence[str], forks: WorkerForks) -> None:
    """Set up as xdist.remote does. It returns in a worker that has run its tests, and if there was nothing to fork."""
    sys.modules.update({name: LateModule(name) for name in LATE})
    config = _pytest.config._prepareconfig([*arguments], None)
    import_module("xdist.remote").setup_config(config, None)
    config.workerinput, config.workeroutput = {}, {}  # type: ignore[attr-defined]
    plugin = ForkedWorker(config, forks)
    config.pluginmanager.register(plugin, PLUGIN)
    with suppress(pytest.UsageError):  # the workers say so
        config.hook.pytest_cmdline_main(config=config)
    if plugin._is_worker:
        plugin.end()


def main() -> None:
    door = socket.socket(fileno=int(sys.argv[1]))
    door.set_inheritable(False)
    arguments, sys.path[:] = json.loads(sys.argv[2])
    del sys.argv[1:]
    lifeline = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    collect(arguments, WorkerForks(door, lifeline))
