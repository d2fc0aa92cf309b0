"""`pd-cluster step-table`: measures the steps of a model on this machine's card, for `pd-cluster plan`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import track

from pd_cluster.bench.report import environment
from pd_cluster.errors import StartupError
from pd_cluster.launch.flags import config_from
from pd_cluster.planning.step_table import StepPoint, StepTable, TableFlags, TableModel
from pd_cluster.planning.table_points import planned_points

if TYPE_CHECKING:
    import argparse

    from pd_cluster.config import NodeConfig
    from pd_cluster.errors import PdError
    from pd_cluster.planning.table_points import PlannedPoint
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.step_measurement import StepTimer

HEAVY = 512  # tokens of prompts of a step from which a device gets warm (8B, H200: 2,048 take 43 ms cool, 48 hot)
COOL_S, HOT_S = 0.4, 0.6  # of idling before a step that is to be cool; of steps before one that is to be hot


def run_step_table(namespace: argparse.Namespace) -> int:
    """Returns 0. Raises StartupError."""
    out = Path(namespace.out)
    if not out.parent.is_dir():
        raise StartupError(f"--out {out}: there is no directory {out.parent}")
    config, begun_s = config_from(namespace), time.perf_counter()
    with ExitStack() as cleanup:
        executor = _executor(config, cleanup)
        cleanup.callback(executor.close)
        loaded_s = time.perf_counter()
        table = _measured(executor)
    try:
        out.write_bytes(table.to_json())
    except OSError as error:
        raise StartupError(f"--out {out} cannot be written: {error.strerror}") from error
    seconds = time.perf_counter() - loaded_s
    sys.stderr.write(
        f"{len(table.points)} steps of {table.model.name} on {table.card} in {seconds:.0f} s beside "
        f"{loaded_s - begun_s:.0f} s of loading: {out}\n"
    )
    return 0


def _executor(config: NodeConfig, cleanup: ExitStack) -> DeviceExecutor:
    from pd_cluster.worker.device_executor import DeviceDescribed, DeviceExecutor, run_phases
    from pd_cluster.worker.ranks import Ranks

    def progress(text: str) -> None:
        sys.stderr.write(f"{text}\n")

    if config.model.tp == 1:
        return DeviceExecutor.started(config, progress)
    directory = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="pd-table-"))
    ranks = Ranks(config, f"ipc://{directory}/rank", _end_after_loss)
    return run_phases(DeviceDescribed.over(ranks, progress), config.cache, progress)


def _end_after_loss(error: PdError) -> None:
    """End the process, because a collective may never return when a rank is gone."""
    sys.stderr.write(f"{error}\n")
    os._exit(1)


def _measured(executor: DeviceExecutor) -> StepTable:
    import torch

    from pd_cluster.worker.step_measurement import StepTimer

    config, model, limits = executor.config, executor.model, executor.config.scheduler
    timer = StepTimer(executor.launch, executor.slabs, executor.block_size, model.max_model_len, model.vocab_size)
    planned = planned_points(limits.max_num_seqs, limits.max_num_batched_tokens, model.max_model_len)
    late_s = _launch_s(timer)
    steps = track(planned, "steps", console=Console(stderr=True), disable=not sys.stderr.isatty())
    points = tuple(_point(timer, point, late_s) for point in steps)
    spec, machine = model.spec, environment()
    on_gpu = model.device != "cpu"
    return StepTable(
        torch.cuda.get_device_name(0) if on_gpu else machine["processor"],
        TableModel(
            Path(config.model.model).name, spec.architecture, model.fingerprint, spec.num_heads, spec.num_kv_heads,
            model.dtype, model.kv_dtype, float(spec.weight_bytes(getattr(torch, model.dtype).itemsize)),
        ),
        config.model.tp,
        {"pd_cluster": machine["version"], "commit": machine["commit"], "python": machine["python"]}
        | machine["packages"],
        TableFlags(
            limits.max_num_seqs, limits.max_num_batched_tokens, executor.block_size, executor.slabs.num_blocks(0),
            model.max_model_len, is_captured=bool(executor.graph_sizes),
        ),
        f"measured by step-table, {machine['time']}", points,
    )  # fmt: skip


def _launch_s(timer: StepTimer) -> float:
    """Seconds until a step begins that follows no other, with its way back."""
    timer.seconds(0, [1])
    start_s, _, second_s, *_ = ends = timer.ends(0, [1], 0, 0)
    return max(0.0, second_s - start_s - 2 * (ends[-1] - ends[2]) / (len(ends) - 3))


def _point(timer: StepTimer, point: PlannedPoint, late_s: float) -> StepPoint:
    """Prompts alone are measured from cool, where so many tokens warm a device: two steps after a pause."""
    prompts, is_cool = [point.num_tokens] * (point.num_tokens > 0), not point.num_decodes and point.num_tokens >= HEAVY
    if is_cool:
        time.sleep(COOL_S)
        start_s, _, second_s, *_ = timer.ends(0, prompts, point.before, 0)
        seconds = (second_s - start_s - late_s) / 2
    else:
        seconds = timer.seconds(point.num_decodes, prompts, point.before, point.context)
    hot_s, ends_s = 0.0, time.perf_counter() + HOT_S
    while point.is_hot and (not hot_s or time.perf_counter() < ends_s):
        hot_s = timer.seconds(point.num_decodes, prompts, point.before, point.context)
    return StepPoint(*point[:4], round(1e3 * seconds, 4), round(1e3 * hot_s, 4))
