"""Requests of a load test and their times. All are drawn from one seed before the first is sent."""

from __future__ import annotations

import csv
import itertools
import json
import random
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from typing import TYPE_CHECKING

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

TRACE_BLOCK_TOKENS = 512  # input tokens per id in a trace's `hash_ids` (Mooncake's traces)


@dataclass(frozen=True, slots=True)
class Length:
    """A fixed number of tokens, or a uniform range that includes both ends."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Length:
        """ "128" or "100:1024". Raises ValueError."""
        low, _, high = text.partition(":")
        length = cls(int(low), int(high or low))
        if not 1 <= length.low <= length.high:
            raise ValueError(f"{text!r} is not a length: write 128, or 100:1024 with the smaller number first")
        return length

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A planned request. `prefix_blocks`: ids of its first blocks of `block_tokens`; equal ids mean equal text."""

    at_s: float
    num_input: int
    num_output: int
    prefix_blocks: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK_TOKENS


def poisson(num_requests: int, rate: float, input_len: Length, output_len: Length, seed: int) -> list[Arrival]:
    """Open-loop arrivals, `rate` per second; infinite: all at once."""
    rng = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(num_requests):
        arrivals.append(Arrival(at_s, input_len.draw(rng), output_len.draw(rng)))
        at_s += rng.expovariate(rate) if rate != float("inf") else 0.0
    return arrivals


def at_rate(arrivals: Sequence[Arrival], rate: float, seed: int) -> list[Arrival]:
    """The same requests in the same order, at Poisson times with `rate` per second."""
    times = poisson(len(arrivals), rate, Length(1, 1), Length(1, 1), seed)
    return [replace(row, at_s=time.at_s) for row, time in zip(arrivals, times, strict=True)]


def read_trace(path: Path, num_requests: int, max_input: int = 0) -> list[Arrival]:
    """The first `num_requests` rows (0: all) of an Azure trace (.csv) or a Mooncake trace (.jsonl), of those with at
    most `max_input` input tokens (0: any).

    Raises StartupError.
    """
    readers = {".csv": _azure, ".jsonl": _mooncake}
    if path.suffix not in readers:
        raise StartupError(f"{path} is not a trace: its name must end in .csv or .jsonl")
    rows = list[Arrival]()
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            fitting = (row for row in readers[path.suffix](lines) if not max_input or row.num_input <= max_input)
            for row in itertools.islice(fitting, num_requests or None):
                if not row.at_s >= (rows[-1].at_s if rows else -inf):
                    raise ValueError("a request comes before the one above it")
                rows.append(row)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}, after {len(rows):,} requests"
        raise StartupError(f"{path} cannot be read as a trace: {told}") from error
    except OSError as error:
        raise StartupError(f"the trace {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise StartupError(
            f"the trace {path} is empty" + f", but for prompts above {max_input} tokens" * bool(max_input)
        )
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


def rescale(arrivals: Sequence[Arrival], *, rate: float | None, length_scale: float, max_output: int) -> list[Arrival]:
    """A trace with another mean rate (None: as recorded), scaled lengths and capped output (0: no cap)."""
    span_s = arrivals[-1].at_s
    stretch = (len(arrivals) - 1) / rate / span_s if rate and span_s > 0 else 1.0
    return [
        replace(
            row,
            at_s=0.0 if rate == float("inf") else row.at_s * stretch,
            num_input=max(1, round(row.num_input * length_scale)),
            num_output=min(max(1, round(row.num_output * length_scale)), max_output or row.num_output),
            block_tokens=max(1, round(row.block_tokens * length_scale)),
        )
        for row in arrivals
    ]


def prompt_ids(arrival: Arrival, index: int, vocabulary: Sequence[int], seed: int) -> list[int]:
    """The arrival's prompt. Equal prefix blocks get equal ids; the rest is drawn from `vocabulary`."""
    ids: list[int] = []
    for block in arrival.prefix_blocks:
        rng = random.Random(f"{seed}/block/{block}")
        ids += rng.choices(vocabulary, k=arrival.block_tokens)
    rng = random.Random(f"{seed}/request/{index}")
    ids = ids[: arrival.num_input]
    return ids + rng.choices(vocabulary, k=arrival.num_input - len(ids))


def _azure(lines: Iterable[str]) -> Iterable[Arrival]:
    for row in csv.DictReader(lines):
        at_s = datetime.fromisoformat(
            row["TIMESTAMP"][:26]
        ).timestamp()  # seven digits after the point; Python reads six
        yield Arrival(at_s, _length(int(row["ContextTokens"])), _length(int(row["GeneratedTokens"])))


def _mooncake(lines: Iterable[str]) -> Iterable[Arrival]:
    for line in lines:
        row = json.loads(line)
        blocks = tuple(int(block) for block in row.get("hash_ids", ()))
        yield Arrival(row["timestamp"] / 1e3, _length(row["input_length"]), _length(row["output_length"]), blocks)


def _length(num_tokens: object) -> int:
    """At least 1: a request has a token. Raises ValueError."""
    if type(num_tokens) is not int or num_tokens < 0:
        raise ValueError(f"{num_tokens!r} is not a number of tokens")
    return max(1, num_tokens)
