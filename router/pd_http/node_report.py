"""What a node tells the router about a request that it served, for the request's line in the log and its trace.

It is the last value of a framed stream's end, and the value of the answer's header REPORT_HEADER if the answer is not
streamed and the request has that header.
"""

from __future__ import annotations

import msgspec

REPORT_HEADER = "x-pd-report"


class NodeReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Counts and times of one request at one node. It has no text of the request."""

    model: str = ""  # the name in the answer
    num_prompt_tokens: int = 0  # of all prompts
    num_cached_tokens: int = 0  # as the client's usage says
    num_output_tokens: int = 0  # of the whole answer, also those that another node wrote
    first_s: float = 0.0  # from the request's arrival to its first output; 0: there was none
    phases: dict[str, float] = {}  # seconds by name (`pd_cluster.protocol.messages.Timeline`); {}: several prompts
    prefill_node: str = ""
    num_drafts: int = 0  # that this node verified, and of these accepted; 0: of an older release, too
    num_accepted_drafts: int = 0


_DECODER = msgspec.json.Decoder(NodeReport)


def encode_report(report: NodeReport) -> bytes:
    """JSON."""
    return msgspec.json.encode(report)


def decode_report(data: bytes) -> NodeReport | None:
    """None: `data` is no report."""
    try:
        return _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
