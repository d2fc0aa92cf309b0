"""Adapters that PEFT trained and saved: the engine beside PEFT's own model, with the adapter apart and merged."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_cluster.config import LoraConfig
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.models.adapter_files import AXOLOTL, TRL, UNSLOTH
from tests.worker.adapted import config_of, load
from tests.worker.driver import random_prompts
from tests.worker.scheduled import ScheduledWorker, largest_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = [  # warnings: of PEFT, about transformers and about its own settings
    pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore"),
]  # fmt: skip
MAX_BYTES = 1 << 26
STEPS, VOCAB = 12, 3000
EXACT = 2e-5  # of the deviation: transformers' own logits of this model in float32 are 1.04e-5 from those of float64
LAYERS = r"model\.layers\.[0-3]\.(self_attn\.(k|v)_proj|mlp\.up_proj)"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "patterns": {
        "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "o_proj", "down_proj", "gate_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 16, r"layers\.[1-3]\.mlp\..*": 2, "^model.layers.5.*": 33},
        "alpha_pattern": {"down_proj": 20, "o_proj|gate_proj": 3},
    },
    "all-linear": {"r": 3, "lora_alpha": 12, "target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]},
    "regex": {"r": 64, "lora_alpha": 64, "target_modules": LAYERS, "init_lora_weights": "gaussian"},
    "layers": {
        "r": 5, "lora_alpha": 10, "target_modules": ["o_proj", "model.layers.0.mlp.up_proj"],
        "layers_to_transform": [1, 4], "layers_pattern": "layers",
    },
    "bf16": {"r": 16, "lora_alpha": 32, "target_modules": ["k_proj", "down_proj"]},
    "mica": {"r": 8, "lora_alpha": 32, "target_modules": ["v_proj", "down_proj"], "init_lora_weights": "mica"},
    "olora": {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": "olora"},
}  # fmt: skip
# What trainers write beside PEFT's own fields. A calibration that left the base as it was, or was undone, is nothing
FIELDS: dict[str, dict[str, Any]] = {
    "plain": {name: value for name, value in UNSLOTH.items() if name not in AXOLOTL},
    "patterns": {"corda_config": {"corda_method": "ipm"}, "lora_ga_config": {"direction": "ArB2r"}},
    "regex": {"loftq_config": {"loftq_bits": 4, "loftq_iter": 1}, "eva_config": {"rho": 2.0}},
    "bf16": {name: value for name, value in TRL.items() if name not in AXOLOTL},
}


class PeftAdapter:
    """One on disk, and PEFT's models of it."""

    def __init__(self, base: Path, path: Path) -> None:
        from peft import PeftModel

        def loaded() -> Any:
            return PeftModel.from_pretrained(model_of(base), str(path)).eval()

        self.path, self.digest = path, read_adapter(path, MAX_BYTES).digest
        self.models: Mapping[str, Any] = {"apart": loaded(), "merged": loaded().merge_and_unload()}


def model_of(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()


def train(base: Path, directory: Path, name: str) -> Path:
    """A real training by PEFT; B is what its steps made of zeros."""
    import peft

    torch.manual_seed(len(name))
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    config = peft.LoraConfig(task_type="CAUSAL_LM", **SETTINGS[name])
    model = peft.get_peft_model(model_of(base, dtype), config, autocast_adapter_dtype=False)
    more: dict[str, Any] = {}
    if name == "olora":  # it has changed the base: PEFT writes an adapter of twice the rank for the base as it was
        model.save_pretrained(str(directory / "start"))
        more = {"path_initial_model_for_weight_conversion": str(directory / "start")}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    ids = torch.randint(5, VOCAB, (2, 48), generator=torch.Generator().manual_seed(len(name)))
    for _ in range(STEPS):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(str(directory), **more)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | FIELDS.get(name, {})))
    return directory


@pytest.fixture(scope="module")
def answered(
    tmp_path_factory: pytest.TempPathFactory, demo_directory: Path
) -> Iterator[tuple[ScheduledWorker, dict[str, PeftAdapter], dict[str, str]]]:
    """One mixed run: chunks of 23 tokens, three slots for all adapters and the base. -> names by request, too."""
    pytest.importorskip("peft", reason="peft is not installed")
    root = tmp_path_factory.mktemp("peft")
    adapters = {name: PeftAdapter(demo_directory, train(demo_directory, root / name, name)) for name in SETTINGS}
    config = replace(config_of(demo_directory), lora=LoraConfig(lora_slots=3, max_lora_rank=64))
    executor = DeviceExecutor.started(config, lambda _: None)
    worker = ScheduledWorker(executor, budget=23, num_slots=3)
    asked = {"base": ""}
    worker.add("base", random_prompts([30], VOCAB)[0], max_tokens=12)
    for name, adapter in adapters.items():
        assert not load(executor, adapter.digest, adapter.path)
        worker.scheduler._queues.adapters.in_host[adapter.digest] = True
        for number, prompt in enumerate(random_prompts([5, 40], VOCAB)):
            asked[f"{name}-{number}"] = name
            worker.add(f"{name}-{number}", prompt, max_tokens=12, adapter=adapter.digest)
    worker.run()
    yield worker, adapters, asked
    executor.close()


@pytest.mark.parametrize("form", ["apart", "merged"])
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_and_tokens_are_those_of_peft(
    answered: tuple[ScheduledWorker, dict[str, PeftAdapter], dict[str, str]],
    demo_directory: Path,
    name: str,
    form: str,
) -> None:
    worker, adapters, asked = answered
    drawn, model = worker.drawn, adapters[name].models[form]
    worker.drawn = [one for one in drawn if asked[one.seq.request.request_id] == name]
    try:
        assert largest_error(worker, model) < EXACT
        assert largest_error(worker, model_of(demo_directory)) > 0.03, "an adapter that is left out would not be seen"
        for seq in {one.seq.seq_id: one.seq for one in worker.drawn}.values():
            with torch.inference_mode():
                greedy = model(input_ids=torch.tensor([seq.token_ids])).logits[0].argmax(-1).tolist()
            (output,) = worker.outputs[seq.request.request_id]
            assert len(output) == 12
            assert output == greedy[-13:-1]
    finally:
        worker.drawn = drawn
