"""Adapters of each family on ranks: added by parts, they change the weights as when they are merged before a cut."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_cluster.adapters.adapter_spec import fit_adapter
from pd_cluster.adapters.part_matrices import clear, put_matrices
from pd_cluster.adapters.refused_modules import SERVED_KINDS, refusal
from pd_cluster.errors import BadAdapter
from pd_cluster.models.decoder import Decoder
from pd_cluster.models.registry import ARCHITECTURES, build_model, resolve_spec
from pd_cluster.models.shard import Cut
from pd_kernels.backends import TORCH
from tests.models.adapter_files import CONFIG, MAX_BYTES, PARTS, pairs, usual, written
from tests.models.state_models import STATE_MODELS
from tests.models.thread_ranks import shares
from tests.worker.conftest import COMMON, LATENT_MODELS, MODELS

if TYPE_CHECKING:
    from pd_cluster.adapters.adapter_bytes import AdapterBytes
    from pd_cluster.adapters.adapter_spec import AdaptedModule
    from pd_cluster.models.linear_part import LinearPart
    from pd_cluster.models.model_share import ModelShare


@dataclass(frozen=True)
class Put:
    """What a rank has of a module."""

    a: torch.Tensor
    b: torch.Tensor


def part_matrices(
    files: AdapterBytes, module: AdaptedModule, dtype: torch.dtype, order: torch.Tensor | None = None
) -> Put:
    """Put where a slot has room for more ranks."""
    part, rank = module.part, module.rank
    found = Put(torch.zeros(rank, len(part.inputs), dtype=dtype), torch.zeros(len(part.rows), rank + 3, dtype=dtype))
    put_matrices(files, module, found.a, found.b[:, :rank], order)
    assert not found.b[:, rank:].any()
    return Put(found.a, found.b[:, :rank])


FAMILIES = {name: model for name, model in (MODELS | STATE_MODELS).items() if "packed" not in model[1]}
FAMILIES["mixtral"] = ("Mixtral", {**MODELS["mixtral"][1], "num_local_experts": 4})  # that two ranks can share
WHOLE = {"llama", "gemma3", "gpt-oss", "qwen2-shared-expert", "qwen3.5", "deepseek-v3"}  # at one rank
ALPHA = 6
Checkpoint = dict[str, torch.Tensor]


def build(name: str, share: ModelShare | None = None) -> Decoder[Any]:
    """An empty model, before its slots are filled."""
    kind, options = FAMILIES[name]
    config = getattr(transformers, f"{kind}ForCausalLM").config_class(**COMMON | options).to_dict()
    spec = resolve_spec(Path(), config | {"architectures": [f"{kind}ForCausalLM"]})
    model = build_model(spec, TORCH, 64, torch.float32, torch.device("cpu"), share)
    assert isinstance(model, Decoder)
    return model


def fill(model: Decoder[Any], checkpoint: Checkpoint) -> None:
    for name, slot in model.slots.items():
        slot.fill(lambda index, name=name: checkpoint[name][index])  # type: ignore[misc]


def rank_of(name: str) -> int:
    """Another one for modules of one product."""
    return 1 + sum(map(ord, name)) % 5


def served(model: Decoder[Any]) -> dict[str, LinearPart]:
    return {name: part for name, part in model.parts.items() if part.kind in SERVED_KINDS}


def test_all_architectures_are_here() -> None:
    assert {f"{kind}ForCausalLM" for kind, _ in FAMILIES.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_matrix_of_a_checkpoint_takes_an_adapter_or_is_refused_with_a_reason(name: str) -> None:
    """So no weight that an adapter of PEFT may have is answered with "no such product"."""
    model = build(name)
    parts, unknown = served(model), refusal("model.layers.0.none")
    assert any(part.kind in ("qkv", "latent") for part in parts.values())
    for slot_name, slot in model.slots.items():
        module = slot_name.removesuffix(".weight")
        if module in parts:
            assert parts[module].shape == slot.shape
        elif len(slot.shape) > 1:
            assert refusal(module) != unknown, module


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("gemma3", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("mixtral", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("gpt-oss", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("qwen2-shared-expert", {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("qwen3.5", {"q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj"}),
        ("moonlight", {"q_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"}),
        ("deepseek-v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_what_families_serve(name: str, ends: set[str]) -> None:
    for degree in (1, 2):  # nodes of different degrees take the same adapters
        parts = served(build(name, shares(degree)[-1]))
        assert {part.rpartition(".")[2] for part in parts} == ends
        assert not [part for part in parts if "expert" in part]


# One rank has all of what two of them cut: few families show that nothing is cut there
@pytest.mark.parametrize(
    ("name", "degree"),
    [
        pytest.param(name, degree, marks=[pytest.mark.slow] * (degree == 1 and name not in WHOLE))
        for name in FAMILIES
        for degree in (1, 2)
    ],
)
def test_ranks_add_their_parts_of_what_is_merged(tmp_path: Path, name: str, degree: int) -> None:
    """The weight of each product, of each rank: filled and then changed, or filled with what PEFT's merge gives."""
    numbers = torch.Generator().manual_seed(1)
    whole = build(name)
    base = {slot: torch.randn(one.shape, generator=numbers) for slot, one in whole.slots.items()}
    parts = served(whole)
    tensors = pairs(parts, rank_of)
    config = CONFIG | {
        "target_modules": list(parts),
        "lora_alpha": ALPHA,
        "rank_pattern": {one: rank_of(one) for one in parts},
    }
    files, merged = written(tmp_path, config, tensors), dict(base)
    for module in parts:
        a, b = (tensors[f"base_model.model.{module}.lora_{one}.weight"] for one in "AB")
        merged[f"{module}.weight"] = base[f"{module}.weight"] + ALPHA / rank_of(module) * (b @ a)
    for share in shares(degree):
        changed, expected = build(name, share), build(name, share)
        fill(changed, base)
        fill(expected, merged)
        spec = fit_adapter(files, changed.parts)
        assert {module.name for module in spec.modules} == set(parts)
        for one in spec.modules:
            matrices, part = part_matrices(files, one, torch.float32), one.part
            assert matrices.a.shape == (one.rank, len(part.inputs))
            rows = slice(part.start, part.start + len(part.rows))
            changed.linear_of(part).weight[rows] += matrices.b @ matrices.a
        for module in parts:
            weight, wanted = (model.linear_of(model.parts[module]).weight for model in (changed, expected))
            assert torch.allclose(weight, wanted, atol=1e-5), module
            assert share.shard.size > 1 or not torch.equal(wanted, filled(name, base, module))


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("name", LATENT_MODELS)
def test_rows_follow_when_a_family_reorders_them(tmp_path: Path, name: str, degree: int) -> None:
    """Rows that rotate in pairs are put in halves when the model is loaded, before an adapter comes."""
    numbers = torch.Generator().manual_seed(1)
    base = {slot: torch.randn(one.shape, generator=numbers) for slot, one in build(name).slots.items()}
    parts = {module: part for module, part in served(build(name)).items() if part.kind in ("latent", "query")}
    tensors = pairs(parts)
    files, merged = written(tmp_path, CONFIG | {"target_modules": list(parts)}, tensors), dict(base)
    for module in parts:
        a, b = (tensors[f"base_model.model.{module}.lora_{one}.weight"] for one in "AB")
        merged[f"{module}.weight"] = base[f"{module}.weight"] + 2.0 * (b @ a)
    for share in shares(degree):
        before, after = build(name, share), build(name, share)
        for model, checkpoint in ((before, base), (after, merged)):
            fill(model, checkpoint)
            model.finish_loading()
        for one in fit_adapter(files, before.parts).modules:
            rows, inputs = slice(one.part.start, one.part.start + len(one.part.rows)), torch.eye(one.part.shape[1])
            matrices = part_matrices(files, one, torch.float32, before.order_of(one.part))
            added = after.linear_of(one.part)(inputs) - before.linear_of(one.part)(inputs)
            assert torch.allclose(added[:, rows].T, matrices.b @ matrices.a, atol=1e-4), one.name


def filled(name: str, checkpoint: Checkpoint, module: str) -> torch.Tensor:
    model = build(name)
    fill(model, checkpoint)
    return model.linear_of(model.parts[module]).weight


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    """In the dtype of the model: 1e9 is none of float16. The first rank has not the column of A."""
    tensors, part = usual(), PARTS["model.layers.0.mlp.down_proj"]
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"][-1, -1] = value
    files = written(tmp_path, CONFIG, tensors)
    for columns in (range(10), range(10, 20)):
        parts = PARTS | {"model.layers.0.mlp.down_proj": _cut(part, columns)}
        module = next(one for one in fit_adapter(files, parts).modules if one.part.kind == "down")
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            if columns.start and (value != 1e9 or dtype == torch.float16):
                with pytest.raises(BadAdapter, match=rf"lora_A.weight has numbers that are not finite in {dtype}"):
                    part_matrices(files, module, dtype)
            else:
                part_matrices(files, module, dtype)


def test_a_scale_that_makes_a_number_infinite_is_refused(tmp_path: Path) -> None:
    tensors = usual()
    tensors["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"][3, 2] = 3e4
    files = written(tmp_path, CONFIG | {"lora_alpha": 16}, tensors)
    module = next(one for one in fit_adapter(files, PARTS).modules if one.part.kind == "down")
    part_matrices(files, module, torch.bfloat16)
    with pytest.raises(BadAdapter, match=r"lora_B.weight has numbers that are not finite in torch.float16"):
        part_matrices(files, module, torch.float16)


def _cut(part: LinearPart, columns: range) -> LinearPart:
    return replace(part, inputs=Cut(part.inputs.total, columns))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_matrices_have_the_models_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in usual().items()}
    files = written(tmp_path, CONFIG | {"lora_alpha": 3}, tensors)
    for module in fit_adapter(files, PARTS).modules:
        for wanted in (torch.float32, torch.bfloat16):
            matrices = part_matrices(files, module, wanted)
            assert torch.equal(matrices.a, tensors[module.a.name].to(wanted))
            assert torch.equal(matrices.b, (tensors[module.b.name].float() * 0.75).to(wanted)), "rounded once"


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most numbers that a call into torch has computed."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **kwargs or {})
        if not func.is_view:
            self.numel = max(self.numel, found.numel())
        return found


def test_a_call_has_too_few_numbers_for_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.adapters.part_matrices.PIECE", 16)
    files = written(tmp_path, CONFIG, usual())
    module = next(one for one in fit_adapter(files, PARTS).modules if one.part.kind == "down")
    a, b, memory = torch.empty(4, 20), torch.empty(8, 4), torch.empty(50)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        put_matrices(files, module, a, b)
        assert 0 < largest.numel <= 20, "a piece, or a row of A"
        largest.numel = 0
        clear(memory)
        assert largest.numel == 16


def test_headers_of_any_length(tmp_path: Path) -> None:
    """safetensors fills them up to a multiple of 8 bytes; others need not."""
    directory = tmp_path / "adapter"
    files = written(directory, CONFIG, usual())
    size = int.from_bytes(files.weights[:8], "little")
    plain = [part_matrices(files, module, torch.float32) for module in fit_adapter(files, PARTS).modules]
    for more in (1, 2, 3):
        header = bytes(files.weights[8 : 8 + size]) + b" " * more
        (directory / "adapter_model.safetensors").write_bytes(
            len(header).to_bytes(8, "little") + header + bytes(files.weights[8 + size :])
        )
        moved = read_adapter(directory, MAX_BYTES)
        for module, one in zip(fit_adapter(moved, PARTS).modules, plain, strict=True):
            again = part_matrices(moved, module, torch.float32)
            assert torch.equal(again.a, one.a)
            assert torch.equal(again.b, one.b)
