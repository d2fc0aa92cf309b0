"""SmolLM2-135M-Instruct as a directory that nodes and transformers load, made of the GGUF that a package carries."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

_CONTROL = 3  # a token type of GGUF
_OUTSIDE = {"token_embd": "embed_tokens", "output_norm": "norm"}
_IN_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def convert(gguf_file: Path, directory: Path) -> None:
    """Write config, tokenizer and bf16 weights into `directory`. The package `gguf` must be importable."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader: Any = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": _config(fields),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
        "tokenizer_config.json": _tokenizer_config(fields),
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    _tokenizer(fields).save(str(directory / "tokenizer.json"))
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    save_file(dict(_weights(reader, heads)), directory / "model.safetensors", metadata={"format": "pt"})


def _weights(reader: Any, heads: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of each weight, as transformers has them."""
    import torch
    from gguf.quants import dequantize

    for stored in reader.tensors:
        values = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", stored.name)
        if layer is None:
            name = _OUTSIDE[stored.name.removesuffix(".weight")]
        else:
            name = f"layers.{layer[1]}.{_IN_LAYER[layer[2]]}"
            values = _halves_apart(values, heads[layer[2]]) if layer[2] in heads else values
        yield f"model.{name}.weight", torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def _halves_apart(values: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a projection whose pairs RoPE turns: GGUF has the two of a pair side by side, transformers in halves."""
    pairs = values.reshape(num_heads, -1, 2, values.shape[1])
    return pairs.transpose(0, 2, 1, 3).reshape(values.shape)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "max_position_embeddings": of("context_length"),
        "rope_theta": of("rope.freq_base"),
        "rms_norm_eps": 1e-5,  # the file has it as float32
        "vocab_size": of("vocab_size"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{ours}_token": tokens[fields[f"tokenizer.ggml.{theirs}_token_id"]] for ours, theirs in kinds.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
        **named,
    }


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE that splits numbers into digits first: GGUF names this step (`smollm`), but does not hold it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == _CONTROL]
    tokenizer.add_special_tokens(special)
    return tokenizer
