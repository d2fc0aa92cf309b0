"""What an adapter changes in a model: each tensor of its file has its place there. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.adapters.adapter_bytes import CONFIG, WEIGHTS
from pd_cluster.adapters.peft_config import MAX_PATTERN_CHARS, MAX_RANK, read_config
from pd_cluster.adapters.peft_names import PeftNames
from pd_cluster.adapters.refused_modules import SERVED_KINDS, refusal
from pd_cluster.adapters.tensor_table import read_table
from pd_cluster.errors import BadAdapter
from pd_cluster.models.checkpoint_files import some
from pd_cluster.models.tensor_names import slot_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pd_cluster.adapters.adapter_bytes import AdapterBytes
    from pd_cluster.adapters.tensor_table import StoredMatrix
    from pd_cluster.models.linear_part import LinearPart

_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
_WEIGHT, _MODEL = ".weight", "model."
_WHOLE = "a whole weight beside the adapter, as peft saves of embeddings, heads and modules_to_save: it is not served"


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """A module of the model, and the matrices by which it changes: W x + scale * B A x."""

    name: str  # as in a checkpoint of the text model alone
    part: LinearPart
    rank: int
    scale: float
    a: StoredMatrix  # [rank, in]
    b: StoredMatrix  # [out, rank]


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """An adapter that fits the model."""

    digest: str  # its identity, see AdapterBytes
    base_name: str  # of the model that it was trained for, as its config says
    modules: tuple[AdaptedModule, ...]  # in the order of the model's parts

    @property
    def rank(self) -> int:
        """The greatest of its modules."""
        return max(module.rank for module in self.modules)

    def base_warning(self, model: str) -> str:
        """For the log; "": the adapter's config names the model. Shapes have been compared, a name proves nothing."""
        trained, served = (re.split(r"[/\\]", name.rstrip("/\\"))[-1] for name in (self.base_name, model))
        if trained in ("", served):
            return ""
        return f"the adapter was trained for {self.base_name}, and the model is {model}: their shapes agree"


def fit_adapter(files: AdapterBytes, parts: Mapping[str, LinearPart], max_rank: int = MAX_RANK) -> AdapterSpec:
    """Find the place of each tensor among the model's `parts` (see Decoder), of any rank.

    Takes seconds for a config with slow patterns: call it on a thread. Raises BadAdapter for a tensor without a place,
    a module of the config without tensors, and shapes or ranks that are not the model's or above `max_rank`.
    """
    config_file, file = files.directory / CONFIG, files.directory / WEIGHTS
    config = read_config(files.config, config_file)
    base_name = config.base_model_name_or_path[:MAX_PATTERN_CHARS]
    served = {name: part for name, part in parts.items() if part.kind in SERVED_KINDS}
    names, pairs = PeftNames(config, config_file), _Pairs(file, served, base_name)
    for tensor in read_table(files.weights, file).values():
        pairs.add(tensor)
    modules = []
    for name, part in served.items():
        if name in pairs.found:
            spelled = pairs.spelled(name)
            module = AdaptedModule(name, part, names.rank(spelled), names.scale(spelled), *pairs.of(name))
            _check_shapes(module, file, base_name, max_rank)
            modules.append(module)
    pairs.check_targets(names, config_file)  # after the shapes: they tell another base, which may have fewer layers
    return AdapterSpec(files.digest, base_name, tuple(modules))


class _Pairs:
    """The matrices A and B of a file, by module of the model."""

    def __init__(self, file: Path, served: Mapping[str, LinearPart], base_name: str) -> None:
        self._file, self._served = file, served
        self._base = f" (the adapter was trained for {base_name})" if base_name else ""
        self.found: dict[str, dict[str, StoredMatrix]] = {}
        self._stem: str | None = None  # what the file has in place of _MODEL

    def add(self, tensor: StoredMatrix) -> None:
        """Raises BadAdapter if it has no place."""
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            is_embedding = "lora_embedding_" in tensor.name
            why = "an adapter of embeddings, which take none" if is_embedding else "no A or B of a LoRA, as peft has"
            why = why if "lora_" in tensor.name else _WHOLE
            raise BadAdapter(f"{self._file}: {tensor.name} is {why}")
        spelled, letter = match.groups()
        module = slot_name(spelled + _WEIGHT).removesuffix(_WEIGHT)
        if module not in self._served:
            raise BadAdapter(f"{self._file}: {spelled} cannot have an adapter: {refusal(module)}{self._base}")
        stem = spelled.removesuffix(module.removeprefix(_MODEL))
        if self._stem not in (None, stem):
            raise BadAdapter(f"{self._file} names layers in two ways: {self._stem!r} and {stem!r} come before them")
        self._stem = stem
        self.found.setdefault(module, {})[letter] = tensor  # names are unique, and so are their spellings

    def spelled(self, module: str) -> str:
        """The module's name in the model that was trained."""
        return f"{self._stem}{module.removeprefix(_MODEL)}"

    def of(self, module: str) -> tuple[StoredMatrix, StoredMatrix]:
        """A and B. Raises BadAdapter if one is missing."""
        pair = self.found[module]
        if len(pair) < 2:
            has, lacks = ("A", "B") if "A" in pair else ("B", "A")
            raise BadAdapter(f"{self._file} has lora_{has} of {module}, and no lora_{lacks}")
        return pair["A"], pair["B"]

    def check_targets(self, names: PeftNames, config_file: Path) -> None:
        """Raises BadAdapter unless the file has the modules that the config names: PEFT would leave out the others."""
        if not self.found:
            raise BadAdapter(f"{self._file} has no tensors")
        named = {module for module in self._served if names.is_target(self.spelled(module))}
        if more := self.found.keys() - named:
            raise BadAdapter(f"{self._file} has {some(more)}, which target_modules of {config_file.name} does not name")
        if absent := named - self.found.keys():
            told = f"{some(absent)}, which target_modules of {config_file.name} names{self._base}"
            raise BadAdapter(f"{self._file} lacks {told}")


def _check_shapes(module: AdaptedModule, file: Path, base_name: str, max_rank: int) -> None:
    num_outputs, num_inputs = module.part.shape
    if module.rank > max_rank:
        raise BadAdapter(f"{file}: {module.name} has rank {module.rank}, and {max_rank} is the highest here")
    for letter, matrix, size, transposed in (("A", module.a, num_inputs, False), ("B", module.b, num_outputs, True)):
        found = matrix.shape[::-1] if transposed else matrix.shape
        if found != (module.rank, size):
            needed = f"{size} x {module.rank}" if transposed else f"{module.rank} x {size}"
            is_rank = found[1:] == (size,)
            why = f"its config says rank {module.rank}" if is_rank else f"it is of another base model ({base_name})"
            told = " x ".join(map(str, matrix.shape))
            raise BadAdapter(f"{file}: lora_{letter} of {module.name} is {told}, not {needed}: {why}")
