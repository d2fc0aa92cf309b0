"""Which kernels compute the model on a device: by setting, or by measurement at start."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder, GraphTimer
from pd_cluster.worker.kv_cache import DTYPES
from pd_kernels.backends import not_replayable
from pd_kernels.cublas_lt import CublasLt
from pd_kernels.prefill_choice import AttentionShape, choose_prefill
from pd_kernels.selection import select_kernels, with_flashinfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from pd_cluster.config import NodeConfig
    from pd_cluster.models.model import Model
    from pd_cluster.worker.executor import ModelDescription
    from pd_kernels.backends import Kernels


def choose_kernels(
    config: NodeConfig, model: ModelDescription, block_size: int, device: torch.device, progress: Callable[[str], None]
) -> Kernels:
    """The device's own kernels, or the same with another library's attention of prompts.

    Raises StartupError when the setting names attention kernels that cannot be loaded.
    """
    usual, wanted = select_kernels(device), config.model.prefill_attention
    if wanted == "triton" or (wanted == "auto" and usual.name != "triton"):
        return usual
    spec = model.spec
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, DTYPES[model.dtype], device)
    if wanted == "flashinfer":
        try:
            # Captured steps would all use Triton's attention of prompts, so there are none
            return replace(with_flashinfer(shape, compiles=True), replayable=not_replayable)
        except Exception as error:  # the library raises errors of many kinds
            raise StartupError(f"--prefill-attention flashinfer: {error}") from error
    num_tokens = min(config.scheduler.max_num_batched_tokens, model.max_model_len)
    with torch.inference_mode():
        timer = GraphTimer(CudaRecorder(device))
        choice = choose_prefill(usual, partial(with_flashinfer, shape, compiles=False), shape, num_tokens, timer)
        del timer
        torch.cuda.empty_cache()  # frees the timer's pool
    progress(f"attention of prompts by {choice.reason}")
    return choice.kernels


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
