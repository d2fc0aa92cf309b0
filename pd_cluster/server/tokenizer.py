"""Text to token ids and back. Slow work runs in one thread, off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.models.wrapper import text_config
from pd_cluster.server.template_stability import TemplateStability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.server.template_stability import Decider

    ChatNote = Callable[["Encoded", list[Decider]], None]

Result = TypeVar("Result")
_SENTENCEPIECE_SPACE = "▁"
_NORMAL_FORMS = ("NFC", "NFD", "NFKD")  # NFKC is not bounded so tightly
_NORMAL_FORM_FACTOR = 3
_LOSSY_FACTOR = 16
_QUERY, _DOCUMENT = (re.compile(f"""['"]{role}['"]""") for role in ("query", "document"))
_NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")


class Encoded(NamedTuple):
    """A text with its tokens, and where they end in it."""

    text: str
    ids: list[int]
    offsets: Any  # a fast tokenizer's; None: a slow one's

    @property
    def has_ends(self) -> bool:
        return self.offsets is not None

    def end_of(self, index: int) -> int:
        """Characters of `text` up to the end of a token; 0 for a token that stands for none of it."""
        span = self.offsets.token_to_chars(index)
        return 0 if span is None else int(span[1])


class Tokenizer:
    """A model's Hugging Face tokenizer. Close it to end its thread.

    `vocab_size` is that of the model: its embedding may have more rows than the tokenizer has entries.
    """

    def __init__(self, tokenizer: Any, vocab_size: int = 0) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = max(vocab_size, len(tokenizer))
        self._special = frozenset(tokenizer.all_special_ids)
        self._bytes = _token_bytes(tokenizer)
        self._stability = TemplateStability(str(tokenizer.chat_template or ""), self._render)
        self._max_bytes_per_token = _max_bytes_per_token(tokenizer, self._bytes)
        # one thread: fast tokenizers hold padding and truncation settings, and fail when two threads use them
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, model_dir: Path, chat_template: str = "") -> Tokenizer:
        """Load the tokenizer of a model directory. Raises StartupError.

        `chat_template`: a file that replaces the model's chat template.
        """
        from transformers import AutoTokenizer  # its imports take two seconds, and only nodes need them

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
            config = model_dir / "config.json"
            settings = text_config(model_dir, json.loads(config.read_text())) if config.is_file() else {}
        except (OSError, ValueError, KeyError) as error:
            raise StartupError(f"the tokenizer in {model_dir} cannot be loaded: {error}") from error
        if chat_template:
            tokenizer.chat_template = _template_in(Path(chat_template), tokenizer)
        return cls(tokenizer, int(settings.get("vocab_size") or 0))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text and id of each token that stands for itself and is not split: special tokens, and markers."""
        return {token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}

    @property
    def chat_template(self) -> str:
        """The default one; "" for none."""
        template = self._tokenizer.chat_template or ""
        return template if isinstance(template, str) else str(template.get("default", ""))

    @property
    def asks_about_documents(self) -> bool:
        """Whether the chat template renders a query and a document, which are messages with these roles."""
        return bool(_QUERY.search(self.chat_template) and _DOCUMENT.search(self.chat_template))

    @property
    def facts(self) -> dict[str, Any]:
        """What a client needs to use this tokenizer through the API: special tokens as text, and the chat template."""
        kinds = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {kind: None if (token := getattr(self._tokenizer, kind)) is None else str(token) for kind in kinds}
        name = type(self._tokenizer).__name__
        return {"tokenizer_class": name, **tokens, "chat_template": self.chat_template or None}

    @property
    def writes_date(self) -> bool:
        """Whether the chat template may write the day's date, so that a prompt has other tokens on another day."""
        return "strftime_now" in str(self._tokenizer.chat_template or "")

    @property
    def response_template(self) -> dict[str, Any] | None:
        """What the model says about the form of its answers (transformers' `response_template`)."""
        return getattr(self._tokenizer, "response_template", None)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of the token; b"" for rows of the embedding without a token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def vocabulary_digest(self) -> bytes:
        """A digest of what each id means: its text, and whether it is special. 16 bytes."""
        parts = (self.vocab_size, self._bytes, sorted(self._special), self.added_tokens)
        return blake2b(msgspec.msgpack.encode(parts, order="sorted"), digest_size=16).digest()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def id_of(self, token: str) -> int:
        """The id of a token that stands for this text. Raises StartupError."""
        token_id = self._tokenizer.get_vocab().get(token)
        if token_id is None:
            raise StartupError(f"--task score: the model's vocabulary has no token {token!r}")
        return int(token_id)

    async def encode(
        self,
        text: str,
        *,
        max_tokens: int,
        add_special_tokens: bool = True,
        note: Callable[[Encoded], None] | None = None,
        param: str = "prompt",
    ) -> list[int]:
        """Token ids of `text`. The result may have more than `max_tokens` ids. `note` is called in the thread.

        Raises InvalidRequest, before any work, for a text that is too long to have at most `max_tokens` tokens; it
        names the field `param`.
        """
        self._check_length(text, max_tokens, param)
        return await self._run(lambda: self._encode(text, add_special_tokens, note))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        max_tokens: int,
        add_special_tokens: bool = False,
        note: ChatNote | None = None,
        at_s: float | None = None,
    ) -> list[int]:
        """Token ids of the conversation in the model's chat template. Raises InvalidRequest, see `encode`.

        `add_special_tokens`: add the tokenizer's special tokens to those that the template writes. `note` is called in
        the thread, with `TemplateStability.deciders`. `at_s`: Unix seconds for a template that writes the date; None:
        now.
        """
        if not self._tokenizer.chat_template:
            raise InvalidRequest("this model has no chat template: use /v1/completions", "messages", "no_chat_template")
        return await self._run(
            lambda: self._encode_chat(messages, tools, options, max_tokens, add_special_tokens, note, at_s)
        )

    def knows(self, marker: str) -> bool:
        """Whether the marker is a token, or stands in the chat template."""
        return marker in self.chat_template or marker in self.added_tokens

    async def generation_prompt(self, options: dict[str, Any]) -> str:
        """What the chat template writes behind the last message for these options; "" when it cannot tell."""
        return await self._run(lambda: self._generation_prompt(options))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and behind a blank, without special tokens."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        encoded = await self._run(lambda: [tuple(self._encode(text, False)) for text in texts])
        return tuple(dict.fromkeys(encoded))

    async def pieces(self, token_ids: list[int]) -> list[str]:
        """The tokens as the tokenizer's vocabulary writes them."""
        return await self._run(lambda: list(self._tokenizer.convert_ids_to_tokens(token_ids)))

    async def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of these ids, special tokens included unless `skip_special`."""
        return await self._run(lambda: self.text_of(token_ids, skip_special=skip_special))

    def text_of(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """As `decode`, on the calling thread."""
        shown = (one for one in token_ids if not (skip_special and self.is_special(one)))
        return b"".join(map(self.token_bytes, shown)).decode(errors="replace")

    def _check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Raises InvalidRequest for a text that is too long: encoding megabytes blocks other requests for seconds."""
        limit = max_tokens * self._max_bytes_per_token
        # a character has 1 to 4 bytes, so most texts need not be encoded to be measured
        if len(text) > limit or (4 * len(text) > limit and len(text.encode(errors="surrogatepass")) > limit):
            raise InvalidRequest(
                f"the prompt has {len(text)} characters, which are more than {max_tokens} tokens, "
                "this model's maximum context length",
                param,
                "context_length_exceeded",
            )

    def _encode(self, text: str, add_special_tokens: bool, note: Callable[[Encoded], None] | None = None) -> list[int]:
        if note is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens)
        ids = list(encoded["input_ids"])
        note(Encoded(text, ids, encoded.encodings[0] if encoded.encodings else None))
        return ids

    def _render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        at_s: float | None = None,
    ) -> str:
        if at_s is not None and self.writes_date and isinstance(self._tokenizer.chat_template, str):
            options = options | {"chat_template": _template_at(self.chat_template, at_s)}
        return str(self._tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False, **options))

    def _encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        max_tokens: int,
        add_special_tokens: bool,
        note: ChatNote | None = None,
        at_s: float | None = None,
    ) -> list[int]:
        try:
            text = self._render(messages, tools, options, at_s)
        except Exception as error:  # templates are programs, which may raise anything
            raise InvalidRequest(
                f"the chat template cannot render these messages: {error}", "messages", "chat_template"
            ) from error
        self._check_length(text, max_tokens, "messages")
        if note is None:
            return self._encode(text, add_special_tokens)
        deciders = self._stability.deciders(messages, has_tools=bool(tools), options=options)
        return self._encode(text, add_special_tokens, lambda encoded: note(encoded, deciders))

    def _generation_prompt(self, options: dict[str, Any]) -> str:
        messages = [{"role": "user", "content": "a"}]
        plain = options | {"add_generation_prompt": False, "continue_final_message": False}
        try:
            before = self._tokenizer.apply_chat_template(messages, tokenize=False, **plain)
            whole = self._tokenizer.apply_chat_template(
                messages, tokenize=False, **plain | {"add_generation_prompt": True}
            )
        except Exception:  # templates are programs, which may raise anything
            return ""
        return str(whole).removeprefix(str(before))

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _template_at(template: str, at_s: float) -> str:
    """The template with the dates of another time as literals: transformers lets it ask for the present only."""
    at = datetime.fromtimestamp(at_s)
    return _NOW.sub(lambda call: json.dumps(at.strftime(call[2])), template)


def _template_in(path: Path, tokenizer: Any) -> str:
    """The chat template in this file. Raises StartupError for one that cannot be read or is not Jinja."""
    from jinja2 import TemplateSyntaxError  # a requirement of transformers' chat templates

    try:
        template = path.expanduser().read_text(encoding="utf-8")
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], chat_template=template, tokenize=False)
    except (OSError, UnicodeDecodeError, TemplateSyntaxError) as error:
        raise StartupError(f"--chat-template {path}: {error}") from error
    except Exception:  # templates are programs: this conversation may be one that it refuses
        return template
    return template


def _token_bytes(tokenizer: Any) -> list[bytes]:
    """Bytes by token id: a character may be split over tokens, and detokenizing is one lookup for each token."""
    pieces: list[str] = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    decoder = _decoder_name(tokenizer)
    table = []
    for token_id, piece in enumerate(pieces):
        if piece is None:
            table.append(b"")
        elif token_id in added:
            table.append(added[token_id].encode())
        elif decoder == "byte_level":
            table.append(_byte_level(piece))
        elif decoder == "sentencepiece":
            table.append(_sentencepiece(piece))
        else:
            table.append(_by_difference(tokenizer, token_id))
    return table


def _max_bytes_per_token(tokenizer: Any, token_bytes: Sequence[bytes]) -> int:
    """An upper bound of the bytes of text that one token stands for.

    It is the length of the longest token where encoding loses nothing (byte-level vocabularies). Unicode normal forms
    can turn three bytes into one. Tokenizers that drop or merge more (blanks, unknown words) get a generous factor.
    """
    longest = max(map(len, token_bytes), default=1)
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    blanks_go = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if _decoder_name(tokenizer) != "byte_level" or blanks_go:
        return longest * _LOSSY_FACTOR
    if normalizer is None:
        return longest
    return longest * (_NORMAL_FORM_FACTOR if type(normalizer).__name__ in _NORMAL_FORMS else _LOSSY_FACTOR)


def _decoder_name(tokenizer: Any) -> str:
    """The decoder: "byte_level" (as GPT-2), "sentencepiece" (Llama 2, Mistral, Gemma), or "" for others."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = repr(backend.decoder) if backend is not None else ""
    if "ByteLevel" in decoder:
        return "byte_level"
    return "sentencepiece" if _SENTENCEPIECE_SPACE in decoder else ""


def _printable_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, other bytes for characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(moved)}


_PRINTABLE_BYTES = _printable_bytes()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_PRINTABLE_BYTES[char] for char in piece)
    except KeyError:  # not of that alphabet: an added word that is not marked as added
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _by_difference(tokenizer: Any, token_id: int) -> bytes:
    """For unknown decoders: the text that the token adds after another token. Split characters stay U+FFFD."""
    anchor: str = tokenizer.decode([token_id])
    both: str = tokenizer.decode([token_id, token_id])
    return both[len(anchor) :].encode()
