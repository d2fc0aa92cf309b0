"""When the events of a request happened, and how long its phases took."""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_cluster.protocol.messages import Timeline
from pd_connectors.base import LoadSteps
from pd_connectors.protocol.messages import NO_PREFILL, PrefillFacts


@dataclass(slots=True)
class Marks:
    """When events of a request happened, in seconds of the scheduler's clock; None: not yet."""

    arrived_s: float = 0.0
    begun_s: float = 0.0  # it was admitted
    scheduled_s: float | None = None  # its prefill entered a step
    first_token_s: float | None = None  # its first token was sampled here
    stream_s: float | None = None  # its first token here was known: sampled here or received; the stream began
    reserved_s: float | None = None
    loaded_s: float | None = None
    decode_scheduled_s: float | None = None  # first decode step after a load
    decode_retired_s: float | None = None
    peer: PrefillFacts = NO_PREFILL  # of the prefill node that it is loaded from
    load_steps: LoadSteps = field(default_factory=LoadSteps)
    is_timed: bool = False  # the timeline was taken

    def mark_first_decode(self, now_s: float) -> None:
        """Note the first decode step of a request with KV from another node."""
        self.stream_s = self.stream_s or now_s
        if self.loaded_s is None:
            self.first_token_s = self.first_token_s or now_s
        else:
            self.decode_retired_s = self.decode_retired_s or now_s

    def prefill_facts(self, num_cached_tokens: int) -> PrefillFacts:
        """Of its prefill here, for the node that takes it over."""
        if self.first_token_s is None or self.scheduled_s is None:
            return NO_PREFILL
        return PrefillFacts(self.first_token_s - self.arrived_s, self.scheduled_s - self.arrived_s, num_cached_tokens)

    def take_timeline(self, *, finished: bool) -> Timeline | None:
        """The timeline, once: when its last phase is over, at the latest at the end. Else None."""
        is_over = (self.first_token_s if self.loaded_s is None else self.decode_retired_s) is not None
        if self.is_timed or not (finished or is_over):
            return None
        self.is_timed = True
        return self.timeline()

    def timeline(self) -> Timeline:
        """The seconds that the request has spent in each phase so far."""
        if self.loaded_s is not None and self.reserved_s is not None and self.scheduled_s is None:
            decode = self.loaded_s if self.decode_scheduled_s is None else self.decode_scheduled_s
            steps = self.load_steps
            return Timeline(
                queue_s=self.reserved_s - self.arrived_s,
                transfer_s=self.loaded_s - self.reserved_s,
                admit_s=decode - self.loaded_s,
                first_decode_s=0.0 if self.decode_retired_s is None else self.decode_retired_s - decode,
                prefill_leg_s=self.peer.seconds,
                prefill_queue_s=self.peer.queue_s,
                announce_s=steps.announce_s,
                reserve_s=steps.reserve_s,
                post_s=steps.post_s,
                link_s=steps.link_s,
                confirm_s=steps.confirm_s,
                schedule_s=steps.wake_s,
            )
        if self.scheduled_s is None:
            return Timeline()
        prefill_s = 0.0 if self.first_token_s is None else self.first_token_s - self.scheduled_s
        return Timeline(queue_s=self.scheduled_s - self.arrived_s, prefill_s=prefill_s)
