"""The settings of published models with latent attention, as their `config.json` has them, and tiny ones of them."""

from __future__ import annotations

from typing import Any

_ALL = {
    "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
    "tie_word_embeddings": False, "use_cache": True, "pretraining_tp": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1,
    "topk_group": 1, "num_hidden_layers": 27, "rms_norm_eps": 1e-6, "rope_scaling": None, "torch_dtype": "bfloat16",
}  # fmt: skip
_CODE = {
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "seq_aux": True,
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_ONE = {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_V3 = {
    **_ALL, **_CODE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "ep_size": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "quantization_config": _BLOCKS,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": {
        **_ALL, **_CODE, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_key_value_heads": 16,
        "q_lora_rank": None, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0,
        "rope_theta": 10000, "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "max_position_embeddings": 163840, "vocab_size": 102400, "bos_token_id": 100000, "eos_token_id": 100001,
    },
    "Moonlight-16B-A3B": {
        **_V3, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": None, "n_routed_experts": 64,
        "num_experts_per_tok": 6, "n_shared_experts": 2, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0, "max_position_embeddings": 8192, "vocab_size": 163840, "bos_token_id": 163584,
        "eos_token_id": 163585, "num_nextn_predict_layers": 0, "quantization_config": None,
    },
    "GLM-4.7-Flash": {
        **_ALL, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048,
        "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "num_attention_heads": 20,
        "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
        "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "norm_topk_prob": True,
        "topk_method": "noaux_tc", "routed_scaling_factor": 1.8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0, "rope_theta": 1000000, "max_position_embeddings": 202752, "vocab_size": 154880,
        "pad_token_id": 154820, "eos_token_id": [154820, 154827, 154829],
    },
    "Mistral-Small-4": {
        **_ALL, "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 32, "q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64,
        "n_routed_experts": 128, "num_experts_per_tok": 4, "n_shared_experts": 1, "norm_topk_prob": True,
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "rope_interleave": True, "head_dim": 128,
        "max_position_embeddings": 1048576, "vocab_size": 131072, "bos_token_id": 1, "eos_token_id": 2,
        "rope_parameters": {
            **_ONE, "factor": 128.0, "original_max_position_embeddings": 8192, "max_position_embeddings": 1048576,
            "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "yarn",
        },
    },
    "DeepSeek-V3": {
        **_V3, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
        "rope_theta": 10000, "rope_scaling": _ONE, "max_position_embeddings": 163840, "vocab_size": 129280,
        "bos_token_id": 0, "eos_token_id": 1,
    },
    "Kimi-K2": {
        **_V3, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
        "routed_scaling_factor": 2.827, "rope_theta": 50000.0, "max_position_embeddings": 131072, "vocab_size": 163840,
        "rope_scaling": {**_ONE, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}, "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
}  # fmt: skip
_TINY = {
    "vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "max_position_embeddings": 640, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "v_head_dim": 20, "n_routed_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "torch_dtype": "float32",
    "quantization_config": None,
}  # fmt: skip


def tiny(name: str) -> dict[str, Any]:
    """The settings of a published model with small sizes, and an original context of 16 tokens."""
    settings = {**PUBLISHED[name], **_TINY, "qk_nope_head_dim": 12}
    settings |= {"first_k_dense_replace": min(2, settings["first_k_dense_replace"])}
    settings |= {"q_lora_rank": settings["q_lora_rank"] and 28}
    for field in ("rope_scaling", "rope_parameters"):
        if settings.get(field):
            settings[field] = {**settings[field], "original_max_position_embeddings": 16}
    if "rope_parameters" in settings:
        settings |= {"head_dim": 16, "qk_nope_head_dim": 8}
        settings["rope_parameters"] |= {"factor": 40.0, "max_position_embeddings": 640}
    return {name: value for name, value in settings.items() if name not in ("auto_map", "quantization_config")}
