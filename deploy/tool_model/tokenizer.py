"""Train the tool model's tokenizer: byte-level BPE of 512 entries, with digits, blanks and signs one by one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from conversations import HERE, Conversations
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 512
CONTEXT = 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # tokens of their own, not special, as Qwen3 has them
# Letters never take the blank before them: so a city is the same tokens in a question, in JSON and in an answer
SPLIT = r"[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|\s"


def train_tokenizer(target: Path, num_documents: int = 3000) -> PreTrainedTokenizerFast:
    """Train on the conversations, and save to `target` in the Hugging Face layout with the chat template."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS),
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    source = Conversations(seed=3)
    tokenizer.train_from_iterator((json.dumps(source.draw()[:2]) for _ in range(num_documents)), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = (HERE / "chat_template.jinja").read_text()
    fast.save_pretrained(target)
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    path.write_text(json.dumps(config, indent=2) + "\n")
    return fast
