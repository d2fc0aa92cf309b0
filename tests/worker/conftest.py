"""Tiny random models of every family, in transformers' own format."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.worker.driver import make_executor
from tests.worker.packed_models import save_packed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_cluster.worker.device_executor import DeviceExecutor

VOCAB_SIZE = 320
COMMON = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.15, "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 16.0, "original_max_position_embeddings": 16}
LINEAR_ROPE = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
EXPERTS = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GLM4_EXPERTS = {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
GPT_OSS = {
    "head_dim": 16, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_local_experts": 8,
    "num_experts_per_tok": 3, "sliding_window": 24, "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
_LATENT = {
    "num_key_value_heads": 6, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "q_lora_rank": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
}  # fmt: skip
_LATENT_YARN = {
    **YARN_ROPE, "rope_theta": 1e4, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.8, "mscale_all_dim": 1.2,
}  # fmt: skip
LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v2": ("DeepseekV2", {**_LATENT, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy",
                                   "routed_scaling_factor": 3.0, "rope_parameters": _LATENT_YARN,
                                   "first_k_dense_replace": 1}),
    "deepseek-v2-lite": ("DeepseekV2", {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 1}),
    "deepseek-v3": ("DeepseekV3", {**_LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": _LATENT_YARN,
                                   "first_k_dense_replace": 1}),
    "moonlight": ("DeepseekV3", {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
                                 "first_k_dense_replace": 1, "routed_scaling_factor": 2.446, "rope_interleave": True}),
    "deepseek-v3-halves": ("DeepseekV3", {**_LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False,
                                          "first_k_dense_replace": 0}),
    "glm4-lite": ("Glm4MoeLite", {**_LATENT, "rms_norm_eps": 1e-5}),
    "mistral4": ("Mistral4", {**_LATENT, "kv_lora_rank": 16, "rope_parameters": {
        **_LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.4}}),
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **LATENT_MODELS,
    "llama": ("Llama", {}),
    "llama-llama3-rope-biases": (
        "Llama",
        {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True, "head_dim": 16},
    ),
    "llama-mha-linear-rope-tied": (
        "Llama",
        {
            "num_key_value_heads": 6,
            "tie_word_embeddings": True,
            "rope_parameters": LINEAR_ROPE,
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 24, "head_dim": 8}),
    "mistral-mqa": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1, "head_dim": 20}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-some-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 19, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-some-windows": (
        "Qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 33, "max_window_layers": 2},
    ),
    "qwen3-yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN_ROPE, "max_position_embeddings": 40}),
    "qwen3-experts": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen2-shared-expert": (
        "Qwen2Moe",
        {**EXPERTS, "decoder_sparse_step": 2, "shared_expert_intermediate_size": 40},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}),
    "glm4-experts": (
        "Glm4Moe",
        {
            **GLM4_EXPERTS,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
        },
    ),
    "glm4-air": ("Glm4Moe", {**GLM4_EXPERTS, "rope_parameters": {**LINEAR_ROPE, "partial_rotary_factor": 0.25}}),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 7,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-mxfp4": ("GptOss", {**GPT_OSS, "packed": True}),
}


@dataclass(frozen=True)
class SavedModel:
    """A model directory and the transformers model that was saved there."""

    directory: Path
    model: Any

    @cached_property
    def exact(self) -> Any:
        """A copy with products in float64: the errors of transformers' own in float32 are some 4e-6 of the deviation.

        With ours they come near 1e-5, and pass it on processors that add in another order
        (`ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBILITY` is one). Norms, softmax, angles and the delta rule stay in
        float32, so errors of models that keep states are of both.
        """
        exact = deepcopy(self.model).double()
        exact.set_experts_implementation("eager")  # the others refuse float64
        return exact

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Greedy continuation by transformers."""
        ids = torch.tensor([prompt], device=self.model.device)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        found: list[int] = out[0, len(prompt) :].tolist()
        return found

    def greedy(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """Its likeliest tokens after `prompt` and after each of `tokens` but the last, by transformers.

        They equal `tokens` if these are its greedy continuation, and only then. One pass computes them;
        `generate` makes one for each token.
        """
        return self.greedy_each([prompt], [tokens])[0]

    def greedy_each(self, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
        """The same of several prompts by one pass. They are padded to the longest: no token sees those after it."""
        rows = [[*prompt, *tokens[:-1]] for prompt, tokens in zip(prompts, outputs, strict=True)]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        with torch.inference_mode():
            best = self.model(padded, use_cache=False).logits.argmax(-1).tolist()
        return [ids[len(prompt) - 1 : len(row)] for ids, prompt, row in zip(best, prompts, rows, strict=True)]

    def logprobs(self, ids: list[int]) -> torch.Tensor:
        """Log-softmax at every position, [len(ids), V]."""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(-1)


def as_released(model: Any) -> Any:
    """The `model` with the scores of the released Mistral Small 4, where transformers has others: see the registry."""
    for module in model.modules():
        if type(module).__name__ == "Mistral4Attention":
            module.scaling = module.qk_head_dim**-0.5
    return model


def save_model(kind: str, directory: Path, options: dict[str, Any], seed: int = 0) -> SavedModel:
    """A random model of transformers' `{kind}ForCausalLM`, norms, biases and sinks random too.

    The option `packed`: with experts in MXFP4 on disk.
    """
    import transformers

    torch.manual_seed(seed)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    packed = options.get("packed", False)
    settings = {name: value for name, value in {**COMMON, **options}.items() if name != "packed"}
    model = as_released(model_class(model_class.config_class(**settings)).eval())
    is_offset = kind == "Gemma3" or hasattr(model.config, "linear_num_key_heads")  # its norms multiply by 1 more
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("norm.weight"):
                least = -0.5 if is_offset and not name.endswith("linear_attn.norm.weight") else 0.5
                parameter.uniform_(least, least + 1)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
            elif name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
    if packed:
        save_packed(model, directory)
    else:
        model.save_pretrained(directory)
    return SavedModel(directory, model)


class ModelStore:
    """Makes each model once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, SavedModel] = {}

    def get(self, name: str) -> SavedModel:
        if name not in self._made:
            kind, options = MODELS[name]
            self._made[name] = save_model(kind, self._root / name, options)
        return self._made[name]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> ModelStore:
    return ModelStore(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def demo_directory() -> Path:
    import pd_cluster

    return Path(pd_cluster.__file__).parent / "demo_model"


@pytest.fixture
def executor(request: pytest.FixtureRequest, models: ModelStore) -> Iterator[DeviceExecutor]:
    """A fresh executor of the small Qwen3, or of the model that a test names as its parameter."""
    executor = make_executor(models.get(getattr(request, "param", "qwen3")).directory)
    yield executor
    executor.close()
