"""llguidance's view of a vocabulary, made of the texts that `token_texts` has for each token.

llguidance would read `tokenizer.json` by itself. Then it sees other texts than the answers have where it does not know
the decoder or ids have gaps. And it encodes what a grammar leaves no choice about by the whole tokenizer: a normal form
(Qwen's NFC), or a text that spells a special token, then ends the answer in an error. So it gets the texts:

    byte-level BPE    as tiktoken has it, with the pattern that splits words: it encodes as the model's tokenizer does
    any other         as a table. It cannot encode, so the model chooses among the tokens that spell the text
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pd_cluster.models.token_texts import decoder_steps, token_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy.typing as npt

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
# A grammar that nothing refers to: llguidance lets its options hold for all grammars of the list
_MODEL_CHOOSES = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: "x"'}
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SAMPLED = 128  # tokens


class GrammarVocabulary(NamedTuple):
    tokenizer: Any  # llguidance's
    encodes: bool  # False: grammars need `model_chooses`


class GrammarTokens(NamedTuple):
    """What the files of a model say about its tokens. `texts` and `added` hold no id after the model's rows."""

    texts: list[bytes]  # by id; b"": no token
    added: dict[str, int]  # content and id of added tokens
    marks: frozenset[int]  # the ids that text never matches, only a name or an id in a grammar
    vocab_size: int  # the model's rows
    pattern: str  # which splits texts before a byte-level BPE; "": another tokenizer

    @classmethod
    def read(cls, tokenizer_json: Path, vocab_size: int) -> GrammarTokens:
        """Raises an Exception for a file that cannot be read."""
        pattern = ""
        if tokenizer_json.is_file():
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(tokenizer_json))
            added, pattern = tokenizer.get_added_tokens_decoder(), _pattern(tokenizer)
            backend: Any = tokenizer
        elif not has_tokenizer(tokenizer_json.parent):
            raise FileNotFoundError(f"{tokenizer_json.parent.name} has no {tokenizer_json.name}")
        else:  # the API's own way, which takes 2 s of imports
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_json.parent), local_files_only=True)
            added, backend = tokenizer.added_tokens_decoder, getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None and (backend.decoder is None or "WordPiece" in decoder_steps(backend.decoder)):
            raise ValueError("its tokens are words that blanks join, and no grammar has a blank before each word")
        texts = token_bytes(tokenizer)[:vocab_size]
        if pattern and not _ranks_are_ids(tokenizer, texts):
            pattern = ""
        known = {token_id: token for token_id, token in added.items() if token_id < vocab_size}
        marks = {token_id for token_id, token in known.items() if token.special or _is_marker(token.content)}
        for token_id in marks:
            texts[token_id] = known[token_id].content.encode()
        contents = {token.content: token_id for token_id, token in known.items()}
        return cls(texts, contents, frozenset(marks), vocab_size, pattern)

    @property
    def holes(self) -> Holes:
        """The rows without a token."""
        has_token = np.zeros(-(-self.vocab_size // 32) * 32, bool)
        has_token[: len(self.texts)] = [bool(raw) for raw in self.texts]
        words = np.packbits(has_token, bitorder="little").view(np.int32)
        return Holes(at := np.flatnonzero(words != -1), words[at])

    def known(self, token_ids: Iterable[int]) -> list[int]:
        """Those that are tokens, in order."""
        return sorted(one for one in token_ids if 0 <= one < len(self.texts) and self.texts[one])

    @property
    def stand_in_eos(self) -> int:
        """A token for an end that only has to exist: a special one, which no text needs."""
        return max(self.marks, default=self.known(range(len(self.texts)))[-1])

    def vocabulary(self, eos_token_ids: Sequence[int]) -> GrammarVocabulary:
        """Raises ValueError if none of the EOS ids is a token."""
        import llguidance

        if not (eos := self.known(eos_token_ids)):
            raise ValueError(f"none of the EOS ids {list(eos_token_ids)} is a token")
        if (known := self._as_tiktoken(eos)) is not None:
            return GrammarVocabulary(known, encodes=True)
        padding = [b""] * (self.vocab_size - len(self.texts))
        table = _Table(self.texts + padding, sorted(self.marks), eos[0])
        return GrammarVocabulary(llguidance.LLTokenizer(table, eos_token=eos), encodes=False)

    def _as_tiktoken(self, eos: list[int]) -> Any:
        """None: the tokens are not those of a byte-level BPE, or its pattern cannot be read."""
        import llguidance

        ids = [token_id for token_id in self.known(range(len(self.texts))) if token_id not in self.marks]
        encoder = {self.texts[token_id]: token_id for token_id in ids}
        if not self.pattern or len(encoder) < len(ids):
            return None  # a byte without a token, which tiktoken panics at, is no reason: no answer can have it
        marks = {content: token_id for content, token_id in self.added.items() if token_id in self.marks}
        try:
            return llguidance.LLTokenizer.from_tiktoken(
                encoder=encoder, special_tokens=marks, pattern=self.pattern, eos_token=eos, n_vocab=self.vocab_size
            )
        except ValueError:
            return None


class Holes(NamedTuple):
    """Rows without a token, as words of masks. A grammar can allow them only by `<[*]>`, `<[^...]>` or their ids."""

    at: npt.NDArray[np.intp]  # the words with such a row
    keep: npt.NDArray[np.int32]  # the rows with a token in these words

    def close(self, masks: npt.NDArray[np.int32]) -> None:
        """Take the rows out of masks [M, W]."""
        if len(self.at):
            masks[:, self.at] &= self.keep


class _Table:
    """What llguidance's class of the same form holds, for tokenizers of other libraries."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], special_token_ids: list[int], eos_token_id: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special_token_ids, eos_token_id

    def __call__(self, text: str) -> list[int]:
        """Only grammars without `model_chooses` ask for it."""
        return []


def _is_marker(content: str) -> bool:
    """As llguidance sees it in `tokenizer.json`: Qwen's `<think>` is not special, and still not text."""
    return content.startswith("<") and content.endswith(">")


def _pattern(tokenizer: Any) -> str:
    """The pattern of a byte-level BPE, its alternatives in the order of the steps; "" for another tokenizer."""
    if not set(decoder_steps(tokenizer.decoder)) <= {"ByteLevel", "Fuse"} or type(tokenizer.model).__name__ != "BPE":
        return ""
    before = tokenizer.pre_tokenizer
    try:
        patterns = _patterns(json.loads(before.__getstate__()) if before is not None else {})
    except KeyError:  # a step or a pattern of another form
        return ""
    return "|".join([*patterns, "(?s:.)"])  # tiktoken drops what no pattern matches, as DeepSeek's no joiners of emoji


def _ranks_are_ids(tokenizer: Any, texts: list[bytes]) -> bool:
    """Whether each text that is a token encodes to this token, as tiktoken would have it: true of real vocabularies."""
    places = range(0, len(texts), max(len(texts) // _SAMPLED, 1))
    sampled = {at: text for at in places if (text := texts[at].decode(errors="ignore")) and text.encode() == texts[at]}
    alike: list[bool] = [tokenizer.encode(text, add_special_tokens=False).ids == [at] for at, text in sampled.items()]
    return sum(alike) > 0.9 * len(alike)


def _patterns(step: dict[str, Any]) -> list[str]:
    """Raises KeyError for a step that is not known."""
    match step.get("type"):
        case "Sequence":
            return [pattern for one in step["pretokenizers"] for pattern in _patterns(one)]
        case "Split":
            return [step["pattern"]["Regex"]]
        case "Digits":
            return [r"\p{N}" if step["individual_digits"] else r"\p{N}+"]
        case "ByteLevel":
            return [_GPT2_PATTERN] if step["use_regex"] else []
    raise KeyError(step.get("type"))


def has_tokenizer(model_dir: Path) -> bool:
    return any((model_dir / name).is_file() for name in _TOKENIZER_FILES)


def model_chooses(grammar: str) -> str:
    """The grammar with the option that llguidance encodes nothing, for `LLMatcher`."""
    parsed: Any = json.loads(grammar) if grammar.lstrip().startswith("{") else {"grammars": [{"lark_grammar": grammar}]}
    if not (isinstance(parsed, dict) and isinstance(parsed.get("grammars"), list)):
        return grammar  # llguidance says what is wrong
    return json.dumps(parsed | {"grammars": [*parsed["grammars"], _MODEL_CHOOSES]}, ensure_ascii=False)
