"""`pd-cluster plan`: reads the load and the tables, searches, and reports."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pd_cluster.bench.plot import check_plotting
from pd_cluster.bench.workload import Arrival, Length, poisson, read_trace, rescale
from pd_cluster.errors import StartupError
from pd_cluster.planning.plan_check import run_plan_check
from pd_cluster.planning.plan_report import plot_rates, print_plan, write_plan
from pd_cluster.planning.search import Sought, search
from pd_cluster.planning.settings import settings_of
from pd_cluster.planning.step_table import StepTable, packaged_tables, read_table
from pd_cluster.scheduling.step_model import StepWork

if TYPE_CHECKING:
    import argparse

NUM_REQUESTS = 2000


def run_plan(namespace: argparse.Namespace) -> int:
    """Returns 0, or 1 when a checked cluster parts from its plan. Raises StartupError."""
    if namespace.check:
        return run_plan_check(namespace)
    if namespace.plot:
        check_plotting()
    for flag in ("json", "plot"):
        if (name := getattr(namespace, flag)) and not Path(name).parent.is_dir():
            raise StartupError(f"--{flag} {name}: there is no directory {Path(name).parent}")
    tables = tables_of(namespace)
    arrivals = arrivals_of(namespace)
    targets = namespace.slo_ttft_ms, namespace.slo_tpot_ms
    if not 0 < max(targets) < inf or min(targets) < 0:
        raise StartupError("a plan needs --slo-ttft-ms, --slo-tpot-ms or both, above 0")
    if not 0 < namespace.attainment <= 1:
        raise StartupError(f"--attainment {namespace.attainment:g} is not above 0 and at most 1")
    for table in tables.values():
        _check_room(table, arrivals)
    rate = (len(arrivals) - 1) / arrivals[-1].at_s if arrivals[-1].at_s else inf
    sought = Sought(
        arrivals, namespace.slo_ttft_ms or None, namespace.slo_tpot_ms or None, tables, namespace.seed, rate
    )
    _check_targets(sought)
    settings = settings_of(namespace.gpus, sorted(tables), namespace.gpus_per_host)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {what: bar.add_task(what, total=None) for what in ("coarse", "fine", "draws", "rates")}

        def progress(what: str, total: int) -> None:
            bar.update(tasks[what], advance=1, total=total)

        judged = search(sought, settings, progress)
    print_plan(sought, judged, namespace.attainment, namespace.card, namespace.model)
    if namespace.json:
        write_plan(Path(namespace.json), sought, judged, len(settings))
    if namespace.plot:
        plot_rates(Path(namespace.plot), judged, namespace.attainment)
    return 0


def tables_of(namespace: argparse.Namespace) -> dict[int, StepTable]:
    """By number of ranks: those that the GPUs have room for. Raises StartupError."""
    if min(namespace.gpus, namespace.gpus_per_host, *namespace.tp, 1) < 1:
        raise StartupError("--gpus, --gpus-per-host and --tp must be at least 1")
    known = packaged_tables()
    if namespace.table:
        found = [_read(name) for name in namespace.table]
    else:
        model = namespace.model or "8b"
        found = [table for table in known.values() if table.model.name == model]
        if not found:
            models = ", ".join(sorted({table.model.name for table in known.values()}))
            raise StartupError(
                f"no step table of {model!r} comes with this package (there are {models}): measure one on a GPU with "
                "`pd-cluster step-table`, and name it with --table"
            )
    names = {table.model.name for table in found}
    if len(names) > 1 or (namespace.model and namespace.model not in names):
        wanted = f", not of {namespace.model}" if namespace.model else "; a plan is for one model"
        raise StartupError(f"the step tables are of {' and '.join(sorted(names))}{wanted}")
    for ranks in namespace.tp:
        if heads := next((table.model.num_kv_heads for table in found if table.model.num_kv_heads % ranks), 0):
            raise StartupError(f"--tp {ranks} ranks cannot share the {heads} KV heads of {found[0].model.name}")
        if ranks not in {table.tp for table in found}:
            raise StartupError(f"there is no step table of {found[0].model.name} with --tp {ranks}")
    wanted_ranks = [table for table in found if not namespace.tp or table.tp in namespace.tp]
    most = min(namespace.gpus, namespace.gpus_per_host)
    if not (fitting := {table.tp: table for table in wanted_ranks if table.tp <= most}):
        raise StartupError(
            f"nodes of {min(table.tp for table in wanted_ranks)} ranks have no room on {most} GPUs of a host"
        )
    return fitting


def _read(path: str) -> StepTable:
    try:
        return read_table(Path(path).read_bytes(), path)
    except OSError as error:
        raise StartupError(f"the step table {path} cannot be read: {error.strerror}") from error


def arrivals_of(namespace: argparse.Namespace) -> list[Arrival]:
    """Raises StartupError."""
    if namespace.rate is not None and not 0 < namespace.rate < inf:
        raise StartupError(f"--rate {namespace.rate:g} is not a number of requests a second above 0")
    if namespace.num_requests < 0:
        raise StartupError(f"--num-requests {namespace.num_requests} is below 0")
    if namespace.trace:
        arrivals = read_trace(Path(namespace.trace), namespace.num_requests)
        if len(arrivals) < 2 or not arrivals[-1].at_s:
            raise StartupError(f"the trace {namespace.trace} has one request, or all at one time: a plan needs a rate")
        return rescale(arrivals, rate=namespace.rate, length_scale=1.0, max_output=0)
    if namespace.rate is None or not namespace.input_len or not namespace.output_len:
        raise StartupError("a plan needs --trace FILE, or --rate R with --in L and --out L")
    try:
        lengths = Length.parse(namespace.input_len), Length.parse(namespace.output_len)
    except ValueError as error:
        raise StartupError(f"--in and --out: {error}") from error
    return poisson(max(2, namespace.num_requests or NUM_REQUESTS), namespace.rate, *lengths, namespace.seed)


def _check_room(table: StepTable, arrivals: list[Arrival]) -> None:
    room = min(table.flags.num_blocks * table.flags.block_size, table.flags.max_model_len)
    longest = max(one.num_input + one.num_output for one in arrivals)
    if longest > room:
        raise StartupError(f"a request of {longest:,} tokens does not fit: a node of --tp {table.tp} holds {room:,}")


def _check_targets(sought: Sought) -> None:
    """A target that no request could meet alone cannot be met by any number of nodes."""
    devices = [table.device for table in sought.tables.values()]
    shortest = min(one.num_input for one in sought.arrivals)
    alone_ms = min(1e3 * device.seconds(StepWork(1, shortest)) for device in devices)
    first_ms = min(1e3 * device.seconds(StepWork(num_tokens=min(shortest, device.step_tokens))) for device in devices)
    for flag, target, least in (("tpot", sought.tpot_ms, alone_ms), ("ttft", sought.ttft_ms, first_ms)):
        if target and target < least:
            raise StartupError(f"--slo-{flag}-ms {target:g} cannot be met: a request alone takes {least:.1f} ms")
