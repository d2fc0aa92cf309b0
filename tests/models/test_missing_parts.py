"""What is said of known models that are not served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pd_cluster.config import ModelConfig, NodeConfig
from pd_cluster.errors import UnservedModel
from pd_cluster.launch.check import check_model
from pd_cluster.launch.preflight import model_problems
from pd_cluster.models.missing_parts import MISSING_PARTS
from pd_cluster.models.registry import ARCHITECTURES, choose_implementation
from pd_cluster.models.wrapper import WRAPPERS
from tests.models.test_scaled_contexts import HERE

if TYPE_CHECKING:
    from pathlib import Path

REFUSED = {  # `model_type` on the hub -> its architecture, and a word of what is missing
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DSA"),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", "DSA"),
    "deepseek_v4": ("DeepseekV4ForCausalLM", "compressed keys"),
    "kimi_linear": ("KimiLinearForCausalLM", "KDA"),
    "nemotron_h": ("NemotronHForCausalLM", "Mamba-2"),
    "falcon_h1": ("FalconH1ForCausalLM", "Mamba-2"),
    "bamba": ("BambaForCausalLM", "Mamba-2"),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "Mamba-2"),
    "kimi_k25": ("KimiK25ForConditionalGeneration", "4 bits"),
}


@pytest.mark.parametrize("model_type", list(REFUSED))
def test_the_refusal_names_the_architecture_and_what_is_missing(tmp_path: Path, model_type: str) -> None:
    architecture, what = REFUSED[model_type]
    config = {"architectures": [architecture], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = NodeConfig(model=ModelConfig(model=str(tmp_path)))
    (problem,) = model_problems(settings, tmp_path)
    assert problem.startswith(f"--model: {tmp_path / 'config.json'}: {architecture} is not served: it needs ")
    assert what in problem
    assert problem.count(str(tmp_path)) == 1
    assert check_model(settings).detail == problem
    with pytest.raises(UnservedModel, match=r"^model/config\.json: transformers' modules cannot be"):
        choose_implementation(HERE, config, "transformers")


def test_no_model_is_both_served_and_missing_a_part() -> None:
    names = [name for architectures in MISSING_PARTS.values() for name in architectures]
    assert len(names) == len(set(names))
    assert not set(names) & {*ARCHITECTURES, *WRAPPERS}
