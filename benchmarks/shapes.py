"""Configs of models without weights, for random ones (`--load-format dummy`)."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "attention_bias": False, "bos_token_id": None, "eos_token_id": None, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA = {**_COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
_QWEN = {**_COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "0.6b": {
        **_QWEN, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2048, "max_position_embeddings": 16384,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip
"""config.json for the shapes of Llama-3.1-8B and Qwen3-0.6B, and for a small shape for tests."""
