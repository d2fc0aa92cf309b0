"""Reads a model's files: the description of the model, and its weights, onto the device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import model_directory, read_json
from pd_cluster.models.end_tokens import read_end_tokens
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.model_share import ModelShare
from pd_cluster.models.model_task import EMBED, read_task
from pd_cluster.models.registry import build_model, choose_implementation
from pd_cluster.models.shard import WHOLE, Shard
from pd_cluster.models.weights import fill_at_random, load_weights, stores_head
from pd_cluster.worker.executor import ModelDescription
from pd_cluster.worker.kv_cache import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import ModelConfig
    from pd_cluster.models.model import Model
    from pd_cluster.models.reduce import Reduce
    from pd_cluster.models.spec import ModelSpec
    from pd_kernels.backends import Kernels

_FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert e4m3 numbers; Triton compiles no kernel with them for others


def describe_model(config: ModelConfig, device: torch.device, progress: Callable[[str], None]) -> ModelDescription:
    """Describe the model from its files and the settings. Raises StartupError.

    Of the weights it reads only the samples that the fingerprint needs. `progress` is called when no family of ours
    computes the model, and why.
    """
    directory = model_directory(config.model)
    raw = read_json(directory / "config.json")
    spec, line = choose_implementation(directory, raw, config.model_impl)
    if line:
        progress(line)
    if config.load_format != "dummy" and read_task(config.task, directory).name == EMBED:
        spec = replace(spec, tied_embeddings=spec.tied_embeddings or not stores_head(directory))  # a head is not used
    dtype = resolve_dtype(config.dtype, spec, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype, spec, device)
    dummy_name = f"dummy seed={config.seed} {device.type} {dtype}"
    ends = read_end_tokens(directory, raw)
    return ModelDescription(
        spec=spec,
        eos_token_ids=ends.ids,
        ends=ends.line,
        max_model_len=_resolve_max_len(config.max_model_len, spec.max_len),
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=str(device),
        fingerprint=fingerprint(
            spec,
            dummy_name if config.load_format == "dummy" else directory,
            # The layout has `kv_dtype` only, and another dtype of the weights gives other numbers to round
            "" if kv_dtype == dtype else f"{dtype} to {kv_dtype}",
        ),
    )


def load_model(
    description: ModelDescription,
    config: ModelConfig,
    kernels: Kernels,
    device: torch.device,
    progress: Callable[[str], None],
    shard: Shard = WHOLE,
    reduce: Reduce | None = None,
) -> Model:
    """Build the model on the device and fill its weights: from the files, or at random for the load format "dummy".

    `shard`, `reduce`: see ModelShare. Raises StartupError when the weights do not fit on the device, the files do not
    fit the model, or the ranks cannot share it.
    """
    share = ModelShare(shard, reduce)
    if shard.size > 1 and description.spec.modules is not None:
        raise StartupError(f"--tp {shard.size}: {description.spec.architecture} by transformers' modules is not split")
    spec, dtype = description.spec, DTYPES[description.dtype]
    is_dummy, directory = config.load_format == "dummy", model_directory(config.model)
    try:
        if spec.modules is None:
            model: Model = build_model(spec, kernels, description.max_model_len, dtype, device, share)
        else:
            from pd_cluster.models.transformers_model import TransformersModel

            model = TransformersModel(spec, None if is_dummy else directory, dtype, device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise StartupError(f"the weights of {spec.architecture} do not fit on {device}: {error}") from error
    try:  # of RuntimeErrors only this one: others are no lack of memory
        if is_dummy:
            fill_at_random(model, config.seed)
        elif spec.modules is None:
            load_weights(model, directory, spec.tied_embeddings, progress)
        model.finish_loading()
    except torch.OutOfMemoryError as error:
        raise StartupError(f"no room on {device} to load the weights of {spec.architecture}: {error}") from error
    return model


def resolve_dtype(name: str, spec: ModelSpec, device: torch.device) -> str:
    """The dtype of weights. `name`: --dtype. Raises StartupError."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.dtype
    if name not in DTYPES:
        raise StartupError(f"dtype {name} is not served; choose one of {', '.join(DTYPES)}")
    if name == "float16" and spec.experts is not None and spec.experts.form:  # their exponents pass those of float16
        raise StartupError(f"dtype float16 cannot hold {spec.experts.form} weights; choose bfloat16 or float32")
    return name


def resolve_kv_dtype(name: str, dtype: str, spec: ModelSpec, device: torch.device) -> str:
    """The dtype of cached keys and values. `name`: --kv-cache-dtype; `dtype`: of the weights. Raises StartupError."""
    if name == "fp8" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            have, need = (".".join(map(str, version)) for version in (capability, _FP8_CAPABILITY))
            raise StartupError(f"--kv-cache-dtype fp8 needs a GPU of compute capability {need} or more, not {have}")
    if name == "fp8" and spec.state is not None:
        raise StartupError(f"--kv-cache-dtype fp8 is not served for {spec.architecture}, which keeps states")
    if name == "fp8" and spec.latent is not None:
        raise StartupError(f"--kv-cache-dtype fp8 is not served for {spec.architecture}, which caches latents")
    if name == "fp8" and spec.modules is not None:
        raise StartupError(f"--kv-cache-dtype fp8 is not served for {spec.architecture} by transformers' modules")
    return "float8_e4m3fn" if name == "fp8" else dtype


def _resolve_max_len(wanted: int, limit: int) -> int:
    if wanted and wanted < 2:
        raise StartupError(f"--max-model-len {wanted} has no room for a prompt and an output token")
    if wanted > limit:
        raise StartupError(f"--max-model-len {wanted} exceeds the model's own limit of {limit} tokens")
    return wanted or limit
