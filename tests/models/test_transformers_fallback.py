"""Models that transformers' modules compute over the paged cache: their tokens, and what is refused."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pd_cluster.errors import StartupError, UnservedModel
from pd_cluster.models.directory import read_json
from pd_cluster.models.fingerprint import fingerprint
from pd_cluster.models.implementation import choose_implementation
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.worker.driver import Driver, make_executor, random_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.models.spec import ModelSpec
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.worker.device_executor import DeviceExecutor
    from pd_cluster.worker.pending_step import PendingStep

VOCAB_SIZE, WINDOW, NUM_TOKENS = 320, 24, 12
LENGTHS = (5, 16, 24, 25, 70)  # around the block and the window
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, **HEADS,
    "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "routed_scaling_factor": 2.5,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 128,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": WINDOW,
                            "rope_parameters": {**YARN, "truncate": False}}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 5.0,
                          "final_logit_softcapping": 3.0}),
    "deepseek_v3": ("deepseek_v3", {**ROUTED, **LATENT, "n_group": 4, "topk_group": 2,
                                    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 512}),
    "llama": ("llama", {}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "glm4": ("glm4", {}),
    "glm4_moe": ("glm4_moe", {**ROUTED, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1}),
    "gemma3_text": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "ministral3": ("ministral3", {}),
    "phi3": ("phi3", {}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}),
    "granite": ("granite", {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0,
                            "residual_multiplier": 0.7}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": WINDOW}),
    "cohere2": ("cohere2", {"sliding_window": WINDOW}),
    "smollm3": ("smollm3", {}),
    "seed_oss": ("seed_oss", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2}),
}  # fmt: skip
QUICK = ("gpt_oss", "gemma2", "deepseek_v3", "gpt2")  # sinks; soft caps; padded values; names of its own


class Recorder:
    """An executor that keeps the logits of every sample, by sequence."""

    def __init__(self, executor: DeviceExecutor) -> None:
        self._executor = executor
        self.num_blocks, self.block_size = executor.num_blocks, executor.block_size
        self.logits: dict[int, list[torch.Tensor]] = defaultdict(list)

    def launch(self, batch: Batch) -> PendingStep:
        owners = [chunk.seq_id for chunk in batch.chunks if chunk.num_samples]

        def watch(logits: torch.Tensor) -> None:
            for owner, row in zip(owners, logits, strict=True):
                self.logits[owner].append(row.clone())

        self._executor.watch_logits(watch)
        return self._executor.launch(batch)


def save_family(name: str, directory: Path) -> Any:
    """A random model of a family. Its weights are large enough that attention and experts count."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind, options = FAMILIES[name]
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**COMMON, **options}), attn_implementation="eager")
    with torch.no_grad():
        for key, weight in model.state_dict().items():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.1)
            elif "norm" in key or "ln_" in key:
                weight.add_(torch.rand_like(weight), alpha=0.3)
            else:  # biases, sinks
                weight.normal_(0.0, 0.3)
    model.eval().save_pretrained(directory)
    return model


def spec_of(directory: Path, wanted: str = "transformers", **changes: Any) -> ModelSpec:
    config = {**read_json(directory / "config.json"), **changes}
    return choose_implementation(directory, config, wanted).spec


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES])
def test_tokens_and_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    """Chunks of at most 23 tokens beside decodes, blocks in random order."""
    model = save_family(name, tmp_path)
    recorder = Recorder(make_executor(tmp_path, model_impl="transformers"))
    driver = Driver(recorder, budget=23)  # type: ignore[arg-type]
    for prompt in random_prompts(LENGTHS, VOCAB_SIZE):
        driver.add(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0))
    driver.run()
    for generation in driver.sequences:
        with torch.inference_mode():
            logits = model(torch.tensor([generation.all_ids]), use_cache=False).logits[0]
        expected = logits[len(generation.prompt) - 1 : -1]
        found = torch.stack(recorder.logits[generation.seq_id])
        assert (found - expected).abs().max() < 3e-5 * expected.std()
        assert generation.all_ids[len(generation.prompt) :] == expected.argmax(-1).tolist()
