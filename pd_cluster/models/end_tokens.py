"""The tokens that end an answer (EOS): those that config.json, generation_config.json and the tokenizer name together.

Many chat models have the EOS of their base model in the configs, and the end of the turn in the tokenizer alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import read_json
from pd_cluster.models.vocabulary_files import VocabularyFiles
from pd_cluster.models.wrapper import text_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class EndTokens:
    """`texts`: token by id, "" where the files do not say it. `left_out`: what was named and is no token, and where."""

    texts: Mapping[int, str]
    left_out: tuple[str, ...] = ()

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.texts)

    @property
    def line(self) -> str:
        """The line of the start."""
        named = ", ".join(f"{token_id} {text!r}" if text else str(token_id) for token_id, text in self.texts.items())
        ends = f"answers end at the tokens {named}" if named else "no token ends an answer: the model's files name none"
        return "; ".join((ends, *self.left_out))


def read_end_tokens(directory: Path, config: Mapping[str, Any]) -> EndTokens:
    """`config`: the parsed config.json. Raises StartupError naming file and field for a value that is no token id."""
    vocabulary = VocabularyFiles(directory)
    settings = text_config(directory, config)
    rows = settings.get("vocab_size")
    named = list(_named_ids(directory, config))
    known = vocabulary.texts_of({token_id for _, token_id in named})
    texts: dict[int, str] = {}
    left_out = []
    for where, token_id in named:
        lacks = vocabulary.is_whole and token_id not in known
        if lacks or token_id < 0 or (isinstance(rows, int) and token_id >= rows):
            left_out.append(f"left out: {where} = {token_id}, which the vocabulary lacks")
        else:
            texts[token_id] = known.get(token_id, "")
    for file, text in vocabulary.named_eos():
        found = vocabulary.id_of(text)
        if found is None or (isinstance(rows, int) and found >= rows):
            left_out.append(f"left out: eos_token {text!r} of {file}, which the vocabulary lacks")
        else:
            texts[found] = text
    return EndTokens(dict(sorted(texts.items())), tuple(dict.fromkeys(left_out)))


def _named_ids(directory: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(place, id) of the configs: config.json, its text model, generation_config.json."""
    sources: list[tuple[str, Any]] = [("config.json: eos_token_id", config.get("eos_token_id"))]
    if isinstance(nested := config.get("text_config"), dict):
        sources.append(("config.json: text_config.eos_token_id", nested.get("eos_token_id")))
    if (path := directory / "generation_config.json").is_file():
        sources.append(("generation_config.json: eos_token_id", read_json(path).get("eos_token_id")))
    for place, value in sources:
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(one, int) or isinstance(one, bool):
                raise StartupError(f"{directory}/{place} must be a token id or a list of them, not {value!r}")
            yield place, one
