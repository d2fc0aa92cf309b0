"""One prompt of a request, with everything that the engine and the text side need."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from pd_cluster.protocol.messages import AddRequest, Work
from pd_cluster.server.requests.prompt_space import PromptSpace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.config import NodeConfig
    from pd_cluster.protocol.prompt_outputs import PromptOutputs
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.server.node.feed_hub import ChargeMark
    from pd_cluster.server.params.sampling import TextOptions
    from pd_cluster.server.requests.predicted_tokens import PredictedTokens
    from pd_cluster.server.requests.prompt_scores import PromptAsk
    from pd_connectors.protocol.ticket import Ticket
    from pd_http.frames import KnownChoice


@dataclass(frozen=True, slots=True)
class KvSource:
    """The source of the prompt's KV, as far as it is known at admission."""

    work: Work = Work.GENERATE
    ticket: Ticket | None = None  # TAKE_OVER: verified
    prefill_urls: tuple[str, ...] = ()  # TAKE_OVER: other nodes that may prefill, best first
    hold_lease: bool = False  # PREFILL: the ticket is shown to D only after prefill


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """The part of the answer to one prompt that the client has from another node."""

    choices: tuple[KnownChoice, ...]  # all n, in order; one without tokens has not begun
    created: int  # Unix seconds
    num_cached_tokens: int | None  # as the usage of that node says; None: of several prompts this one had not begun

    @property
    def live(self) -> tuple[int, ...]:
        """The choices that have not ended."""
        return tuple(choice.index for choice in self.choices if not choice.finish_reason)

    @property
    def has_begun(self) -> bool:
        """Whether any choice goes on after tokens."""
        return any(self.choices[index].token_ids for index in self.live)

    @property
    def only_tokens(self) -> tuple[int, ...]:
        """The tokens of the choice that goes on, if it is the only one. Their KV can come from another node."""
        live = self.live
        return tuple(self.choices[live[0]].token_ids) if len(live) == 1 else ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its n choices. `request_id` is unique for the life of the API process."""

    request_id: str
    client_request_id: str  # x-request-id, for logs and for the request to P
    prompt: list[int]
    sampling: SamplingParams
    text: TextOptions
    priority: int = 0
    space: PromptSpace = field(default_factory=PromptSpace)
    kv_source: KvSource = field(default_factory=KvSource)
    # All prompts of one HTTP request share turns (`scheduling/turns.py`), on this node and on the P that D asks. It is
    # not `x-request-id`: clients choose that, and two clients may send the same one. "": a group of its own
    group: str = ""
    drawn_seed: int = 0  # used if `sampling` has no seed
    known: KnownAnswer | None = None  # None: the answer begins here
    charge: ChargeMark | None = None  # None: of no router
    steps: tuple[tuple[int, int], ...] = ()  # see `AddRequest`
    prefill_charge: str = ""  # the router's name of its charge on the P that D asks
    passed_on: tuple[tuple[str, str], ...] = ()  # headers, for the P that D asks
    ask: PromptAsk | None = None  # what the answer shows of the prompt's log-probabilities
    predicted: PredictedTokens | None = None

    @property
    def seed(self) -> int:
        """The seed of its first choice."""
        return self.drawn_seed if self.sampling.seed is None else self.sampling.seed

    @property
    def num_choices(self) -> int:
        """n; the prefill of a beam search gives one token."""
        return self.sampling.num_first_tokens if self.kv_source.work is Work.PREFILL else self.sampling.n

    @property
    def live(self) -> tuple[int, ...]:
        """The choices that the engine generates, in the order of its sequences."""
        return tuple(range(self.num_choices)) if self.known is None else self.known.live

    @property
    def loaded_ids(self) -> list[int]:
        """The token ids of which another node may give the KV, see `AddRequest.known`."""
        return self.prompt if self.known is None else [*self.prompt, *self.known.only_tokens[:-1]]

    @property
    def prompt_digest(self) -> bytes:
        """Names prompt and adapter, 16 bytes. A ticket's is chained over units of 16 tokens: that takes longer.

        Another node goes on with the stream only if it finds the same one.
        """
        return blake2b(array("I", self.prompt).tobytes(), digest_size=16, key=self.space.adapter.encode()).digest()

    def to_engine(self, config: NodeConfig, received_s: float) -> AddRequest:
        """The engine's n sequences are the choices that have not ended, see `live`."""
        sampling, live, known = self.sampling, self.live, None
        handoff, drafts = config.handoff, config.drafts and sampling.beams is None
        if self.known is not None:
            sampling = msgspec.structs.replace(sampling, n=len(live))
            known = tuple(self.known.choices[index].token_ids for index in live)
        return AddRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            sampling=sampling,
            work=self.kv_source.work,
            ticket=self.kv_source.ticket,
            hold_lease=self.kv_source.hold_lease,
            priority=self.priority,
            salt=self.space.text,
            adapter=self.space.adapter,
            min_remote_tokens=handoff.min_remote_tokens,
            load_deadline_s=handoff.load_deadline_s,
            received_s=received_s,
            known=known if known is not None and any(known) else (),
            sequence_numbers=live if len(live) < self.num_choices else (),
            group=self.group,
            drawn_seed=self.drawn_seed,
            steps=self.steps,
            outputs=self._outputs,
            prediction=self.predicted.token_ids if self.predicted is not None and drafts else (),
        )

    @property
    def _outputs(self) -> PromptOutputs | None:
        """What the engine finds out about the prompt: nothing once an answer has begun, which told it."""
        has_begun = self.known is not None and self.known.has_begun
        return None if self.ask is None or has_begun else self.ask.outputs


def digest_of(requests: Sequence[GenerationRequest]) -> bytes:
    """Names the prompts of one HTTP request, in order: 16 bytes."""
    if len(requests) == 1:
        return requests[0].prompt_digest
    return blake2b(b"".join(one.prompt_digest for one in requests), digest_size=16).digest()
