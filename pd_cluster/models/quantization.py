"""How a checkpoint quantizes its weights: `quantization_config` of its config, or ModelOpt's file. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import translate
from typing import TYPE_CHECKING, Any, TypeAlias

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import read_json
from pd_cluster.models.tensor_names import slot_name, spellings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


class Scales(StrEnum):
    """Which numbers of a weight share a scale in the checkpoint."""

    BLOCKS = "block"  # 128 rows x 128 columns
    CHANNELS = "channel"  # a row
    TENSOR = "tensor"  # all
    MXFP4 = "mxfp4"  # 32 inputs of a row: numbers of 4 bits, in the experts of gpt-oss alone


BYTES_OF_FORM: Mapping[str, float] = {Scales.MXFP4: 17 / 32}
"""Bytes of one weight, with its scale, in each of pd_kernels' FORMS."""


MODELOPT_FILE = "hf_quant_config.json"  # beside a config.json which may say nothing of it
BLOCKS_SUFFIX, SCALES_SUFFIX = "_blocks", "_scales"  # of tensors with packed weights, uint8
SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # in both, a number is its value times its scale


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """A checkpoint with weights in float8 (e4m3fn), or with packed ones."""

    scales: Scales
    excluded: tuple[str, ...]  # modules that are not quantized; see `selector`
    tensor_name: str = SCALE_NAMES[0]  # of the tensor of scales, after the module's name

    def selector(self) -> Callable[[str], bool]:
        """Make the function that says whether the checkpoint quantizes the module of a name.

        An entry of `excluded` is a regular expression after "re:", a pattern with "*", or a name. A pattern excludes
        the modules that it fits, and those in them. A name excludes the modules that it is a part of: "gate" excludes
        "model.layers.0.mlp.gate", but not "model.layers.0.mlp.gate_proj". Both may be those of a wrapper's modules.
        """
        names = {slot_name(name) for name in self.excluded if not _is_pattern(name)}
        patterns = [_compiled(name) for name in self.excluded if _is_pattern(name)]

        def is_quantized(module: str) -> bool:
            parts = module.split(".")  # the names can be many (one a layer), so they are looked up
            ends = range(1, len(parts) + 1)
            found = any(".".join(parts[start:end]) in names for end in ends for start in range(end))
            names_of_it = (module, *spellings(module))
            return not (found or any(pattern.match(name) for pattern in patterns for name in names_of_it))

        return is_quantized


Allowed: TypeAlias = "Mapping[str, tuple[object, ...]]"  # setting -> values that are served; None: not set
_FP8: Allowed = {
    "weight_block_size": (None, [128, 128]), "activation_scheme": (None, "dynamic", "static"),
    "fmt": (None, "e4m3", "float8_e4m3fn"), "scale_fmt": (None, "float", "ue8m0"), "kv_cache_scheme": (None, "static"),
}  # fmt: skip
_COMPRESSED: Allowed = {"format": ("float-quantized",), "transform_config": (None, {})}
_GROUP: Allowed = {"targets": (["Linear"],), "output_activations": (None,)}
_FLOAT8: Allowed = {"num_bits": (8,), "type": ("float",), "symmetric": (None, True)}
_WEIGHTS: Allowed = {**_FLOAT8, "strategy": ("channel", "tensor", "block"), "dynamic": (None, False)}
_INPUTS: Allowed = {**_FLOAT8, "strategy": ("token", "tensor"), "dynamic": (None, True, False)}
_BLOCK_WEIGHTS: Allowed = {"block_structure": ([128, 128],)}
_BLOCK_INPUTS: Allowed = {**_FLOAT8, "strategy": ("group",), "group_size": (128,), "dynamic": (True,)}
_MODELOPT: Allowed = {"quant_algo": ("FP8",), "kv_cache_quant_algo": (None, "FP8")}
_KV_CACHE: Allowed = {"num_bits": (None, 8), "type": (None, "float")}


def quantization_settings(directory: Path, config: Mapping[str, Any]) -> tuple[str, object]:
    """Where a checkpoint describes its quantization, for errors, and what it says; "" and None if it has none.

    `config`: its parsed `config.json`, which wins over ModelOpt's file. Raises StartupError if that cannot be read.
    """
    if settings := config.get("quantization_config"):
        return f"{directory / 'config.json'}: quantization_config", settings
    file = directory / MODELOPT_FILE
    if not file.exists():
        return "", None
    settings = read_json(file).get("quantization")
    return f"{file}: quantization", {"quant_method": "modelopt", **settings} if isinstance(settings, dict) else settings


def read_quantization(directory: Path, config: Mapping[str, Any]) -> QuantizationSpec | None:
    """The quantization of the checkpoint with this parsed `config.json`, None if there is none.

    Rows are quantized when they are computed, so static scales of inputs are not used. Nor are scales of an FP8 KV
    cache: --kv-cache-dtype decides its dtype. Raises StartupError naming the setting that cannot be served.
    """
    place, settings = quantization_settings(directory, config)
    if not place:
        return None
    reader = _Reader(place, settings)
    reader.allow({"quant_method": tuple(METHODS)})
    return METHODS[str(reader.get("quant_method"))](reader)


def _read_fp8(reader: _Reader) -> QuantizationSpec:
    """DeepSeek's and Qwen's blocks, and tensors with one scale. The head is never quantized."""
    reader.allow(_FP8)
    excluded = (*reader.names("modules_to_not_convert", "ignored_layers"), "lm_head")
    if reader.get("weight_block_size"):
        return QuantizationSpec(Scales.BLOCKS, excluded, "weight_scale_inv")
    return QuantizationSpec(Scales.TENSOR, excluded)


def _read_compressed(reader: _Reader) -> QuantizationSpec:
    """The library compressed-tensors: one group of settings for all products."""
    reader.allow(_COMPRESSED)
    reader.inner("kv_cache_scheme").allow(_KV_CACHE)
    reader.inner("sparsity_config").allow({"format": (None, "dense")})
    groups = reader.inner("config_groups")
    group = groups.inner(groups.only_name())
    group.allow(_GROUP)
    weights = group.inner("weights")
    weights.allow(_WEIGHTS)
    scales = Scales(str(weights.get("strategy")))
    if scales is Scales.BLOCKS:
        weights.allow(_BLOCK_WEIGHTS)
    group.inner("input_activations").allow(_BLOCK_INPUTS if scales is Scales.BLOCKS else _INPUTS)
    return QuantizationSpec(scales, reader.names("ignore"))


def _read_modelopt(reader: _Reader) -> QuantizationSpec:
    """NVIDIA's ModelOpt, of which FP8 has one scale a tensor."""
    reader.allow(_MODELOPT)
    reader.inner("kv_cache_scheme").allow(_KV_CACHE)
    return QuantizationSpec(Scales.TENSOR, reader.names("ignore", "exclude_modules"))


def _read_mxfp4(reader: _Reader) -> QuantizationSpec:
    """OpenAI's experts, and nothing else, whatever `modules_to_not_convert` names."""
    return QuantizationSpec(Scales.MXFP4, reader.names("modules_to_not_convert"))


METHODS: Mapping[str, Callable[[_Reader], QuantizationSpec]] = {
    "fp8": _read_fp8, "compressed-tensors": _read_compressed, "modelopt": _read_modelopt, "mxfp4": _read_mxfp4,
}  # fmt: skip
"""How to read the settings of each `quant_method` that is served."""


class _Reader:
    """Settings at one place of a config, with errors that name the place."""

    def __init__(self, place: str, settings: object) -> None:
        if not isinstance(settings, dict):
            raise StartupError(f"{place} must be an object, not {settings!r}")
        self._place, self._settings = place, settings

    def get(self, name: str) -> object:
        return self._settings.get(name)

    def inner(self, name: str) -> _Reader:
        """The object `name`, an empty one if it is not set."""
        return _Reader(f"{self._place}.{name}", self.get(name) or {})

    def only_name(self) -> str:
        """The name of the only setting."""
        if len(self._settings) != 1:
            raise StartupError(f"{self._place} cannot be served: it has {len(self._settings)} groups, one is expected")
        return str(*self._settings)

    def names(self, *settings: str) -> tuple[str, ...]:
        """The lists of names in `settings`, one after the other."""
        found: list[str] = []
        for setting in settings:
            value = self.get(setting) or []
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise StartupError(f"{self._place}.{setting} must be a list of names, not {value!r}")
            found += value
        for name in filter(_is_pattern, found):
            try:
                _compiled(name)
            except (re.error, OverflowError) as error:
                raise StartupError(f"{self._place}: {name!r} is not a regular expression: {error}") from error
        return tuple(dict.fromkeys(found))

    def allow(self, allowed: Allowed) -> None:
        """Refuse values that are not served."""
        for name, values in allowed.items():
            if (value := self.get(name)) not in values:
                served = ", ".join(str(value) for value in values if value)
                rest = f"; served: {served}" if served else ""
                raise StartupError(f"{self._place}.{name} = {value!r} cannot be served{rest}")


def _is_pattern(name: str) -> bool:
    return name.startswith("re:") or "*" in name


def _compiled(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(pattern.removeprefix("re:"))
    return re.compile(f"{translate(pattern)}|{translate(f'{pattern}.*')}")
