"""Requests of a trace: when they arrive, how long they are, and which text they share."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from random import Random

BLOCK_TOKENS = 512  # of a block in Mooncake's traces


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. Prompts with `blocks` that begin alike begin with the same text."""

    at_s: float
    num_tokens: int  # of the prompt
    num_output: int
    blocks: tuple[int, ...]  # names of its whole blocks of BLOCK_TOKENS, each with all text before it
    answered: tuple[int, ...] = ()  # the same of the prompt with its answer; (): the answer is not asked for again
    text: tuple[int, int, int] = (0, 0, 0)  # of a conversation: its head, tokens of that, and its own number


def read_trace(path: Path) -> list[SimRequest]:
    """Mooncake's JSON lines (timestamp in ms, hash_ids) or Azure's CSV (no shared text). Raises StartupError."""
    try:
        with path.open(encoding="utf-8") as file:
            rows = (
                _azure(csv.DictReader(file)) if path.suffix == ".csv" else [_mooncake(json.loads(one)) for one in file]
            )
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"the trace {path} cannot be read: {error}") from error
    rows.sort(key=lambda row: row.at_s)
    begin_s = rows[0].at_s
    return [SimRequest(row.at_s - begin_s, row.num_tokens, row.num_output, row.blocks) for row in rows]


def _mooncake(row: dict[str, object]) -> SimRequest:
    num_tokens = max(2, int(str(row["input_length"])))
    ids = row["hash_ids"]
    assert isinstance(ids, list)
    whole = tuple(ids[: num_tokens // BLOCK_TOKENS])
    return SimRequest(float(str(row["timestamp"])) / 1000, num_tokens, max(1, int(str(row["output_length"]))), whole)


def _azure(rows: csv.DictReader[str]) -> list[SimRequest]:
    arrivals = []
    for number, row in enumerate(rows):
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        num_tokens = max(2, int(row["ContextTokens"]))
        own = tuple((number + 1 << 20) + k for k in range(num_tokens // BLOCK_TOKENS))
        arrivals.append(SimRequest(at_s, num_tokens, max(1, int(row["GeneratedTokens"])), own))
    return arrivals


def scaled(arrivals: Sequence[SimRequest], speed: float, random: Random) -> list[SimRequest]:
    """The arrivals `speed` times as dense, each gap lengthened or shortened by up to a fifth; order and text stay.

    Traces tell whole seconds or bunches, so arrivals are also spread by up to half a mean gap.
    """
    mean_s = arrivals[-1].at_s / len(arrivals) / speed
    at_s = before_s = 0.0
    spread = []
    for one in arrivals:
        at_s += (one.at_s - before_s) / speed * random.uniform(0.8, 1.2)
        before_s = one.at_s
        when_s = at_s + random.uniform(0.0, mean_s / 2)
        spread.append(SimRequest(when_s, one.num_tokens, one.num_output, one.blocks))
    return sorted(spread, key=lambda one: one.at_s)


def copied(arrivals: Sequence[SimRequest], count: int) -> list[SimRequest]:
    """So many copies at once, for clusters that one trace does not fill: each of other text, and begun elsewhere."""
    span_s = arrivals[-1].at_s * (1 + 1 / len(arrivals))
    step = 1 + max((block for one in arrivals for block in one.blocks), default=0)
    copies = [
        SimRequest(
            (one.at_s + copy / count * span_s) % span_s, one.num_tokens, one.num_output,
            tuple(block + copy * step for block in one.blocks),
        )
        for copy in range(count)
        for one in arrivals
    ]  # fmt: skip
    copies.sort(key=lambda one: one.at_s)
    return copies


def synthetic(num_requests: int, random: Random) -> list[SimRequest]:
    """Conversations that share a first block and grow by turns: for tests, and for clusters that no trace fills.

    One arrival a second; a turn repeats all of the turns before it.
    """
    arrivals: list[SimRequest] = []
    talks: list[tuple[int, ...]] = []
    named = 1
    for number in range(num_requests):
        before: tuple[int, ...] = (0,)
        if talks and random.random() < 0.7:
            before = talks.pop(random.randrange(len(talks)))
        more = 1 + int(random.expovariate(0.2))
        blocks = before + tuple(range(named, named + more))
        named += more
        talks.append(blocks)
        num_tokens = len(blocks) * BLOCK_TOKENS + random.randrange(BLOCK_TOKENS) + 1
        arrivals.append(SimRequest(float(number), num_tokens, 1 + int(random.expovariate(1 / 200)), blocks))
    return arrivals
