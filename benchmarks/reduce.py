"""`python -m benchmarks reduce`: sums over this host's GPUs with residual and norm, beside NCCL, in CUDA graphs.

Every sum is first compared with the sum in rank order, and over ranks. Then microseconds of one, all launches counted.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import ProcessException, spawn

from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.report import report_console
from pd_cluster.errors import StartupError
from pd_cluster.worker.symmetric_reduce import open_peers
from pd_kernels.backends import TORCH
from pd_kernels.selection import select_kernels
from pd_kernels.values import HalfNormed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Sum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor | HalfNormed]

HOST, RANKS_S = "127.0.0.1", 300.0  # deadline of all ranks
CALLS, REPLAYS, ROUNDS = 20, 50, 7  # sums in a graph, its replays in a round
EPS, TOLERANCE = 1e-5, 2e-2  # of a norm in bf16, per unit of size


def open_sums(width: int, device: torch.device) -> dict[str, Sum]:
    """What is measured, by name. Raises RuntimeError without symmetric memory."""
    from pd_kernels.triton_reduce import reduce_add_half_norm, reduce_add_norm

    peers, kernels = open_peers(width, torch.bfloat16, device), select_kernels(device)

    def by_nccl(partial: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
        dist.all_reduce(partial)
        return kernels.add_rms_norm(partial, residual, norm, eps)[0]

    return {
        "one kernel": lambda *rest: reduce_add_norm(peers, *rest),
        "one kernel, half norm": lambda *rest: reduce_add_half_norm(peers, *rest),
        "NCCL, then norm": by_nccl,
    }


def gathered(value: torch.Tensor) -> list[torch.Tensor]:
    """The `value` of each rank."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return parts


def check(name: str, add: Sum, rows: int, width: int, device: torch.device) -> None:
    """Raises StartupError for a wrong sum. NCCL's may be rounded otherwise, but alike on all ranks."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    partial = torch.randn(rows, width, generator=generator, device=device).bfloat16()
    residual, norm = torch.ones_like(partial), torch.full((width,), 0.5, device=device, dtype=torch.bfloat16)
    total = torch.zeros(rows, width, device=device)
    for part in gathered(partial):
        total += part.float()
    normed, expected = TORCH.add_rms_norm(total.bfloat16(), residual.clone(), norm, EPS)
    result = add(partial, residual, norm, EPS)
    found = result.normed() if isinstance(result, HalfNormed) else result
    if any(not torch.equal(copy, value) for value in (residual, found) for copy in gathered(value)):
        raise StartupError(f"{name}, {rows} rows: the ranks differ")
    if not name.startswith("NCCL") and not torch.equal(residual, expected):
        raise StartupError(f"{name}, {rows} rows: not the sum in rank order")
    if not torch.allclose(found, normed, rtol=TOLERANCE, atol=TOLERANCE):
        raise StartupError(f"{name}, {rows} rows: not the norm of the sum")


def measure(add: Sum, rows: int, width: int, device: torch.device) -> list[float]:
    """Microseconds of one sum, by round. Fixed counts: a rank with more sums than the others would wait for ever."""
    partial, residual = torch.zeros(2, rows, width, device=device, dtype=torch.bfloat16)
    norm = torch.ones(width, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        for _ in range(CALLS):
            add(partial, residual, norm, EPS)
    times = []
    for _ in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        dist.barrier()
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / REPLAYS / CALLS)
    return times[2:]


def run_rank(rank: int, num_ranks: int, port: int, namespace: argparse.Namespace) -> None:
    """The process of one GPU. Rank 0 prints and records."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast can stop a shared host
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # the ranks share a host
    width, device, limit = namespace.hidden, torch.device("cuda", rank), timedelta(seconds=RANKS_S)
    torch.cuda.set_device(device)
    store = TCPStore(HOST, port, num_ranks, is_master=False)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks, timeout=limit, device_id=device)
    sums, results = open_sums(width, device), list[dict[str, Any]]()
    for rows in namespace.rows:
        for name, add in sums.items():
            check(name, add, rows, width, device)
            samples = measure(add, rows, width, device)
            results.append({"name": name, "rows": rows, "p50_us": statistics.median(samples), "samples_us": samples})
    if rank == 0:
        append_record(namespace.json, "reduce_gpu", {"ranks": num_ranks, "hidden": width, "results": results})
        table = Table(f"us, {num_ranks} ranks", *sums)
        for rows in namespace.rows:
            found = [f"{result['p50_us']:.1f}" for result in results if result["rows"] == rows]
            table.add_row(f"{rows} x {width}, {rows * width // 512} KiB", *found)
        report_console().print(table)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError, also for a rank that failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reduce", allow_abbrev=False, description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, metavar="N", help="GPUs that take part (default: all).")
    parser.add_argument("--hidden", type=int, default=4096, metavar="N", help="Columns (default: 4096).")
    rows_help = "Rows of the sums (default: 1 32 128, with 4,096 columns 8 KiB, 256 KiB and 1 MiB)."
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 128], metavar="N", help=rows_help)
    json_help = "File to which a line is appended (%(default)s)."
    parser.add_argument("--json", type=Path, default=RESULTS / "reduce_gpu.jsonl", metavar="FILE", help=json_help)
    namespace = parser.parse_args(arguments)
    num_gpus = torch.cuda.device_count()
    num_ranks = namespace.ranks or num_gpus
    if not 2 <= num_ranks <= num_gpus:
        raise StartupError(f"2 ranks or more need a GPU each: --ranks is {num_ranks}, torch finds {num_gpus} GPUs")
    listener = socket.create_server((HOST, 0))  # torch's own would accept connections from other hosts
    port, listen_fd = listener.getsockname()[1], listener.detach()
    store = TCPStore(HOST, port, num_ranks, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    ranks = spawn(run_rank, (num_ranks, store.port, namespace), num_ranks, join=False)  # type: ignore[no-untyped-call]
    end = time.monotonic() + RANKS_S
    try:
        while not ranks.join(timeout=1.0):
            if time.monotonic() > end:
                raise StartupError(f"the ranks took more than {RANKS_S:.0f} s")
    except ProcessException as error:
        raise StartupError(str(error)) from error
    finally:
        for process in ranks.processes:  # a kernel may wait for a rank that is gone
            process.kill()
    return 0
