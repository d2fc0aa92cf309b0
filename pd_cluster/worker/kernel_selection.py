"""Chooses the attention of each KV group, and the matrix products by measurement at start."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.worker.cuda_graphs.recorder import CudaRecorder, GraphTimer
from pd_cluster.worker.kv_cache import KV_DTYPES
from pd_connectors.protocol.layout import KVKind
from pd_kernels.attention import AttentionShape
from pd_kernels.attention_backends import choose_attention
from pd_kernels.cublas_lt import CublasLt
from pd_kernels.fp8_cache import FP8
from pd_kernels.latent import LatentDims

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from pd_cluster.models.model import Model
    from pd_cluster.models.spec import ModelSpec
    from pd_connectors.protocol.layout import BlockLayout
    from pd_kernels.attention import GroupAttention


def attention_by_group(
    spec: ModelSpec,
    layout: BlockLayout,
    dtype: torch.dtype,
    wanted: str,
    device: torch.device,
    progress: Callable[[str], None],
) -> tuple[GroupAttention, ...]:
    """Choose a rank's attention of each KV group but that of states, which is the last.

    `dtype`: of queries; `wanted`: ModelConfig.attention_backend.

    Raises StartupError when no allowed backend can serve a group.
    """
    attentions = []
    for group in layout.groups:
        if group.kind is KVKind.STATE:
            continue
        num_kv_heads, num_layers, *_, block_size, head_dim = group.rank_shape(layout.tp_size)
        shape = AttentionShape(
            spec.num_heads // layout.tp_size, num_kv_heads, head_dim, block_size, num_layers, dtype, group.window,
            has_fp8_cache=KV_DTYPES[group.dtype] is FP8, has_sinks=spec.has_sinks, latent=latent_dims(spec),
        )  # fmt: skip
        try:
            choice = choose_attention(shape, device, wanted)
        except ValueError as error:
            raise StartupError(f"--attention-backend {wanted}: {error}") from error
        window = f" with a window of {group.window}" if group.window else ""
        progress(f"attention of {num_layers} layers{window}: {choice}")
        attentions.append(choice.backend.attention(shape, device))
    return tuple(attentions)


def latent_dims(spec: ModelSpec) -> LatentDims | None:
    """The sizes of a head of latent attention; None: the model has none."""
    latent = spec.latent
    return None if latent is None else LatentDims(latent.rank, latent.rope, latent.nope, latent.value)


def choose_products(
    model: Model,
    decodes: list[int],
    prompts: list[int],
    device: torch.device,
    cleanup: ExitStack,
    progress: Callable[[str], None],
) -> None:
    """Measure and use the fastest products for steps of `decodes` decodes and for steps of `prompts` tokens.

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
