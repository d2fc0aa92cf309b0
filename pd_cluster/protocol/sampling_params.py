"""How one request wants its tokens chosen. Validated at the API's edge; the engine trusts it."""

from __future__ import annotations

from hashlib import blake2b
from math import isnan
from typing import TYPE_CHECKING, Any

import msgspec

from pd_cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_TOP_LOGPROBS = 20
OBJECT_BYTES = 110  # of a token, and of each log-probability, in memory
MAX_BIAS = 100.0  # OpenAI's
MAX_BAD_WORDS = 256  # sequences of token ids; a word gives one or two
MAX_BAD_WORD_TOKENS = 32
GREEDY_TEMPERATURE = 1e-5  # at and below: argmax
MAX_LENGTH_PENALTY = 10.0  # (2**24 tokens)**10 is a float
NEVER = "never"  # a value of `early_stopping`

# Fields that cannot change a first token, with the reason. Every other field is in `first_token_digest`, a new one too.
NOT_OF_FIRST_TOKENS = {
    "max_tokens": "a prefill leg samples one token per sequence whatever it says, and D itself ends a sequence by it",
}


class BeamParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Beam search in place of draws. The fields mean what they mean in transformers' GenerationConfig."""

    width: int  # `num_beams`; `n` of the request are returned
    length_penalty: float = 1.0  # a sum of log-probabilities is divided by its number of tokens to this power
    early_stopping: bool | str = False  # True, False or NEVER

    def validate(self, n: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range. `n`: the number of answers."""
        if not n <= self.width <= MAX_TOP_LOGPROBS:
            name = "n" if self.width == n else "best_of"
            raise InvalidRequest(f"the width of a beam search is {n} (n) to {MAX_TOP_LOGPROBS}, not {self.width}", name)
        if not -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY:
            raise InvalidRequest(f"length_penalty must be -10 to 10, not {self.length_penalty:g}", "length_penalty")
        if self.early_stopping not in (True, False, NEVER):
            raise InvalidRequest(f'early_stopping must be true, false or "{NEVER}"', "early_stopping")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Field meanings are OpenAI's, with vLLM's extensions. Stop *strings* live with the detokenizer, not here.

    Encoded without the fields that have their default, so that a node without a new field still decodes requests that
    do not use it.
    """

    max_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (CTRL, arXiv 1909.05858)
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()  # no other token is drawn, not even EOS; (): all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the model's EOS ids not included
    ignore_eos: bool = False
    grammar: str = ""  # of the output, in llguidance's language: Lark, or JSON that holds a schema; "": none
    logits_args: dict[str, Any] = {}  # read by logits stages from outside alone: see `--logits-stage`
    logprobs: int | None = None  # None: none; k: the chosen token's and the k best, of the unmodified distribution
    beams: BeamParams | None = None  # None: tokens are drawn. With beams nothing changes the distribution

    @property
    def greedy(self) -> bool:
        return self.temperature <= GREEDY_TEMPERATURE

    @property
    def num_first_tokens(self) -> int:
        """First tokens that a prefill gives. Of a beam search one; its `top` are the candidates of all beams."""
        return self.n if self.beams is None else 1

    @property
    def num_alternatives(self) -> int | None:
        """The best tokens that the worker tells with each token; None: not even the token's own log-probability."""
        return self.logprobs if self.beams is None else MAX_TOP_LOGPROBS

    @property
    def step_bytes(self) -> int:
        """What a token of each sequence and its log-probabilities take in the API process, as objects, about."""
        return self.n * OBJECT_BYTES * (1 if self.logprobs is None else 2 + self.logprobs)

    def stop_ids(self, eos_token_ids: frozenset[int]) -> frozenset[int]:
        """The tokens that end a sequence once it has `min_tokens`. `eos_token_ids`: the model's.

        A grammar decides where its output ends, so EOS ends it in spite of `ignore_eos`.
        """
        keeps_eos = self.ignore_eos and not self.grammar
        return frozenset(self.stop_token_ids) | (frozenset() if keeps_eos else eos_token_ids)

    @property
    def first_token_digest(self) -> bytes:
        """A digest of the fields that decide the first tokens, 16 bytes. With equal digests D uses P's first tokens.

        P's first tokens are then distributed as D's own would be. The digest covers the values of the fields, not their
        effect: `min_tokens` 1 and 2 both ban the end from the first token, but give different digests. Such a
        difference costs D the computation of one token and changes no answer. Two requests without a seed have equal
        digests. Each node draws its own seed for them, and the tokens of either seed follow the requested distribution.
        The digest leaves out fields with their default value. So a node agrees with an older node that lacks a field,
        as long as no request uses that field.
        """
        said = [
            (name, sorted(value.items()) if isinstance(value, dict) else value)
            for name, default in _DECISIVE
            if (value := getattr(self, name)) != default
        ]
        return blake2b(msgspec.msgpack.encode(said, order="sorted"), digest_size=16, person=b"pd-first-token").digest()

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not low <= value <= high:
                said = f"{value:g}" if isinstance(value, float) else value
                raise InvalidRequest(f"{name} must be between {low} and {high}, not {said}", name)
        if self.top_p == 0:
            raise InvalidRequest("top_p must be greater than 0", "top_p")
        if self.repetition_penalty == 0:
            raise InvalidRequest("repetition_penalty must be greater than 0", "repetition_penalty")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, not {self.logprobs}", "logprobs")
        if self.beams is not None:
            self.beams.validate(self.n)
        _check_bad_words(self.bad_words)
        words = tuple(token_id for word in self.bad_words for token_id in word)
        lists = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": words,
        }
        _check_token_ids(lists, vocab_size)
        _check_bias(self.logit_bias)


def _check_token_ids(lists: Mapping[str, Collection[int]], vocab_size: int) -> None:
    """A bias of 128,256 tokens takes 6.5 ms by `min` and `max`, 9.1 token by token: the latter only if one is wrong."""
    for name, tokens in lists.items():
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            wrong = next(token_id for token_id in tokens if not 0 <= token_id < vocab_size)
            raise InvalidRequest(f"{name}: token id {wrong} is not in the vocabulary 0..{vocab_size - 1}", name)


def _check_bias(logit_bias: Mapping[int, float]) -> None:
    amounts = logit_bias.values()
    if amounts and not (min(amounts) >= -MAX_BIAS and max(amounts) <= MAX_BIAS and not isnan(sum(amounts))):
        wrong_bias = next(bias for bias in amounts if not -MAX_BIAS <= bias <= MAX_BIAS)
        raise InvalidRequest(f"logit_bias must be between -100 and 100, not {wrong_bias:g}", "logit_bias")


def _check_bad_words(words: Collection[Collection[int]]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} token sequences; {MAX_BAD_WORDS} are allowed", "bad_words")
    if any(not 1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in words):
        raise InvalidRequest(f"each of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens", "bad_words")


_RANGES: tuple[tuple[str, int, int], ...] = (
    ("n", 1, 128),
    ("max_tokens", 1, 1 << 24),
    ("min_tokens", 0, 1 << 24),
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("top_k", 0, 1 << 24),
    ("min_p", 0, 1),
    ("repetition_penalty", 0, 10),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
)

_DECISIVE = tuple(
    (field.name, field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default)
    for field in sorted(msgspec.structs.fields(SamplingParams), key=lambda field: field.name)
    if field.name not in NOT_OF_FIRST_TOKENS
)
