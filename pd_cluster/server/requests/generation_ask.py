"""What a generating request asks for: a decoded body, and everything in which the APIs and kinds of requests differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.server.bodies.schema import KvTransferParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.server.bodies.schema import GenerationBody
    from pd_cluster.server.grammar.grammar_source import GrammarSource
    from pd_cluster.server.params.sampling import TextOptions
    from pd_cluster.server.requests.answer_extras import AnswerExtras
    from pd_cluster.server.requests.generation_request import KnownAnswer, KvSource
    from pd_cluster.server.requests.prompt_list import Prompt
    from pd_cluster.server.requests.prompt_scores import PromptAsk
    from pd_cluster.server.requests.prompt_space import PromptSpace
    from pd_cluster.server.requests.prompt_steps import PromptSteps
    from pd_cluster.server.requests.response_shape import ResponseShape

NO_PARAMS = KvTransferParams()
Tokenize = Callable[[], Awaitable[list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationAsk:
    """Made where the body is decoded. Its callables raise InvalidRequest for what only later steps can find."""

    body: GenerationBody
    space: PromptSpace
    prompts: Sequence[Tokenize]
    prompt_field: str
    form: Callable[[], Awaitable[GrammarSource | None]]  # of the output
    sampling: Callable[..., SamplingParams]  # of the tokens of a prompt, grammar and bad words: see `sampling_params`
    text: Callable[[], TextOptions]
    shape: Callable[[AnswerExtras], ResponseShape]
    with_logprobs: bool  # of the output
    echo_ids: bool  # the caller sent text, so a prefill leg answers with its token ids
    echoes: Sequence[Prompt] = ()  # with `echo`: the prompts as they came
    kv_source: KvSource | None = None  # None: as `params` say
    known: Sequence[KnownAnswer] = ()  # by prompt, of a stream that another node has begun
    names: PromptSteps | None = None  # of the blocks of a single prompt; None: no router asks for them
    scores: PromptAsk | None = None  # what the answers show of the prompts' log-probabilities
    prediction: str | None = None

    @property
    def params(self) -> KvTransferParams:
        return self.body.kv_transfer_params or NO_PARAMS

    @property
    def goes_on(self) -> bool:
        """Whether it is of a stream that was cut."""
        return bool(self.known or (self.params.do_remote_decode and self.params.goes_on))
