"""Models by their numbers alone, for weights drawn at random (`--load-format dummy`)."""

from __future__ import annotations

import json
from itertools import product
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

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
"""config.json of Llama-3.1-8B's shape, of Qwen3-0.6B's, and of one for tests."""

WORD_LETTERS = 4  # 26**4 words are more than any vocabulary here


def write_model(shape: str, directory: Path) -> None:
    """A model directory without weights: config.json and a tokenizer in which every id is a visible word.

    The words are " aaaa", " aaab", ... in order of their ids; whatever is no such word becomes id 0. No id is special
    or ends a text, so that every generated token shows. Raises StartupError.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = CONFIGS[shape]
    words = ["Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=WORD_LETTERS)]
    vocabulary = {word: index for index, word in enumerate(words[: config["vocab_size"]])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    about = {"backend": "tokenizers", "tokenizer_class": "PreTrainedTokenizerFast"}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (directory / "tokenizer_config.json").write_text(json.dumps(about, indent=2) + "\n")
        (directory / "tokenizer.json").write_text(tokenizer.to_str())
    except OSError as error:
        raise StartupError(f"the model directory cannot be written: {error}") from error
