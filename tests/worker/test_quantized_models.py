"""Checkpoints in float8, beside transformers with the dequantized weights and with rows rounded alike."""

from __future__ import annotations

import json
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import read_json
from pd_cluster.models.registry import build_model, resolve_spec
from pd_cluster.models.weights import load_weights
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_kernels.backends import TORCH
from tests.models.rank_weights import QUANTIZED, save_random
from tests.models.thread_ranks import shares
from tests.worker.conftest import VOCAB_SIZE, SavedModel
from tests.worker.driver import GREEDY, Driver, Generation, make_executor, random_prompts
from tests.worker.quantized_models import BLOCKS, CASES, save_quantized

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from pd_cluster.worker.device_executor import DeviceExecutor

NUM_TOKENS = 4
EXACT = 1e-5  # of the logits' deviation
ROUNDED = 0.3  # where a sum is at the middle between two values of float8, and the two models round it apart


class QuantizedStore:
    """Makes each model once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, SavedModel] = {}

    def get(self, name: str) -> SavedModel:
        if name not in self._made:
            self._made[name] = save_quantized(CASES[name], self._root / name)
        return self._made[name]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> QuantizedStore:
    return QuantizedStore(tmp_path_factory.mktemp("quantized"))


def generate(executor: DeviceExecutor, prompt: list[int]) -> tuple[Generation, torch.Tensor]:
    """Greedy tokens, and the logits that chose them, [NUM_TOKENS, V]."""
    driver, seen = Driver(executor), list[torch.Tensor]()
    generation = driver.add(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    executor.watch_logits(lambda logits: seen.append(logits.clone()))
    driver.run()
    executor.watch_logits(None)
    return generation, torch.cat(seen)


@pytest.mark.parametrize("name", list(CASES))
def test_logits_equal_transformers(quantized: QuantizedStore, name: str) -> None:
    """Of short prompts, most of which have no sum that is rounded apart. Their tokens are equal, too."""
    saved = quantized.get(name)
    executor, errors = make_executor(saved.directory), []
    for prompt in random_prompts([6, 6, 6, 6, 6, 20], VOCAB_SIZE):
        generation, logits = generate(executor, prompt)
        with torch.inference_mode():
            expected = saved.model(torch.tensor([generation.all_ids[:-1]])).logits[0, -NUM_TOKENS:]
        errors.append(((logits - expected).abs().max() / expected.std()).item())
        if errors[-1] <= EXACT:
            assert expected.argmax(-1).tolist() == [token.token_id for token in generation.tokens]
    executor.close()
    assert median(errors) <= EXACT
    assert max(errors) <= ROUNDED


@pytest.mark.parametrize("name", ["qwen2-tensor", "mixtral-channels"])
def test_chunks_prefixes_and_preemption_give_the_same_tokens(quantized: QuantizedStore, name: str) -> None:
    saved = quantized.get(name)
    prompts = random_prompts((1, 17, 40), VOCAB_SIZE)
    driver = Driver(make_executor(saved.directory), budget=23)
    generations = [driver.add(prompt, GREEDY) for prompt in prompts]
    for _ in range(6):
        driver.step()
    driver.preempt(generations[1])
    again = driver.add(prompts[2], GREEDY, prefix_of=generations[2])
    assert again.computed == 32
    outputs = driver.run()
    assert {len(output) for output in outputs} == {GREEDY.max_tokens}
    asked = (*prompts, prompts[2])
    assert outputs == [saved.greedy(prompt, output) for prompt, output in zip(asked, outputs, strict=True)]


def copy_model(saved: SavedModel, target: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """The model's config in `target`, with changed settings; its tensors."""
    config = {**read_json(saved.directory / "config.json"), **settings}
    (target / "config.json").write_text(json.dumps(config))
    tensors: dict[str, torch.Tensor] = load_file(saved.directory / "model.safetensors")
    return tensors


def test_scales_may_be_stored_in_bfloat16(quantized: QuantizedStore, tmp_path: Path) -> None:
    saved = quantized.get("llama-blocks")
    tensors = copy_model(saved, tmp_path)
    rounded = {name: value.bfloat16() for name, value in tensors.items() if name.endswith("scale_inv")}
    save_file({**tensors, **rounded}, tmp_path / "model.safetensors")
    narrow = make_executor(tmp_path)
    save_file({**tensors, **{name: value.float() for name, value in rounded.items()}}, tmp_path / "model.safetensors")
    prompt = random_prompts([6], VOCAB_SIZE)[0]
    assert torch.equal(generate(narrow, prompt)[1], generate(make_executor(tmp_path), prompt)[1])


def test_scales_belong_to_the_fingerprint(quantized: QuantizedStore, tmp_path: Path) -> None:
    saved = quantized.get("qwen2-tensor")
    tensors = copy_model(saved, tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    original = make_executor(tmp_path).model.fingerprint
    assert original == make_executor(saved.directory).model.fingerprint
    tensors["model.layers.2.mlp.down_proj.weight_scale"] *= 1.01
    save_file(tensors, tmp_path / "model.safetensors")
    assert make_executor(tmp_path).model.fingerprint != original


@pytest.mark.parametrize("size", [1, 2])
def test_scales_that_are_powers_of_two_may_be_stored_as_exponents(tmp_path: Path, size: int) -> None:
    """Numbers, float8_e8m0fnu or bytes: whole, and the part of a rank, they are the same."""
    config = {**QUANTIZED["dense, blocks"], "quantization_config": {**BLOCKS, "scale_fmt": "ue8m0"}}
    save_random(tmp_path, config)
    tensors, spec = load_file(tmp_path / "model.safetensors"), resolve_spec(tmp_path, config)
    draw, seen = torch.Generator().manual_seed(0), []
    shapes = {name: value.shape for name, value in tensors.items() if name.endswith("scale_inv")}
    stored = {name: torch.randint(115, 120, shape, generator=draw, dtype=torch.uint8) for name, shape in shapes.items()}
    for scales in (
        {name: (value.float() - 127).exp2() for name, value in stored.items()},
        {name: value.view(torch.float8_e8m0fnu) for name, value in stored.items()},
        stored,
    ):
        save_file({**tensors, **scales}, tmp_path / "model.safetensors")
        model = build_model(spec, TORCH, 64, torch.float32, torch.device("cpu"), shares(size)[-1])
        load_weights(model, tmp_path, spec.tied_embeddings, lambda line: None)
        seen.append({name: slot.tensor.float() for name, slot in model.slots.items()})
    for name, expected in seen[0].items():
        assert all(torch.equal(found[name], expected) for found in seen[1:]), name
    assert {name for name in seen[0] if seen[0][name].max() == 2**-8} & {*shapes}


KEY = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{KEY}.weight_scale_inv": None}, rf"missing: {KEY}\.weight_scale_inv$"),
        ({f"{KEY}.weight_scale_inv": torch.ones(2, 1)}, r"weight_scale_inv is \[2, 1\], config.json implies \[1, 1\]"),
        ({f"{KEY}.weight": torch.ones(128, 128)}, "k_proj.weight is stored as F32, config.json implies F8_E4M3$"),
        ({f"{KEY}.weight": torch.ones(128, 128, dtype=torch.int8)}, "stored as I8, config.json implies F8_E4M3$"),
        (
            {"model.norm.weight": torch.ones(128).to(torch.float8_e4m3fn)},
            "norm.weight is stored as F8_E4M3, config.json implies F64 or F32 or F16 or BF16$",
        ),
        ({f"{KEY}.weight_zero_point": torch.ones(1)}, r"unknown: .*k_proj\.weight_zero_point$"),
        ({"model.norm.weight": torch.ones(128, dtype=torch.uint8)}, "norm.weight is stored as U8, config.json implies"),
        ({f"{KEY}.weight": torch.ones(128, 128, dtype=torch.uint8)}, "stored as U8, config.json implies F8_E4M3$"),
        ({"lm_head.weight_scale_inv": torch.ones(3, 1)}, r"unknown: lm_head\.weight_scale_inv$"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    quantized: QuantizedStore, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    tensors = {**copy_model(quantized.get("llama-blocks"), tmp_path), **changes}
    save_file({name: value for name, value in tensors.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=message):
        make_executor(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"quantization_config": {**BLOCKS, "modules_to_not_convert": [KEY]}},
            rf"leaves out {KEY}, but not model\.layers\.1\.self_attn\.q_proj: they are one product, quantized or not",
        ),
        ({"intermediate_size": 192}, r"mlp\.up_proj begins at row 192 .* quantized block of 128"),
        (
            {"num_attention_heads": 2, "num_key_value_heads": 1},
            r"v_proj begins at row 192 of its product, inside of a quantized block of 128",
        ),
    ],
)
def test_parts_of_a_product_that_do_not_fit_are_named(
    quantized: QuantizedStore, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    copy_model(quantized.get("llama-blocks"), tmp_path, **settings)
    with pytest.raises(StartupError, match=message):
        make_executor(tmp_path, load_format="dummy")
