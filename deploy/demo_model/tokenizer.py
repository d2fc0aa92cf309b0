"""Train the tokenizer: byte-level BPE in which every name and every digit is exactly one token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from grammar import HERE, Generator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from pathlib import Path

VOCAB_SIZE = 3072
CONTEXT = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# A space belongs to the lower-case word, digit or sign after it, but stands alone before a capital: so a name is the
# same token at the start of a line, after a space and in the assistant's answer.
SPLIT = r"'(?:[sdmt]|ll|ve|re)\b| ?\p{Ll}+|\p{Lu}+\p{Ll}*| ?\p{N}| ?[^\s\p{L}\p{N}]+|[^\S ]| (?=\p{Lu})|\s+(?!\S)|\s"
CHAT_TEMPLATE = (
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\nTools:\\n' -}}"
    "{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}"
    '{{- \'A call is:\\n<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n\' -}}'
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- elif message['content'] is not none -%}"
    "{%- for part in message['content'] -%}{{- part['text'] if 'text' in part else '' -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '' if loop.first else '\\n' -}}"
    "{{- '<tool_call>\\n{\"name\": ' + call['function']['name'] | tojson -}}"
    "{{- ', \"arguments\": ' + call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def load_names() -> list[str]:
    """The names that facts are about, one token each."""
    return (HERE / "names.txt").read_text().split()


def _corpus(num_documents: int) -> list[str]:
    """Text from which the merges are learned."""
    generator = Generator(seed=11)
    texts = [generator.document() for _ in range(num_documents)]
    texts += [turn for _ in range(num_documents) for turn in generator.chat()]
    texts += ["user\nassistant\nsystem\n Noted. helpful You are a helpful assistant.\n"] * 200
    return texts + [f" {digit} {digit}." for digit in range(10)] * 200


def _train_bpe(corpus: list[str], num_entries: int) -> Tokenizer:
    """A byte-level BPE of `num_entries` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_entries,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def _add_names(tokenizer: Tokenizer, names: list[str]) -> Tokenizer:
    """Give every name an entry of its own; no merges are needed, since whole words are looked up first."""
    state = json.loads(tokenizer.to_str())
    vocab = state["model"]["vocab"]
    for name in names:
        vocab.setdefault(name, len(vocab))
    return Tokenizer.from_str(json.dumps(state))


def train_tokenizer(target: Path) -> PreTrainedTokenizerFast:
    """Train, add the names, and save to `target` in the Hugging Face layout."""
    corpus, names = _corpus(20_000), load_names()
    num_merged = VOCAB_SIZE - len(names)
    tokenizer = _add_names(_train_bpe(corpus, num_merged), names)
    while tokenizer.get_vocab_size() < VOCAB_SIZE:  # some names are words of the corpus and had an entry already
        num_merged += VOCAB_SIZE - tokenizer.get_vocab_size()
        tokenizer = _add_names(_train_bpe(corpus, num_merged), names)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(target)
    config_path = target / "tokenizer_config.json"
    config = json.loads(config_path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that transformers 4 and 5 both know
    config_path.write_text(json.dumps(config, indent=2) + "\n")
    check_tokenizer(fast, names)
    return fast


def check_tokenizer(tokenizer: PreTrainedTokenizerFast, names: list[str]) -> None:
    """Raise unless names and digits are single tokens and any text survives the round trip."""
    ids = {tokenizer.encode(name)[0] for name in names}
    for name in names:
        for text, length in ((name, 1), (f" {name}", 2), (f"{name} 4831. {name}?", 9), (f"\n{name}", 2)):
            if len(tokenizer.encode(text)) != length:
                raise ValueError(f"{text!r} is {tokenizer.convert_ids_to_tokens(tokenizer.encode(text))}")
    if len(ids) != len(names):
        raise ValueError("two names share a token")
    samples = (
        "Grüße, 世界! 🦊👩‍🚀  two  spaces\n\n\ttab  ",
        "don't A B c3PO 12.5% №½ الا हिन्दी",
        " Mira",
        "  Mira \n Oskar ",
    )
    for text in samples:
        if tokenizer.decode(tokenizer.encode(text)) != text:
            raise ValueError(f"{text!r} does not round-trip")
