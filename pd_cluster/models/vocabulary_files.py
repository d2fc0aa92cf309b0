"""What a tokenizer's files say of single tokens, read without a tokenizer library: ids, texts, and the named EOS."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import StartupError
from pd_cluster.models.directory import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from pathlib import Path

_NAMES_EOS = ("tokenizer_config.json", "special_tokens_map.json")
_PLAIN = ("added_tokens.json", "vocab.json")  # text -> id, of tokenizers that have no tokenizer.json


class _AddedToken(msgspec.Struct, frozen=True):
    id: int
    content: str


class _Words(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[tuple[str, float]] = {}  # a list (Unigram) is in the order of ids


class _TokenizerJson(msgspec.Struct, frozen=True):
    """The parts of tokenizer.json that are read. msgspec skips the others, such as 500,000 merges, unread."""

    added_tokens: list[_AddedToken] = []
    model: _Words = _Words()


class VocabularyFiles:
    """The tokenizer's files of a model directory, of which any may be missing. Methods raise StartupError.

    262,000 tokens are read in 0.1 s; all of the file as Python's objects took 0.6 s.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def named_eos(self) -> Iterator[tuple[str, str]]:
        """(file, text) of each `eos_token`: a text, or an object with the text as `content`."""
        for name in _NAMES_EOS:
            value = self._object(name).get("eos_token")
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None and not isinstance(text, str):
                raise StartupError(f"{self._directory / name}: eos_token must be a token's text, not {value!r}")
            if text:
                yield name, text

    def id_of(self, text: str) -> int | None:
        """The id of a token; None: the files have no such token. What tokenizer.json says wins."""
        for vocabulary in (self._added, self._words, *self._others):
            if isinstance(token_id := vocabulary.get(text), int):
                return token_id
        model = self._directory / "tokenizer.model"
        return _piece_id(model, text) if model.is_file() and not self.is_whole else None

    @property
    def is_whole(self) -> bool:
        """Whether tokenizer.json is there, with every token."""
        return bool(self._words)

    def texts_of(self, token_ids: Collection[int]) -> dict[int, str]:
        """Token by id, of those that the files have."""
        found: dict[int, str] = {}
        for vocabulary in (*reversed(self._others), self._words, self._added):
            found |= {token_id: text for text, token_id in vocabulary.items() if token_id in token_ids}
        return found

    @cached_property
    def _added(self) -> Mapping[str, int]:
        return {token.content: token.id for token in self._fast.added_tokens}

    @cached_property
    def _words(self) -> Mapping[str, int]:
        words = self._fast.model.vocab
        return words if isinstance(words, dict) else {piece[0]: token_id for token_id, piece in enumerate(words)}

    @cached_property
    def _others(self) -> list[Mapping[str, Any]]:
        decoder = self._object("tokenizer_config.json").get("added_tokens_decoder") or {}
        try:
            added = {token["content"]: int(token_id) for token_id, token in decoder.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            where = self._directory / "tokenizer_config.json"
            raise StartupError(f"{where}: added_tokens_decoder cannot be read: {error!r}") from error
        lines = self._directory / "vocab.txt"  # of WordPiece: a token each
        words = lines.read_text(encoding="utf-8", errors="replace").split("\n") if lines.is_file() else []
        return [added, *map(self._object, _PLAIN), {word: token_id for token_id, word in enumerate(words)}]

    @cached_property
    def _fast(self) -> _TokenizerJson:
        path = self._directory / "tokenizer.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=_TokenizerJson)
        except FileNotFoundError:
            return _TokenizerJson()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise StartupError(f"cannot read {path}: {error}") from error

    def _object(self, name: str) -> dict[str, Any]:
        path = self._directory / name
        return read_json(path) if path.is_file() else {}


def _piece_id(model: Path, text: str) -> int | None:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:  # the start refuses such a model without the package
        return None
    pieces = SentencePieceProcessor(model_file=str(model))
    found = int(pieces.piece_to_id(text))
    return found if pieces.id_to_piece(found) == text else None
