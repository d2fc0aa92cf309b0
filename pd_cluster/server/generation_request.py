"""One prompt of a request, with everything that the engine and the text side need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pd_cluster.protocol.messages import AddRequest, Work

if TYPE_CHECKING:
    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_cluster.server.sampling import TextOptions
    from pd_connectors.protocol.ticket import Ticket


@dataclass(frozen=True, slots=True)
class KvSource:
    """The source of the prompt's KV, as far as it is known at admission."""

    work: Work = Work.GENERATE
    ticket: Ticket | None = None  # TAKE_OVER: verified
    prefill_urls: tuple[str, ...] = ()  # TAKE_OVER: other nodes that may prefill, best first
    hold_lease: bool = False  # PREFILL: the ticket is shown to D only after prefill


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt and its n choices. `request_id` is unique for the life of the API process."""

    request_id: str
    client_request_id: str  # x-request-id, for logs and for the request to P
    prompt: list[int]
    sampling: SamplingParams
    text: TextOptions
    priority: int = 0
    salt: str = ""
    kv_source: KvSource = field(default_factory=KvSource)
    # All prompts of one HTTP request share turns (`scheduling/turns.py`), on this node and on the P that D asks. It is
    # not `x-request-id`: clients choose that, and two clients may send the same one. "": a group of its own
    group: str = ""

    def to_engine(self, *, min_remote_tokens: int, load_deadline_s: float, received_s: float) -> AddRequest:
        return AddRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            sampling=self.sampling,
            work=self.kv_source.work,
            ticket=self.kv_source.ticket,
            hold_lease=self.kv_source.hold_lease,
            priority=self.priority,
            salt=self.salt,
            min_remote_tokens=min_remote_tokens,
            load_deadline_s=load_deadline_s,
            received_s=received_s,
            group=self.group,
        )
