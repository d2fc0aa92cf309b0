"""A client's JSON body, parsed at its top level only.

Fields stay the raw JSON that the client sent: nothing is reformatted, rounded or reordered on its way to a node, and a
long prompt is never parsed here.
"""

from __future__ import annotations

import re
from math import inf
from typing import Any, TypeVar

import msgspec

from pd_connectors.protocol.cache_space import cache_space
from pd_connectors.protocol.text_chain import (
    AS_ALWAYS,
    MAX_CHAIN_BYTES,
    LastTurn,
    is_short,
    read_canonical,
    step_hashes,
)
from pd_http.dialect import OPENAI, Dialect
from pd_http.endpoints import Kind, paths_of
from pd_http.errors import InvalidRequest, PdError
from pd_http.member_bounds import BAD_JSON, check_members, top_level
from pd_http.node_answers import ASK_TICKET

RawObject = dict[str, msgspec.Raw]
_NO_TOKENS = frozenset({"max_tokens", "max_completion_tokens", "max_output_tokens", "stream_options"})
_LIMITS = {"max_tokens": ("max_tokens", "max_completion_tokens")}  # engines differ in which of the two counts
_NULL = msgspec.Raw(b"null")
_KV = "kv_transfer_params"
_TOKEN_IDS = re.compile(rb"[ \t\n\r]*\[[ \t\n\r]*[0-9]")
_PROMPT_LISTS = re.compile(rb'[ \t\n\r]*\[[ \t\n\r]*["\[]')
_MAX_SAMPLES = 128  # a node refuses more; here it bounds the charge for one request
_TEMPLATE_TOKENS = 4096  # that a chat template may add to a prompt
_READ_PATHS = frozenset(paths_of(Kind.READ))
_FREE_BYTES = 128 << 10  # of a body that is not counted: it is passed on, and its text chain takes up to 30 ms
T = TypeVar("T")
_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (bool, int, float, str)
}  # each request reads some ten fields: 0.1 us less each than by the type


class RequestBody:
    """One parsed body. Raises InvalidRequest if `data` is not a JSON object, or has too many members."""

    __slots__ = ("_dialect", "_fields", "_most_output", "had_transfer", "num_bytes")

    def __init__(self, data: bytes, dialect: Dialect = OPENAI) -> None:
        self._dialect = dialect
        check_members(data, dialect.bounds, _FREE_BYTES)
        self._fields = top_level(data)
        # Dropped: a client must not steer transfers between nodes
        self.had_transfer = self._fields.pop(_KV, None) is not None
        self.num_bytes = len(data)
        self._most_output: float | None = None  # not read yet

    def get(self, name: str, kind: type[T]) -> T | None:
        """Field `name` if it is a `kind`, else None: the node judges other types."""
        raw = self._fields.get(name)
        if raw is None:
            return None
        try:
            value: T = _DECODERS[kind].decode(raw)
            return value
        except BAD_JSON:
            return None

    def checked(self, name: str, kind: type[T]) -> T | None:
        """Field `name`; None: it is absent or null. Raises InvalidRequest for another type."""
        value = self.get(name, kind)
        if value is None and self._fields.get(name, _NULL) != _NULL:
            raise InvalidRequest(f"{name} must be of type {kind.__name__}", name)
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def update(self, fields: RawObject) -> None:
        """Set or replace these fields."""
        self._most_output = None
        self._fields.update(fields)

    def put(self, name: str, value: object) -> None:
        """Set or replace field `name`. None: take it out."""
        self._most_output = None
        if value is None:
            self._fields.pop(name, None)
        else:
            self._fields[name] = msgspec.Raw(msgspec.json.encode(value))

    @property
    def prompt_bytes(self) -> int:
        """Of the body without a text that may be as long as the prompt, and is none of it."""
        return self.num_bytes - len(self._fields.get("prediction", b""))

    @property
    def model(self) -> str | None:
        """The model that the client names; None for "" too, as on nodes: any model."""
        return self.get("model", str) or None

    @property
    def wants_stream(self) -> bool:
        return bool(self.get("stream", bool))

    @property
    def num_samples(self) -> int:
        return min(max(1, self.get("n", int) or 1), _MAX_SAMPLES)

    @property
    def most_output(self) -> float:
        """Tokens to which the client limits an answer; `inf`: it does not."""
        if self._most_output is not None:
            return self._most_output
        most = -1.0
        for name in _LIMITS.get(self._dialect.token_limit, (self._dialect.token_limit,)):
            if name in self._fields and ((limit := self.get(name, int)) is not None or self._has(name)):
                most = inf if limit is None or limit < 0 else max(most, limit)
        self._most_output = inf if most < 0 else most
        return self._most_output

    def allowed(self, used: tuple[int, int], most_length: float) -> tuple[int, int]:
        """What can be true of `used`, which a node tells: tokens of the prompts and of the answers.

        `most_length`: of a sequence at that node. Fields that only nodes can judge, as 2.0, count with the most.
        """
        prompt, answer = min(self.num_bytes + _TEMPLATE_TOKENS, most_length), min(self.most_output, most_length)
        if "n" in self._fields or "best_of" in self._fields:
            answer *= max([1, *(self.get(name, int) or _MAX_SAMPLES for name in ("n", "best_of") if self._has(name))])
        if 0 <= used[0] <= prompt and 0 <= used[1] <= answer:
            return used
        num = self._most_prompts
        return int(min(max(0, used[0]), num * prompt)), int(min(max(0, used[1]), num * answer))

    @property
    def _most_prompts(self) -> int:
        """Counts commas: the node judges."""
        if "prompt" in self._fields:
            raws = [self._fields["prompt"]] if self.has_several_prompts else []
        else:  # texts to embed or to rank
            raws = [] if "messages" in self._fields or self._dialect is not OPENAI else list(self._fields.values())
        return 1 + sum(bytes(raw).count(b",") for raw in raws)

    @property
    def has_several_prompts(self) -> bool:
        """Whether `prompt` is an array of texts or of token id arrays, of any length. Reads its first bytes only."""
        raw = self._fields.get("prompt")
        return raw is not None and _PROMPT_LISTS.match(memoryview(raw)) is not None

    @property
    def num_token_ids(self) -> int:
        """The length of a prompt of token ids; 0 for texts and several prompts. Counts commas: the node judges."""
        raw = self._fields.get("prompt")
        if raw is None or _TOKEN_IDS.match(memoryview(raw)) is None:
            return 0
        return bytes(raw).count(b",") + 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the answer tells the log-probabilities of the prompt, for which no cached KV can be used."""
        echoes = bool(self.get("echo", bool)) and self._has("logprobs")
        return echoes or self._has("prompt_logprobs")

    @property
    def generates(self) -> bool:
        """Whether a completion needs a node that decodes: not for the log-probabilities of a prompt and one token."""
        limit = self.get("max_completion_tokens", float)
        limit = self.get("max_tokens", float) if limit is None else limit
        return limit is None or limit > (1 if self.wants_prompt_logprobs else 0)

    def reads_only(self, path: str) -> bool:
        """Whether the request asks about its prompt alone, or for one token that the same step samples."""
        return path in _READ_PATHS or (path == "/v1/completions" and not self.generates)

    def _has(self, name: str) -> bool:
        return bytes(self._fields.get(name, b"null")) != b"null"

    @property
    def shows_reading(self) -> bool:
        """Whether the first byte of the answer shows that the whole prompt has been prefilled."""
        return self.wants_stream and not self.has_several_prompts and not self.get("use_beam_search", bool)

    @property
    def has_chain(self) -> bool:
        """Whether the prompt's text is short enough for a chain."""
        return self.num_bytes <= MAX_CHAIN_BYTES or is_short(self._fields)

    def text_chain(self, key: bytes, last_turn: LastTurn = AS_ALWAYS, adapter: str = "") -> tuple[int, ...]:
        """The names of the prompt's text, as nodes publish them. Empty: it has none.

        `key`: of the cluster's chains. `last_turn`: of the nodes' chat template. `adapter`: digest.
        """
        if not self.has_chain:
            return ()
        try:
            read = read_canonical(self._dialect.to_chat(self._fields).fields, last_turn)
        except PdError:  # the node judges
            return ()
        space = cache_space(adapter, self.get("cache_salt", str) or "")
        return () if read is None else step_hashes(key, space, read.text, read.starts)

    def plain(self) -> bytes:
        """The body for a node that prefills and decodes: the client's fields, without any handoff."""
        return msgspec.json.encode(self._fields)

    def for_prefill(self) -> bytes:
        """The body for P's leg: a request for a ticket.

        The token limit is for engines without tickets. Our nodes ignore it and sample one token.
        """
        fields: dict[str, Any] = {name: raw for name, raw in self._fields.items() if name not in _NO_TOKENS}
        fields["stream"] = False
        fields[self._dialect.token_limit] = 1
        if "max_completion_tokens" in self._fields:
            fields["max_completion_tokens"] = 1
        fields[_KV] = ASK_TICKET
        return msgspec.json.encode(fields)

    def with_transfer(self, params: dict[str, Any]) -> bytes:
        """The body for D's leg: the client's fields and `params` of the handoff."""
        return msgspec.json.encode({**self._fields, _KV: params})
