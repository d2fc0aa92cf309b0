"""What a request may ask about its prompt, beside or instead of output tokens, and the engine's answers."""

from __future__ import annotations

import msgspec

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.sampling_params import MAX_TOP_LOGPROBS
from pd_connectors.protocol.messages import TopLogprob

MAX_LOGITS_OF = 64  # token ids; a reranker asks for two


class PromptOutputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request wants to know of its prompt. The KV of the prompt enters the prefix cache in any case."""

    # k: of each prompt token but the first its log-probability and rank, and the k most likely tokens; None: nothing.
    # Every position must be computed for them, so cached KV is not used
    logprobs: int | None = None
    pooled: bool = False  # the last token's hidden state after the model's last norm
    logits_of: tuple[int, ...] = ()  # logits of these token ids after the last token, unscaled

    @property
    def of_last_token(self) -> bool:
        """Whether anything but log-probabilities is asked for. Only a READ may ask for it."""
        return self.pooled or bool(self.logits_of)

    def num_entries(self, num_prompt_tokens: int) -> int:
        """How many tokens of a prompt have a log-probability that is wanted."""
        return 0 if self.logprobs is None else num_prompt_tokens - 1

    def validate(self, vocab_size: int) -> None:
        """Raises InvalidRequest naming the first field that is out of range."""
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"prompt_logprobs must be 0 to {MAX_TOP_LOGPROBS}", "prompt_logprobs")
        if len(self.logits_of) > MAX_LOGITS_OF:
            raise InvalidRequest(f"logits of at most {MAX_LOGITS_OF} tokens can be read", "logits_of")
        if not all(0 <= token_id < vocab_size for token_id in self.logits_of):
            raise InvalidRequest(f"logits_of has token ids outside the vocabulary 0..{vocab_size - 1}", "logits_of")


class PromptToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probability of one prompt token after the tokens before it, without temperature and penalties."""

    token_id: int
    logprob: float
    rank: int  # 1: no token is more likely
    top: tuple[TopLogprob, ...] = ()  # the k most likely tokens, best first


class PromptPart(msgspec.Struct, frozen=True):
    """What one step has found out about a prompt."""

    start: int = 0  # the position of the first entry
    entries: tuple[PromptToken, ...] = ()
    pooled: bytes = b""  # see PromptRead
    logits: tuple[float, ...] = ()
