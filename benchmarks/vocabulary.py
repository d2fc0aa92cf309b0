"""`python -m benchmarks vocabulary`: a tokenizer.json of a published vocabulary, for measurements of grammars.

Tekken, 131,072 tokens, is in the package mistral-common (`mistral_common/data/tekken_*.json`). The file has no merges,
so it cuts texts by bytes: grammars read the tokens only. Random words are no substitute, because llguidance computes
the masks inside of strings by classes of tokens that are common in real vocabularies.
"""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

END = "</s>"


def write_vocabulary(tekken: Path, size: int, to: Path) -> int:
    """Write the first `size` tokens. -> the id of the end token. Raises OSError, ValueError and KeyError."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    told = json.loads(tekken.read_text(encoding="utf-8"))
    num_special = told["config"]["default_num_special_tokens"]
    names = ["<unk>", "<s>", END, *(f"<SPECIAL_{at}>" for at in range(3, num_special))]
    letters = _letters()
    vocab = {name: at for at, name in enumerate(names)}
    for token in told["vocab"][: size - num_special]:
        piece = "".join(letters[byte] for byte in base64.b64decode(token["token_bytes"]))
        vocab[piece] = num_special + token["rank"]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names)
    tokenizer.save(str(to), pretty=False)
    return vocab[END]


def _letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks vocabulary", allow_abbrev=False)
    parser.add_argument("tekken", type=Path, metavar="FILE", help="tekken_*.json of mistral-common.")
    parser.add_argument("to", type=Path, metavar="TO", help="The tokenizer.json to write.")
    parser.add_argument("--size", type=int, default=128_256, metavar="N", help="Tokens (default: those of 8b).")
    namespace = parser.parse_args(arguments)
    try:
        write_vocabulary(namespace.tekken, namespace.size, namespace.to)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"{namespace.tekken} is no Tekken vocabulary: {error!r}") from error
    return 0
