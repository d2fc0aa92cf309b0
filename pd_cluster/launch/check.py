"""`pd-cluster check`: finds problems of this machine before a node is started on it."""

from __future__ import annotations

import json
import os
import platform
import stat
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from pd_cluster.config import HandoffConfig, NodeConfig
from pd_cluster.errors import StartupError
from pd_cluster.launch.flags import config_from
from pd_cluster.launch.kv_network import check_network
from pd_cluster.launch.model_path import resolve_model
from pd_cluster.launch.preflight import (
    MachineFacts,
    key_problems,
    machine_problems,
    model_problems,
    setting_problems,
    tls_problems,
)
from pd_cluster.launch.sockets import listen
from pd_cluster.launch.up_flags import POOL_CONNECTORS
from pd_cluster.models.checkpoint_files import weight_files
from pd_cluster.models.directory import read_json
from pd_cluster.models.registry import choose_implementation
from pd_connectors.link_speed import SLOW_BYTES_PER_S
from pd_connectors.nixl.gpu_memory import CAUSE
from pd_connectors.protocol.errors import HandoffError
from pd_connectors.protocol.keys import KEY_ENV

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

TRANSFER_DEADLINE_S = 90.0  # includes the import of torch in two processes
SLOW_GB_S = {"cuda": SLOW_BYTES_PER_S / 1e9, "cpu": 0.5}  # a copy in host memory reaches several
DEFAULT_PORTS = (8000,)


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    what: str
    verdict: Verdict
    detail: str


def run_check(namespace: argparse.Namespace) -> int:
    """Print the table. Returns 1 when something failed, else 0; warnings do not count.

    Raises StartupError if settings contradict each other, as a node does.
    """
    config, findings = config_from(namespace), list[Finding]()
    if namespace.offer_link:
        check_network(config.handoff)
        os.execv(sys.executable, _transfer_command("serve", config.handoff.advertise_host, config.handoff.kv_ports))
    table = Table("", "check", "result")
    ports = [*(namespace.ports or DEFAULT_PORTS), *filter(None, [config.handoff.control_port])]
    for finding in _findings(config, ports, namespace.read_link, namespace.skip_model):
        findings.append(finding)
        colour = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}[finding.verdict]
        table.add_row(f"[{colour}]{finding.verdict}[/]", finding.what, finding.detail.replace("[", r"\["))
    Console(file=sys.stdout, highlight=False).print(table)
    return 1 if any(finding.verdict is Verdict.FAIL for finding in findings) else 0


def _findings(config: NodeConfig, ports: Iterable[int], link: str, skip_model: bool) -> Iterator[Finding]:
    handoff = config.handoff
    yield check_python()
    yield from check_torch()
    if problems := "; ".join((*setting_problems(config), *tls_problems(config))):
        yield Finding("settings", Verdict.FAIL, problems)
    if handoff.connector in ("nixl", *POOL_CONNECTORS):
        yield from check_transfer(handoff.advertise_host, handoff.kv_ports, link)
    yield check_machine(config)
    for port in ports:
        yield check_port(port)
    yield check_key(handoff.cluster_key_file, os.environ)
    if skip_model:
        yield Finding("model", Verdict.WARN, "not checked (--skip-model), nor what a node could serve at once")
        return
    yield (model := check_model(config))
    if model.verdict is Verdict.OK and not problems:
        yield from check_capacity(config, resolve_model(config.model.model))


def check_python() -> Finding:
    found = platform.python_version()
    tested = (3, 11) <= sys.version_info < (3, 15)
    return Finding(
        "Python", Verdict.OK if tested else Verdict.WARN, found if tested else f"{found}; tested: 3.11 to 3.14"
    )


def check_torch() -> Iterable[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("torch", Verdict.FAIL, f"cannot be imported: {error}")]
    from pd_cluster.worker.plain_memory import is_plain, plain_memory

    findings = [Finding("torch", Verdict.OK, str(torch.__version__))]
    if not torch.cuda.is_available():
        cores = len(os.sched_getaffinity(0))
        return [
            *findings,
            Finding("devices", Verdict.OK, f"CPU, {cores} cores, {torch.get_num_threads()} threads; no GPU"),
        ]
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        detail = f"{torch.cuda.get_device_name(index)}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free"
        findings.append(Finding(f"cuda:{index}", Verdict.OK if free > total / 2 else Verdict.WARN, detail))
        findings += check_memory(torch.device("cuda", index), is_plain, plain_memory)
    return findings


def check_memory(
    device: torch.device,
    is_plain: Callable[[torch.device], bool],
    plain_memory: Callable[[torch.device], AbstractContextManager[None]],
) -> Iterator[Finding]:
    """Whether NIXL reads torch's memory on this GPU fast; nothing: it does. The arguments: of worker.plain_memory."""
    if is_plain(device):
        return
    with plain_memory(device):
        kept_apart = is_plain(device)
    what = f"memory of {device}"
    if kept_apart:
        yield Finding(what, Verdict.OK, "torch uses expandable segments, and the KV cache is allocated apart from them")
    else:
        yield Finding(what, Verdict.FAIL, f"NIXL would not read it at the GPU's speed: {CAUSE}")


def check_transfer(host: str, ports: str, link: str = "") -> list[Finding]:
    """Test NIXL with a real transfer between two processes, and report where it listens.

    `link`: file with the line that `check --offer-link` printed at the other side; "": two processes here.
    """
    what = "NIXL transfer"
    try:
        check_network(HandoffConfig(advertise_host=host, kv_ports=ports))
    except (StartupError, HandoffError) as error:
        return [Finding("KV network", Verdict.FAIL, str(error))]
    try:
        found = version("nixl-cu13")
    except PackageNotFoundError:
        return [Finding(what, Verdict.FAIL, "not installed: pip install 'pd-cluster[nixl]', or use --connector none")]
    command = _transfer_command("read", host, ports, *([link] if link else []))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRANSFER_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return [Finding(what, Verdict.FAIL, f"nixl-cu13 {found}: no result within {TRANSFER_DEADLINE_S:g} s")]
    return read_transfer_result(found, done.returncode, done.stdout, done.stderr)


def read_transfer_result(nixl_version: str, status: int, out: str, err: str) -> list[Finding]:
    """Findings from the exit status and the output of transfer_check."""
    what = "NIXL transfer"
    if status != 0 or not out.strip():
        last = (err.strip().splitlines() or ["no output"])[-1]
        return [Finding(what, Verdict.FAIL, f"nixl-cu13 {nixl_version}: ended with status {status}: {last}")]
    result = json.loads(out.splitlines()[-1])
    if "error" in result:
        return [Finding(what, Verdict.FAIL, f"nixl-cu13 {nixl_version}: {result['error']}")]
    speed, device = result["bytes"] / 1e9 / result["seconds"], result["device"]
    detail = f"nixl-cu13 {nixl_version}: {speed:.3g} GB/s between two processes, {device} memory"
    if speed >= SLOW_GB_S[device]:
        return [Finding(what, Verdict.OK, detail), read_listeners(result["listeners"])]
    detail += f"; slow, likely because of: {result['slow_cause']}"
    return [Finding(what, Verdict.WARN, detail), read_listeners(result["listeners"])]


def _transfer_command(command: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pd_cluster.launch.transfer_check", command, *arguments]


def read_listeners(listeners: Sequence[tuple[str, int]]) -> Finding:
    """Report the (address, port) pairs at which UCX listened."""
    where = ", ".join(f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address, port in listeners)
    if all(ip_address(address).is_loopback for address, _ in listeners):
        return Finding("KV network", Verdict.OK, f"UCX listens on {where or 'no TCP port'}: this machine only")
    detail = f"UCX listens on {where}: close the KV network to all but the nodes, because UCX has no authentication"
    return Finding("KV network", Verdict.WARN, detail)


def check_machine(config: NodeConfig) -> Finding:
    """Check that the connector, its package and a --device cuda exist.

    A pool's server need not run: nodes work without it.
    """
    if problems := "; ".join(machine_problems(config, MachineFacts())):
        return Finding("connector, device", Verdict.FAIL, problems)
    return Finding("connector", Verdict.OK, f"{config.handoff.connector}: installed")


def check_port(port: int) -> Finding:
    try:
        listen("0.0.0.0", port).close()
    except StartupError as error:
        return Finding(f"port {port}", Verdict.FAIL, str(error))
    return Finding(f"port {port}", Verdict.OK, "free")


def check_key(key_file: str, environ: Mapping[str, str]) -> Finding:
    """Check that the cluster's key is readable, and by no other user."""
    what = "cluster key"
    if problems := "; ".join(key_problems(key_file)):
        return Finding(what, Verdict.FAIL, problems)
    if key_file:
        mode = stat.S_IMODE(Path(key_file).stat().st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            return Finding(what, Verdict.WARN, f"other users can read it (mode {mode:o}): chmod 600 {key_file}")
        return Finding(what, Verdict.OK, key_file)
    if environ.get(KEY_ENV):
        return Finding(what, Verdict.OK, f"${KEY_ENV}")
    return Finding(what, Verdict.OK, f"this user's own; for several machines set ${KEY_ENV} or --cluster-key-file")


def check_model(settings: NodeConfig) -> Finding:
    is_dummy = settings.model.load_format == "dummy"
    try:
        path = resolve_model(settings.model.model)
        if problems := "; ".join(model_problems(settings, path)):
            return Finding("model", Verdict.FAIL, problems)
        size_gb = 0 if is_dummy else sum(file.stat().st_size for file in weight_files(path)) / 1e9
        config = read_json(path / "config.json")
    except (StartupError, OSError) as error:
        return Finding("model", Verdict.FAIL, str(error))
    kind = ", ".join(config["architectures"])
    return Finding("model", Verdict.OK, f"{path} ({kind}, {size_gb:.3g} GB of weights)")


def check_capacity(config: NodeConfig, model: Path) -> Iterator[Finding]:
    """What the node would serve at once: on each GPU, else on the CPU unless it must have a GPU."""
    try:
        import torch

        from pd_cluster.worker.capacity import decide_capacity
        from pd_cluster.worker.cuda_graphs.set_up import capturable
        from pd_cluster.worker.device_plan import gpu_bytes
        from pd_cluster.worker.kv_cache import DTYPES
        from pd_cluster.worker.model_loading import resolve_dtype, resolve_kv_dtype
        from pd_kernels.selection import select_kernels
    except (ImportError, OSError):
        return  # check_torch reports it
    spec, line = choose_implementation(model, read_json(model / "config.json"), config.model.model_impl)
    if line:
        yield Finding("model implementation", Verdict.OK, line)
    asked = config.model.device
    devices = [] if asked == "cpu" else [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices or ([] if asked == "cuda" else [torch.device("cpu")]):
        try:
            dtype = resolve_dtype(config.model.dtype, spec, device)
            if device.type == "cuda":
                limits = capturable(config.scheduler, spec, select_kernels(device), lambda _: None)
                config = replace(config, scheduler=limits)
            capacity = decide_capacity(config, spec, DTYPES[dtype].itemsize, gpu_bytes(device))
            kv_dtype = resolve_kv_dtype(config.model.kv_cache_dtype, dtype, spec, device)
        except StartupError as error:
            yield Finding(f"node on {device}", Verdict.FAIL, str(error))
        else:
            yield Finding(f"node on {device}", Verdict.OK, f"{capacity.line}, KV cache in {kv_dtype}")
