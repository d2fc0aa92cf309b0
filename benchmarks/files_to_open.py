"""`python -m benchmarks files_to_open`: source files behind "P samples the first token and D emits it".

A traced cluster of one prefill node, one decode node and a router serves the demo model on this machine's CPU. Each of
several P-first streamed requests has a window:

    from  P's engine process retires the step that computed the prompt's last chunk: the first call of `--start` after
          the last call of a function of the model
    to    the client has the first bytes of the response's body

A file counts when at least one of its functions ran in *every* window, in one of the five serving processes. So work
that timers start (health checks, statistics, lease renewals) does not count: runs of 60 and of 150
requests gave the same files. Module bodies and C code are not seen. Lines are those of whole files.

The token goes from P's engine to D's engine, to D's API process and through the router to the client. P's API process
is not on this path. At commit 8a33b6c the engines had 27 files of 5,746 lines, the path 39 of 7,608, all 47 of 8,901.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
SOURCES = (".", "router", "connectors", "kernels")
READY_DEADLINE_S, REQUEST_DEADLINE_S, STOP_DEADLINE_S = 180.0, 30.0, 30.0
PROMPT_TOKENS, CHUNK_TOKENS, NUM_IDS = 200, 64, 1500  # four chunks, the last of 8; ids below the demo model's 2,048
WARM_UPS = 2  # the first load between two nodes connects them
MODELS = "pd_cluster/models/"
SERVING = ("P's engine", "D's engine", "D", "P", "router")
GROUPS = {
    "the engines": SERVING[:2],
    "the token's path (the engines and D's API process)": SERVING[:3],
    "all five processes": SERVING,
}


@dataclass(frozen=True, slots=True)
class Call:
    """A function of the tree was called."""

    at_ns: int
    path: str
    function: str


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks files_to_open", allow_abbrev=False)
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="DIR", help="Sources to trace (default: these).")
    parser.add_argument(
        "--start", default="retire", metavar="NAME", help="Method that begins a window (default: retire)."
    )
    parser.add_argument("--requests", type=int, default=150, metavar="N", help="Traced requests (default: 150).")
    namespace = parser.parse_args(arguments)
    tree = namespace.tree.resolve()
    with tempfile.TemporaryDirectory(prefix="pd-trace-") as directory:
        ends_ns = trace(tree, Path(directory), namespace.requests)
        calls = read_calls(Path(directory))
    print_files(tree, files_in_every_window(calls, ends_ns, namespace.start))
    return 0


def trace(tree: Path, out: Path, num_requests: int) -> list[int]:
    """Serve requests with the tree's own code. Returns when each client had its first bytes (CLOCK_MONOTONIC, ns)."""
    paths = [str(Path(__file__).parent / "call_trace"), *(str(tree / source) for source in SOURCES)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "PD_TRACE_TREE": str(tree), "PD_TRACE_OUT": str(out),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "pd_cluster.launch.cli", "up", "--port=0", "--device=cpu"]
    command.append(f"--max-num-batched-tokens={CHUNK_TOKENS}")
    command.append(f"--max-num-seqs={CHUNK_TOKENS}")
    log = out / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=tree, stdout=output, stderr=subprocess.STDOUT)
    try:
        url = _wait_ready(process, log)
        rng = random.Random(0)
        prompts = [rng.choices(range(300, NUM_IDS), k=PROMPT_TOKENS) for _ in range(WARM_UPS + num_requests)]
        return [_first_bytes_ns(url, prompt) for prompt in prompts][WARM_UPS:]
    finally:
        process.terminate()
        process.wait(STOP_DEADLINE_S)


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The router's URL. Raises StartupError."""
    deadline_s = time.monotonic() + READY_DEADLINE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("ready: "):
                return line.split()[1]
        time.sleep(0.1)
    raise StartupError(
        f"the traced cluster did not start:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
    )


def _first_bytes_ns(url: str, prompt: list[int]) -> int:
    """Stream one completion P-first. Returns when the body's first bytes came."""
    body = {"model": "", "prompt": prompt, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "stream": True}
    place = urlsplit(url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=REQUEST_DEADLINE_S)
    try:
        with_model = json.dumps({**body, "model": _model(connection)})
        headers = {"Content-Type": "application/json", "x-pd-route": "p-first"}
        connection.request("POST", "/v1/completions", with_model, headers)
        response = connection.getresponse()
        route = response.headers["x-pd-route"] or ""
        if response.status != 200 or not route.startswith("p-first"):
            raise StartupError(f"HTTP {response.status}, route {route!r}: {response.read()[:300]!r}")
        response.read1(1)
        end_ns = time.monotonic_ns()
        response.read()
        return end_ns
    finally:
        connection.close()


def _model(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/v1/models")
    answer: dict[str, Any] = json.loads(connection.getresponse().read())
    return str(answer["data"][0]["id"])


def read_calls(out: Path) -> dict[str, list[Call]]:
    """The calls of each serving process, by its name in SERVING."""
    heads: dict[int, tuple[int, str]] = {}  # parent and command line
    for path in out.glob("*.calls"):
        with path.open() as lines:
            head, _, command = next(lines).partition(" ")
        heads[int(path.stem)] = int(head), command
    names = {}
    for process_id, (parent, command) in heads.items():
        for word, name in ((" router ", "router"), (" prefill ", "P"), (" decode ", "D")):
            if word in command:
                names[process_id] = name
            if word in heads.get(parent, (0, ""))[1] and " pd_cluster.engine.process " in command:
                names[process_id] = f"{name}'s engine"
    return {name: list(_calls(out / f"{process_id}.calls")) for process_id, name in names.items()}


def _calls(path: Path) -> Iterator[Call]:
    with path.open(encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            at_ns, source, function = line.rstrip("\n").split(" ", 2)
            yield Call(int(at_ns), source, function)


def files_in_every_window(calls: dict[str, list[Call]], ends_ns: list[int], start: str) -> dict[str, set[str]]:
    """Files with functions that ran in every window, by process. Raises StartupError."""
    steps = calls["P's engine"]
    windows = []
    for end_ns in ends_ns:
        computed_ns = max(
            (call.at_ns for call in steps if call.at_ns < end_ns and call.path.startswith(MODELS)), default=0
        )
        begins = (call.at_ns for call in steps if call.at_ns > computed_ns and call.function.endswith(f".{start}"))
        low_ns = next(begins, end_ns)
        if not computed_ns or low_ns >= end_ns:
            raise StartupError(f"P's engine process called nothing in {MODELS}, or {start} not after it")
        windows.append((low_ns, end_ns))

    def files(name: str, low_ns: int, high_ns: int) -> set[str]:
        return {call.path for call in calls[name] if low_ns <= call.at_ns <= high_ns}

    return {name: set.intersection(*(files(name, *window) for window in windows)) for name in SERVING}


def print_files(tree: Path, files: dict[str, set[str]]) -> None:
    """Each file with its lines and its processes, then the totals of GROUPS."""
    found = {path: [name for name in SERVING if path in files[name]] for path in sorted(set().union(*files.values()))}
    lines = {path: len((tree / path).read_text().splitlines()) for path in found}
    for path, names in found.items():
        sys.stdout.write(f"{lines[path]:5}  {path:48} {', '.join(names)}\n")
    for title, group in GROUPS.items():
        some = set().union(*(files[name] for name in group))
        sys.stdout.write(f"{title}: {len(some)} files, {sum(lines[path] for path in some):,} lines\n")
