"""`python -m benchmarks model`: writes a model directory of a known shape, without weights."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import pd_cluster
from benchmarks.shapes import CONFIGS
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPLATE = Path(pd_cluster.__file__).parent / "demo_model" / "chat_template.jinja"  # for chats, tools among them
WORD_LETTERS = 4  # 26**4 words, more than any vocabulary here


def write_model(shape: str, directory: Path) -> None:
    """Write a model directory without weights: config.json, and a tokenizer in which every id is a visible word.

    The words are " aaaa", " aaab", ... in the order of their ids; other words become id 0. No id is special or ends a
    text, so that every generated token shows. Raises StartupError.
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
        (directory / TEMPLATE.name).write_text(TEMPLATE.read_text())
    except OSError as error:
        raise StartupError(f"the model directory cannot be written: {error}") from error


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks model", allow_abbrev=False)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--shape", choices=tuple(CONFIGS), default="8b", help="Default: 8b.")
    namespace = parser.parse_args(arguments)
    write_model(namespace.shape, namespace.directory)
    sys.stdout.write(f"{namespace.directory}: shape {namespace.shape}, serve it with --load-format dummy\n")
    return 0
