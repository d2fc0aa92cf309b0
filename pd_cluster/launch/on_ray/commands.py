"""`pd-cluster ray up | status | scale | down`: the terminal's side. The controller does the work."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import StartupError
from pd_cluster.launch.model_path import served_name
from pd_cluster.launch.on_ray.cluster import RayCluster, reason
from pd_cluster.launch.on_ray.connect import connected, find_controller, start_controller
from pd_cluster.launch.on_ray.flags import SCALED
from pd_cluster.launch.on_ray.policy import SILENT_S
from pd_cluster.launch.on_ray.spec import ROUTER, check_models, read_spec
from pd_cluster.launch.on_ray.unit import STOP_MARGIN_S, Secret, UnitPhase
from pd_cluster.launch.up import curl_line, stop_signals
from pd_connectors.protocol.keys import KEY_ENV

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from pd_cluster.launch.on_ray.controller import ClusterStatus, UnitStatus
    from pd_cluster.launch.on_ray.spec import ClusterSpec

ANSWER_S = 60.0  # deadline of a call to the controller, which may be starting
CLOSE_ANSWER_S = 15.0  # the same while closing: a controller that does not answer is not waited for
POLL_S = 0.5
WATCH_S = 2.0  # period at which `up` checks that its cluster exists
MAX_FAILURES = 3  # units of a role in a row that never became ready, until `up` and `scale` stop waiting
DOWN_MARGIN_S = 60.0  # after the time for requests, until `down` removes the remaining units


def run_ray(namespace: argparse.Namespace) -> int:
    """Returns the exit status. Raises StartupError."""
    commands: dict[str, Callable[[argparse.Namespace], int]] = {
        "up": _up, "status": _status, "scale": _scale, "down": _down,
    }  # fmt: skip
    return commands[namespace.ray_command](namespace)


def _up(namespace: argparse.Namespace) -> int:
    spec = read_spec(Path(namespace.file))
    address = namespace.address or spec.address or os.environ.get("RAY_ADDRESS", "")
    spec = msgspec.structs.replace(spec, address=address)
    if not address:
        check_models(spec)  # the machines of another Ray have files of their own
    secret = Secret(os.environ.get(KEY_ENV, "").strip() or secrets.token_hex(32))
    with connected(spec.name, address, spec.cpus, sends_key=True), _interrupts() as stop:
        controller = start_controller(spec.name, spec, secret, secrets.token_hex(8))
        if address:
            return _up_there(controller, spec, namespace.timeout_s, stop)
        try:
            return _up_here(controller, spec, namespace.timeout_s, stop)
        finally:
            _say("stopping (Ctrl-C again: at once)")
            stop.clear()
            if _is_up(spec.name):
                _close(controller, stop)  # the rest ends with its Ray
            _say("stopped")


def _up_there(controller: Any, spec: ClusterSpec, timeout_s: float, stop: threading.Event) -> int:
    """Wait for a cluster that outlives this command, even if it is interrupted before the cluster serves."""
    status = _wait_whole(controller, timeout_s, stop)
    if status is not None:
        _greet(status, spec)
        return 0
    _say("not waiting any longer; the cluster keeps running: `pd-cluster ray status` shows it, `down` stops it")
    return 130 if stop.is_set() else 1


def _up_here(controller: Any, spec: ClusterSpec, timeout_s: float, stop: threading.Event) -> int:
    """Wait for a cluster that ends with this command, and its Ray with it."""
    status = _wait_whole(controller, timeout_s, stop)
    if status is None:
        return 0 if stop.is_set() else 1
    _greet(status, spec)
    _say("Ctrl-C stops everything")
    while not stop.wait(WATCH_S) and _is_up(spec.name):
        pass
    return 0


def _is_up(name: str) -> bool:
    """Whether the cluster has a controller; without one it was stopped elsewhere."""
    try:
        find_controller(name)
    except StartupError:
        return False
    return True


def _status(namespace: argparse.Namespace) -> int:
    with connected(namespace.name, namespace.address or "auto"):
        status = _ask(find_controller(namespace.name).status)
        if namespace.json:
            _say(json.dumps(asdict(status)))
        else:
            _say("\n".join(table(status)))
        return 0 if status.whole else 1


def _scale(namespace: argparse.Namespace) -> int:
    counts = {role: getattr(namespace, role) for role in SCALED if getattr(namespace, role) is not None}
    if not counts:
        raise StartupError("name a role to scale: " + ", ".join(f"--{role} N" for role in SCALED))
    with connected(namespace.name, namespace.address or "auto"), _interrupts() as stop:
        controller = find_controller(namespace.name)
        past = _ask(controller.status).problems
        _ask(controller.scale, counts)
        status = _wait_whole(controller, namespace.timeout_s, stop, past)
        if status is None:
            _say("not waiting any longer; the cluster keeps running: `pd-cluster ray status` shows it")
            return 130 if stop.is_set() else 1
        _say("whole: " + ", ".join(f"{count} {role}" for role, count in status.counts.items() if count))
        return 0


def _down(namespace: argparse.Namespace) -> int:
    with connected(namespace.name, namespace.address or "auto"), _interrupts() as stop:
        if not namespace.now:
            _close(find_controller(namespace.name), stop)
        _sweep(namespace.name)
        _say(f"the cluster {namespace.name!r} is down")
        return 0


def _close(controller: Any, stop: threading.Event) -> None:
    """Stop the cluster in order, while the controller answers and `stop` is not set."""
    try:
        grace_s = _ask(controller.close, deadline_s=CLOSE_ANSWER_S)
        end_s = time.monotonic() + 2 * (grace_s + STOP_MARGIN_S) + DOWN_MARGIN_S
        while _ask(controller.status, deadline_s=CLOSE_ANSWER_S).units:
            if time.monotonic() >= end_s or stop.wait(POLL_S):
                _say("not waiting for the remaining units")
                return
    except StartupError as error:
        _say(str(error))


def _sweep(name: str) -> None:
    """Remove everything at once. The controller comes first, because it would create new units."""
    import ray

    with contextlib.suppress(StartupError):  # already gone; it may have left units
        ray.kill(find_controller(name))
    cluster = RayCluster(name)
    for unit in {*cluster.find(), *cluster.stray_groups()}:
        cluster.discard(unit)
    cluster.forget()


def _wait_whole(
    controller: Any, timeout_s: float, stop: threading.Event, past: Sequence[str] = ()
) -> ClusterStatus | None:
    """Wait until the cluster is whole. None after failures, `timeout_s` or `stop`. `past`: problems not to show."""
    end_s = time.monotonic() + timeout_s
    shown: dict[str, str] = {}
    printed = set(past)
    while True:
        status: ClusterStatus = _ask(controller.status)
        for unit in status.units:
            line = (
                f"{unit.name}: {unit.phase}"
                + (f" on {unit.url}" if unit.phase == UnitPhase.READY else f" {unit.detail}").rstrip()
            )
            if shown.get(unit.name) != line:
                shown[unit.name] = line
                _say(line)
        for problem in status.problems:
            if problem not in printed:
                printed.add(problem)
                _say(problem)
        if status.whole:
            return status
        failing = [role for role, number in status.failures.items() if number >= MAX_FAILURES]
        if failing:
            _say(f"{MAX_FAILURES} processes in a row did not become ready: {', '.join(failing)}")
            return None
        if time.monotonic() >= end_s or stop.wait(POLL_S):
            return None


def table(status: ClusterStatus) -> list[str]:
    """The status as lines of text."""
    wanted = ", ".join(f"{count} {role}" for role, count in status.counts.items() if count)
    state = "closing" if status.closing else "whole" if status.whole else "not whole"
    lines = [f"{status.name}: {state}; wanted: {wanted}"]
    rows = [("unit", "phase", "address", "epoch", "Ray node")]
    rows += [
        (u.name, _phase(u), u.url or u.detail or "-", u.epoch[:8] or "-", f"{u.ray_node[:8]} {u.host}")
        for u in status.units
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if status.doubt:
        lines.append(f"doubt: {status.doubt}; silent units are kept, unless Ray reports them as dead")
    return lines + [f"problem: {problem}" for problem in status.problems]


def _phase(unit: UnitStatus) -> str:
    is_reported = unit.phase in (UnitPhase.WAITING, UnitPhase.LOST) or unit.silent_s < SILENT_S
    return unit.phase if is_reported else f"{unit.phase}, silent for {unit.silent_s:.0f} s"


def _greet(status: ClusterStatus, spec: ClusterSpec) -> None:
    urls = [unit.url for unit in status.units if unit.role == ROUTER]
    model = str(spec.flags.get("model", ""))
    names = str(spec.flags.get("served-model-name", "")).split() or [served_name(model, Path(model or "demo_model"))]
    nodes = ", ".join(unit.name for unit in status.units if unit.role != ROUTER)
    _say(f"ready: {', '.join(urls)} serves {names[0]} on {nodes}")
    _say("try it:")
    _say(f"  {curl_line(urls[0], names[0], not model)}")


def _ask(method: Any, *arguments: Any, deadline_s: float = ANSWER_S) -> Any:
    """Call the controller. Raises StartupError, including the controller's own."""
    import ray

    try:
        return ray.get(method.remote(*arguments), timeout=deadline_s)
    except ray.exceptions.RayTaskError as error:
        raise StartupError(str(error.cause)) from error
    except ray.exceptions.RayError as error:
        raise StartupError(
            f"the cluster's controller does not answer ({reason(error)}); `pd-cluster ray down --now` needs none"
        ) from error


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """An event that Ctrl-C and similar signals set during the block, instead of ending the process."""
    stop = threading.Event()
    before = {signum: signal.signal(signum, lambda *_: stop.set()) for signum in stop_signals()}
    try:
        yield stop
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
