"""The limits of one load on D's side: how often it asks, how long it waits, how much it reads at once."""

from __future__ import annotations

from dataclasses import dataclass

RENEWALS_PER_TTL = 4  # three in a row may be lost
DOUBT_S = 0.25  # for the first answer of a peer that left its last question unanswered, as behind a cut network
LOST_GRACE_S = 1.0  # for an answer over a new connection, after one broke or could not be made


@dataclass(frozen=True, slots=True)
class PullLimits:
    """Times in seconds."""

    renew_every_s: float = 2.5  # at most; P's ttl may require a shorter interval
    silence_s: float = 5.0
    read_s: float = 10.0
    confirm_s: float = 5.0
    confirm_every_s: float = 0.25
    max_blocks_per_read: int = 256  # a longer read is cut, so that one load does not keep the others waiting
    max_reads: int = 8  # in flight of one load: enough to keep a link busy, few enough that one of them ends soon
