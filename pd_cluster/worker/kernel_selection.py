"""Which products a model multiplies with on a GPU, by measurement at start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder, GraphTimer
from pd_kernels.cublas_lt import CublasLt

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from pd_cluster.models.model import Model


def choose_products(
    model: Model,
    decodes: list[int],
    prompts: list[int],
    device: torch.device,
    cleanup: ExitStack,
    progress: Callable[[str], None],
) -> None:
    """Measure how steps of `decodes` decodes and steps of `prompts` tokens multiply best, and keep the choices.

    `cleanup` closes the cuBLASLt handle, which the chosen products use until then.
    """
    started_s = time.perf_counter()
    try:
        cublas = CublasLt(device)
    except OSError as error:  # this torch does not bring the library
        progress(f"products as torch chooses them: {error}")
        return
    cleanup.callback(cublas.close)
    with torch.inference_mode():
        timer = GraphTimer(CudaRecorder(device))
        num_chosen = model.choose_products(decodes, prompts, cublas.propose, timer)
        del timer
        torch.cuda.empty_cache()  # frees the timer's pool
    seconds = time.perf_counter() - started_s
    progress(f"{num_chosen} products are not as torch would choose ({seconds:.1f} s)")
