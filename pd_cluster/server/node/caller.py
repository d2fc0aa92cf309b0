"""What a request says beside its body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_cluster.server.node.feed_hub import ChargeMark


@dataclass(frozen=True, slots=True)
class Caller:
    """Values of the request's headers, its time of arrival, and what was drawn for it."""

    request_id: str
    group: str  # see `GenerationRequest.group`
    wants_ticket_stream: bool
    wants_frames: bool
    wants_report: bool  # with an answer that is not streamed
    started_s: float  # monotonic
    drawn_seed: int  # 63 random bits, for a request without a seed
    charge: ChargeMark
    prefill_charge: str  # see `GenerationRequest`
    passed_on: tuple[tuple[str, str], ...] = ()  # see `GenerationRequest`
    client: str = ""  # as the router names it (`pd_http.names`); "": not told
    offer: str = ""  # of an endpoint picker: D-first, whatever the body's kv_transfer_params say
