"""Configs of models without weights, for random ones (`--load-format dummy`)."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "attention_bias": False, "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA = {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
_QWEN = {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_8B = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
_30B_A3B = {
    **_COMMON, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "rms_norm_eps": 1e-6,
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
    "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip
_70B = {
    **_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
}  # fmt: skip
_GEMMA3_27B = {
    **_COMMON, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62,
    "num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168, "vocab_size": 262144,
    "sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072, "rope_theta": 1e6,
    "rope_local_base_freq": 10000, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "tie_word_embeddings": True,
}  # fmt: skip
_GPT_OSS = {
    **_COMMON, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_experts_per_tok": 4,
    "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088, "max_position_embeddings": 131072,
    "rope_theta": 150000, "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip

_FP8_TENSORS = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
_FP8_BLOCKS = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))],
}  # fmt: skip
_FP8_CHANNELS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True},
    }},
}  # fmt: skip
_QWEN35 = {  # the text model of Qwen3.6-35B-A3B
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "hidden_size": 2048,
    "num_hidden_layers": 40, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248320,
    "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144, "full_attention_interval": 4, "attn_output_gate": True, "hidden_act": "silu",
    "output_gate_type": "swish", "mamba_ssm_dtype": "float32", "rms_norm_eps": 1e-6, "dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "quantization_config": {
        **_FP8_BLOCKS, "modules_to_not_convert": [
            "lm_head", "model.layers.*.mlp.gate", "model.layers.*.mlp.shared_expert_gate",
            *(f"model.layers.*.linear_attn.{part}" for part in ("conv1d", "in_proj_a", "in_proj_b", "in_proj_ba")),
        ],
    },
}  # fmt: skip
_LATENT = {
    "attention_bias": False, "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu", "dtype": "bfloat16",
    "tie_word_embeddings": False, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "norm_topk_prob": True,
}  # fmt: skip
_DEEPSEEK = {
    **_LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1,
}  # fmt: skip

CONFIGS: dict[str, dict[str, Any]] = {
    "8b": _8B,
    "8b-fp8": {**_8B, "quantization_config": _FP8_TENSORS},
    "0.6b": {
        **_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "30b-a3b": _30B_A3B,
    "30b-a3b-fp8": {**_30B_A3B, "quantization_config": _FP8_BLOCKS},
    "70b": _70B,
    "gemma3-27b": _GEMMA3_27B,
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "qwen3.6-35b-a3b-fp8": _QWEN35,
    "qwen3.8-27b-fp8": {
        **_QWEN35, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 5120,
        "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "intermediate_size": 17408,
        "linear_num_value_heads": 48,
    },
    "qwen3-next-80b-fp8": {
        **_QWEN35, "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_hidden_layers": 48,
        "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5120,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rope_theta": 1e7,
        "partial_rotary_factor": 0.25, "rope_parameters": None,
    },
    "moonlight": {  # Moonlight-16B-A3B
        **_DEEPSEEK, "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27, "vocab_size": 163840,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "max_position_embeddings": 8192,
    },
    "glm-4.7-flash": {
        **_LATENT, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
        "intermediate_size": 10240, "num_hidden_layers": 47, "vocab_size": 154880, "num_attention_heads": 20,
        "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "max_position_embeddings": 202752,
    },
    "mistral-small-4-fp8": {  # its text model; float8 with one scale a tensor
        **_LATENT, "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "hidden_size": 4096,
        "intermediate_size": 12288, "num_hidden_layers": 36, "vocab_size": 131072, "num_attention_heads": 32,
        "num_key_value_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 0, "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static"},
    },
    "deepseek-v3-5-layers": {  # a dense one, and four of the mixture
        **_DEEPSEEK, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 5, "vocab_size": 129280,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        },
    },
    "70b-fp8": {**_70B, "quantization_config": _FP8_CHANNELS},
    "tiny": {
        **_LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "max_position_embeddings": 16384,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""config.json for shapes of Llama 3.1 and 3.3, Qwen3, Qwen3-Next, Qwen3.6 and 3.8, Gemma 3, gpt-oss and models with
latent attention, and for tests.

Weights in fp8: one scale a tensor (`8b-fp8`), a scale for 128 x 128 numbers (`30b-a3b-fp8` and those with states), one
a row (`70b-fp8`).
"""
