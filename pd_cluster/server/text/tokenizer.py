"""Text to token ids and back. Slow work runs in one thread, off the event loop, and that on long texts in another."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from pd_cluster.errors import InvalidRequest, StartupError
from pd_cluster.models.token_texts import max_bytes_per_token, token_bytes, whole_bytes
from pd_cluster.models.wrapper import text_config
from pd_cluster.server.text.chat_template import ChatTemplate, template_in

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Note = Callable[["Encoded"], None]

Result = TypeVar("Result")

LONG_CHARS = 1 << 16  # Qwen 3's takes 35 ms for so many, and 7 to 15 s for 8 MB, for which all other texts waited
CUT_TOKENS = 1024  # more than the end of a text changes when the text goes on
MAX_CUTS = 64  # of a text after the first character of a special token: each piece is a call of the library


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
    """A model's Hugging Face tokenizer. Close it to end its threads.

    `vocab_size` is that of the model: the rows of its embedding. Most have more rows than the tokenizer has tokens
    (`num_tokens`), some fewer: ids after the rows are in no prompt, and the model draws none of them.
    """

    def __init__(self, tokenizer: Any, vocab_size: int = 0) -> None:
        """`vocab_size` 0: as many rows as tokens."""
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._marks = self._special.union(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._bytes = token_bytes(tokenizer)
        self.num_tokens = len(self._bytes)
        self.vocab_size = vocab_size or self.num_tokens
        self.chat_template = ChatTemplate(tokenizer)
        self._max_bytes_per_token = max_bytes_per_token(tokenizer, self._bytes)
        self._thread = self._long_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        if getattr(tokenizer, "is_fast", False):  # others hold the interpreter's lock
            # fails when a call changes padding or truncation beside another: this one takes both off, none puts any on
            tokenizer.encode("")
            self._long_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer-long")

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
        except Exception as error:  # the library's for a newer format of tokenizer.json; some need packages
            raise StartupError(f"the tokenizer in {model_dir} cannot be loaded: {error}") from error
        if chat_template:
            tokenizer.chat_template = template_in(Path(chat_template), tokenizer)
        return cls(tokenizer, int(settings.get("vocab_size") or 0))

    @property
    def added_tokens(self) -> dict[str, int]:
        """Text and id of each token that stands for itself and is not split: special tokens, and markers."""
        return {token.content: token_id for token_id, token in self._tokenizer.added_tokens_decoder.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """What a client needs to use this tokenizer through the API: special tokens as text, and the chat template."""
        kinds = ("bos_token", "eos_token", "pad_token", "unk_token")
        tokens = {kind: None if (token := getattr(self._tokenizer, kind)) is None else str(token) for kind in kinds}
        name = type(self._tokenizer).__name__
        return {"tokenizer_class": name, **tokens, "chat_template": self.chat_template.text or None}

    @property
    def response_template(self) -> dict[str, Any] | None:
        """What the model says about the form of its answers (transformers' `response_template`)."""
        return getattr(self._tokenizer, "response_template", None)

    def close(self) -> None:
        for thread in (self._thread, self._long_thread):
            thread.shutdown(wait=False, cancel_futures=True)

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
        note: Note | None = None,
        param: str = "prompt",
        refuses: bool = False,
        last: int | None = None,
    ) -> list[int]:
        """Token ids of `text`, or the `last` of them: still more than `max_tokens`, if it has more. `note` is called
        in the thread.

        Raises InvalidRequest, before any work, for a text that is too long to have at most `max_tokens` tokens; it
        names the field `param`. With `refuses` also, after little work, if the text's beginning has too many.
        """
        self.check_length(text, max_tokens, param)
        work = partial(self._ids, text, max_tokens, add_special_tokens, note, param, refuses, last)
        return await self._run(work, len(text))

    async def encode_answer(self, text: str, *, max_tokens: int, param: str) -> list[int]:
        """Token ids of `text` as an answer has them: what reads like a special token is text. See `encode`."""
        self.check_length(text, max_tokens, param)
        return await self._run(partial(self._answer_ids, text, max_tokens, param), len(text))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        *,
        max_tokens: int,
        add_special_tokens: bool = False,
        note: Note | None = None,
        at_s: float | None = None,
        refuses: bool = False,
        last: int | None = None,
    ) -> list[int]:
        """Token ids of the conversation in the model's chat template. Raises InvalidRequest, see `encode`.

        `add_special_tokens`: add the tokenizer's special tokens to those that the template writes. `note` is called in
        the thread. `at_s`: Unix seconds for a template that writes the date; None: now.
        """
        if not self.chat_template.exists:
            raise InvalidRequest("this model has no chat template: use /v1/completions", "messages", "no_chat_template")

        def work() -> list[int] | Callable[[], list[int]]:
            """The ids, or what makes those of a long text, in the other thread."""
            try:
                text = self.chat_template.render(messages, tools, options, at_s)
            except Exception as error:  # templates are programs, which may raise anything
                raise InvalidRequest(
                    f"the chat template cannot render these messages: {error}", "messages", "chat_template"
                ) from error
            self.check_length(text, max_tokens, "messages")
            encode = partial(self._ids, text, max_tokens, add_special_tokens, note, "messages", refuses, last)
            return encode() if len(text) <= LONG_CHARS else encode

        done = await self._run(work)
        return done if isinstance(done, list) else await self._run(done, LONG_CHARS + 1)

    def knows(self, marker: str) -> bool:
        """Whether the marker is a token, or stands in a chat template."""
        return any(marker in text for text in self.chat_template.texts) or marker in self.added_tokens

    async def generation_prompt(self, options: dict[str, Any]) -> str:
        """What the chat template writes after the last message for these options; "" when it cannot tell."""
        return await self._run(lambda: self.chat_template.generation_prompt(options))

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word, at the beginning of a text and after a blank, without special tokens."""
        texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
        encoded = await self._run(
            lambda: [tuple(self._checked(self._encode(text, False), "bad_words")) for text in texts]
        )
        return tuple(dict.fromkeys(encoded))

    async def pieces(self, token_ids: list[int]) -> list[str]:
        """The tokens as the tokenizer's vocabulary writes them; "" for an id without a token."""
        return await self._run(lambda: [one or "" for one in self._tokenizer.convert_ids_to_tokens(token_ids)])

    async def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The whole text of these ids, special tokens included unless `skip_special`.

        As the tokenizer decodes it: see `token_texts` about a blank at its beginning, which `text_of` keeps.
        """
        shown = self._shown(token_ids, skip_special)

        def text() -> str:
            return whole_bytes(self._tokenizer, shown, [self.token_bytes(one) for one in shown]).decode(
                errors="replace"
            )

        return await self._run(text)

    def text_of(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of these ids within a text, as answers, echoes and offsets have it."""
        texts, num_texts, hidden = self._bytes, len(self._bytes), self._special if skip_special else frozenset[int]()
        return b"".join([texts[one] for one in token_ids if one < num_texts and one not in hidden]).decode(
            errors="replace"
        )

    def _shown(self, token_ids: Sequence[int], skip_special: bool) -> Sequence[int]:
        return [one for one in token_ids if not self.is_special(one)] if skip_special else token_ids

    def check_length(self, text: str, max_tokens: int, param: str) -> None:
        """Raises InvalidRequest for a text that is too long: encoding megabytes blocks other requests for seconds."""
        limit = max_tokens * self._max_bytes_per_token
        # a character has 1 to 4 bytes, so most texts need not be encoded to be measured
        if len(text) > limit or (4 * len(text) > limit and len(text.encode(errors="surrogatepass")) > limit):
            raise InvalidRequest(
                f"{param}: the text has {len(text)} characters, which are more than {max_tokens} tokens, "
                "this model's maximum context length",
                param,
                "context_length_exceeded",
            )

    def _check_beginning(self, text: str, max_tokens: int, param: str) -> None:
        """Raises InvalidRequest for a long text if its beginning alone has more than `max_tokens` tokens.

        Each beginning is twice as long as the last. A text of at most four characters a token has no such beginning.
        """
        num_chars = max(LONG_CHARS, 2 * max_tokens)
        while 2 * num_chars <= len(text):
            if len(self._encode(text[:num_chars], False)) > max_tokens + CUT_TOKENS:
                cut = f"{param}: the first {num_chars} of {len(text)} characters are more than {max_tokens} tokens"
                raise InvalidRequest(f"{cut}, this model's maximum context length", param, "context_length_exceeded")
            num_chars *= 2

    def _encode(self, text: str, add_special_tokens: bool, note: Note | None = None) -> list[int]:
        if note is None:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        encoded = self._tokenizer(text, add_special_tokens=add_special_tokens)
        ids = list(encoded["input_ids"])
        note(Encoded(text, ids, encoded.encodings[0] if encoded.encodings else None))
        return ids

    def _checked(self, ids: list[int], param: str) -> list[int]:
        """Raises InvalidRequest for a token that the embedding has no row for: Gemma 3 1B lacks its image token's."""
        if self.num_tokens > self.vocab_size and ids and max(ids) >= self.vocab_size:
            piece = self._tokenizer.convert_ids_to_tokens([max(ids)])[0]
            raise InvalidRequest(f"{param} has the token {piece!r}, which this model's embedding lacks", param)
        return ids

    def _ids(
        self, text: str, max_tokens: int, special: bool, note: Note | None, param: str, refuses: bool, last: int | None
    ) -> list[int]:
        if refuses:
            self._check_beginning(text, max_tokens, param)
        ids = self._checked(self._encode(text, special, note), param)
        return ids if last is None else ids[-last:]

    def _answer_ids(self, text: str, max_tokens: int, param: str) -> list[int]:
        self._check_beginning(text, max_tokens, param)
        ids = self._encode(text, False)
        if found := self._marks.intersection(ids):  # the library's own switch is one for all threads
            marks = map(self._tokenizer.convert_ids_to_tokens, found)
            cuts = "|".join(f"(?<={re.escape(mark[0])})(?={re.escape(mark[1:])})" for mark in marks)
            pieces = re.split(cuts, text, maxsplit=MAX_CUTS)
            ids = [one for piece in pieces for one in self._encode(piece, False) if one not in self._marks]
        return self._checked(ids, param)

    async def _run(self, work: Callable[[], Result], num_chars: int = 0) -> Result:
        thread = self._thread if num_chars <= LONG_CHARS else self._long_thread
        return await asyncio.get_running_loop().run_in_executor(thread, work)
