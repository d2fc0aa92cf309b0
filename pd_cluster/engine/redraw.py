"""When a decode node samples the first tokens of a prompt itself, though another node has computed its KV."""

from __future__ import annotations

from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pd_cluster.protocol.sampling_params import SamplingParams
    from pd_connectors.protocol.ticket import Ticket

REDRAWS = "first_token_redraws_total"  # by reason


class Redraw(StrEnum):
    """Why D loads the KV of a ticket but samples the first tokens itself. Counted under this name."""

    MISMATCH = "sampling_mismatch"  # P samples under other parameters
    UNKNOWN = "no_digest"  # P, of an older version, sends no digest of its parameters

    @property
    def counter(self) -> str:
        return f"{REDRAWS}|reason={self}"

    @classmethod
    def due(cls, ticket: Ticket, own_digest: bytes) -> Redraw | None:
        """None if P's first tokens are those that this node would sample. `own_digest`: see `sampling_digest`."""
        if ticket.sampling_digest == own_digest:
            return None
        return cls.MISMATCH if ticket.sampling_digest else cls.UNKNOWN


def sampling_digest(sampling: SamplingParams, logits_stages: Sequence[str]) -> bytes:
    """16 bytes that are equal on two nodes when both sample the same first tokens.

    `logits_stages`: the import paths of the node's logits stages from outside. A node without any agrees with a node
    of a version that had no stages.
    """
    own = sampling.first_token_digest
    if not logits_stages:
        return own
    return blake2b(own + "\n".join(logits_stages).encode(), digest_size=16, person=b"pd-logits-stages").digest()
