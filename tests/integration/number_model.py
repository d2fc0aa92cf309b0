"""Models of random weights that nodes serve: their tokenizer knows no text, each token is a number."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.worker.conftest import VOCAB_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.integration.system import Answer


def save_tokenizer(directory: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Beside a model of so many tokens."""
    tokenizer = Tokenizer(models.WordLevel({str(index): index for index in range(vocab_size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    about = {"backend": "tokenizers", "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))


def token_ids(answer: Answer) -> list[int]:
    """The tokens of an answer with one choice."""
    return [int(word) for word in answer.choices[0]["text"].split()]
