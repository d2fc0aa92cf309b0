"""Measured steps of one model on one card, and what they say of every other step: interpolated, never invented.

A step takes the time of its decodes, of its prompts' tokens beside so many decodes, and of the keys of these tokens.
Each is a line between measured points; where it leaves them it goes on as between the last two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property
from importlib import resources
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import msgspec

from pd_cluster.errors import StartupError
from pd_cluster.planning.device import (
    HEAVY_TOKENS,
    USUAL_BLOCK_SIZE,
    USUAL_BLOCKS,
    USUAL_SEQS,
    USUAL_STEP_TOKENS,
    Device,
)
from pd_cluster.scheduling.captured_sizes import bucket_sizes, token_buckets
from pd_cluster.scheduling.step_model import StepWork, keys_of

Line: TypeAlias = Sequence[tuple[float, float]]

SCHEMA = 1
LEAST_DECODES = LEAST_SIZES = 2  # points of a line
POINTS_OF_LINE = 5  # of the file


class StepPoint(NamedTuple):
    """A measured step: decodes after `context` tokens each, and one chunk of `num_tokens` after `before` others."""

    num_decodes: int
    context: int
    num_tokens: int
    before: int
    ms: float
    hot_ms: float = 0.0  # after steps like it, back to back; 0: not measured


class TableModel(msgspec.Struct, frozen=True):
    """What the table is of. A plan for another model, card or version says so."""

    name: str
    architecture: str
    fingerprint: str = ""  # "": of a shape, with random weights
    num_heads: int = 0
    num_kv_heads: int = 0
    dtype: str = ""
    kv_dtype: str = ""
    weight_bytes: float = 0.0  # of all ranks


class TableFlags(msgspec.Struct, frozen=True):
    """Settings of the node that change its steps or what they hold, as the node had them."""

    max_num_seqs: int = USUAL_SEQS
    max_num_batched_tokens: int = USUAL_STEP_TOKENS
    block_size: int = USUAL_BLOCK_SIZE
    num_blocks: int = USUAL_BLOCKS  # that its memory had room for
    max_model_len: int = 1 << 20
    is_captured: bool = True  # steps are padded to captured sizes


class StepTable(msgspec.Struct, frozen=True, dict=True):
    """The file of `pd-cluster step-table`."""

    card: str
    model: TableModel
    tp: int
    versions: dict[str, str]
    flags: TableFlags
    source: str  # where the points are from
    points: tuple[StepPoint, ...]
    schema: int = SCHEMA

    @cached_property
    def device(self) -> Device:
        """Raises StartupError when the points are too few."""
        return TableDevice(self)

    def to_json(self) -> bytes:
        """A line of points has POINTS_OF_LINE of them."""
        head, _, _ = msgspec.json.encode(msgspec.structs.replace(self, points=())).partition(b'"points":[]')
        rows = [msgspec.json.encode(point) for point in self.points]
        lines = (b",".join(rows[at : at + POINTS_OF_LINE]) for at in range(0, len(rows), POINTS_OF_LINE))
        return head + b'\n"points":[\n' + b",\n".join(lines) + b'\n],"schema":%d}\n' % self.schema


def read_table(data: bytes, name: str) -> StepTable:
    """Raises StartupError."""
    try:
        table = msgspec.json.decode(data, type=StepTable)
    except msgspec.MsgspecError as error:
        raise StartupError(f"{name} is not a step table: {error}") from error
    if table.schema != SCHEMA:
        raise StartupError(f"{name} is a step table of schema {table.schema}; this release reads {SCHEMA}")
    if min(table.tp, *msgspec.structs.astuple(table.flags)[:-1]) < 1:
        raise StartupError(f"{name} has a number of ranks, or a limit of a node, that is not above 0")
    if any(point.ms <= 0 or min(point) < 0 for point in table.points):
        raise StartupError(f"{name} has a point that is not above 0")
    table.device  # noqa: B018  # it checks the points
    return table


class TableDevice(Device):
    """Steps as a table has them."""

    def __init__(self, table: StepTable) -> None:
        """Raises StartupError when a line has too few points."""
        flags, points = table.flags, table.points
        self._points = points
        self.max_seqs, self.step_tokens = flags.max_num_seqs, flags.max_num_batched_tokens
        self.num_blocks, self.block_size = flags.num_blocks, flags.block_size
        self._decode_sizes = bucket_sizes(self.max_seqs) if flags.is_captured else []
        self._sizes = token_buckets(self.step_tokens) if flags.is_captured else []
        alone = [point for point in points if not point.num_tokens]
        self._context = _context_line(alone)
        self._decodes = sorted({float(p.num_decodes): p.ms / 1e3 - self._context_s(p) for p in alone}.items())
        self.heat = max((p.hot_ms / p.ms - 1 for p in points if p.hot_ms), default=0.0)
        prompts = [self._cool(point) for point in points if point.num_tokens]
        if len(self._decodes) < LEAST_DECODES or len({p.num_tokens for p in prompts}) < LEAST_SIZES:
            raise StartupError(f"the step table of {table.model.name} has too few points: decodes alone, and prompts")
        self._keys = self._key_line(prompts)
        self._beside = self._prompt_lines(prompts)

    def seconds(self, work: StepWork) -> float:
        decodes, tokens = work.num_decodes, work.num_tokens
        if not tokens:
            alone_s = at(self._decodes, padded(self._decode_sizes, decodes))
            return max(1e-6, alone_s + at(self._context, decodes) * work.context)
        prompts_s = self._between_lines(decodes, padded(self._sizes, decodes + tokens) - decodes)
        decodes_s = at(self._decodes, decodes) + at(self._context, decodes) * work.context
        return max(1e-6, decodes_s + prompts_s + at(self._keys, tokens) * work.num_keys)

    def _cool(self, point: StepPoint) -> StepPoint:
        """Steps beside decodes are measured one after the other: what heat made of them is taken off again.

        As far as the table says so: such a step, measured back to back, was hardly longer.
        """
        again = min((p.hot_ms / p.ms - 1 for p in self._points if p.hot_ms and p.num_decodes), default=self.heat)
        share = min(1.0, point.num_tokens / HEAVY_TOKENS) * (point.num_decodes > 0)
        return point._replace(ms=point.ms / (1 + share * max(0.0, self.heat - again)))

    def _context_s(self, point: StepPoint) -> float:
        return at(self._context, point.num_decodes) * point.num_decodes * point.context

    def _key_line(self, prompts: list[StepPoint]) -> Line:
        """Seconds of a key, by the tokens of the prompt."""
        near = {(p.num_decodes, p.num_tokens): p for p in prompts if not p.before}
        found = {}
        for far in prompts:
            like = near.get((far.num_decodes, far.num_tokens))
            if far.before and like is not None:
                num = far.num_tokens * far.before
                found[float(far.num_tokens)] = max(0.0, far.ms - like.ms) / 1e3 / num
        return sorted(found.items()) or [(0.0, 0.0)]

    def _prompt_lines(self, prompts: list[StepPoint]) -> list[tuple[int, Line]]:
        """Seconds more than the decodes', by number of decodes and then of tokens. Keys are left out."""
        lines = dict[int, list[tuple[float, float]]]()
        for p in prompts:
            if not p.before:
                alone_s = at(self._decodes, p.num_decodes) + self._context_s(p)
                keys_s = at(self._keys, p.num_tokens) * keys_of(p.num_tokens, 0)
                lines.setdefault(p.num_decodes, [(0.0, 0.0)]).append((p.num_tokens, p.ms / 1e3 - alone_s - keys_s))
        return sorted((num, sorted(line)) for num, line in lines.items())

    def _between_lines(self, num_decodes: int, num_tokens: int) -> float:
        lines = self._beside
        index = bisect_left(lines, num_decodes, key=lambda line: line[0])
        if index == 0 or index == len(lines):
            return at(lines[min(index, len(lines) - 1)][1], num_tokens)
        (low, low_line), (high, high_line) = lines[index - 1], lines[index]
        share = (num_decodes - low) / (high - low)
        return (1 - share) * at(low_line, num_tokens) + share * at(high_line, num_tokens)


def packaged_tables() -> dict[str, StepTable]:
    """Those that come with the package, by the names of their files."""
    files = resources.files("pd_cluster.planning") / "tables"
    names = sorted(file.name for file in files.iterdir() if file.name.endswith(".json"))
    return {name.removesuffix(".json"): read_table((files / name).read_bytes(), name) for name in names}


def at(line: Line, x: float) -> float:
    """Between the points of a line, and as between the last two beyond them; below the first as at the first."""
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    index = min(bisect_left(line, x, key=lambda point: point[0]), len(line) - 1)
    (low, low_y), (high, high_y) = line[index - 1], line[index]
    return low_y + (high_y - low_y) * (x - low) / (high - low)


def _context_line(alone: list[StepPoint]) -> Line:
    """Seconds of a token of context, by number of decodes; of those that were measured after two lengths."""
    by_number = dict[int, list[StepPoint]]()
    for point in alone:
        by_number.setdefault(point.num_decodes, []).append(point)
    found = []
    for num, points in by_number.items():
        near, far = min(points, key=attrgetter("context")), max(points, key=attrgetter("context"))
        if num and far.context > near.context:
            found.append((float(num), max(0.0, far.ms - near.ms) / 1e3 / num / (far.context - near.context)))
    return sorted(found) or [(0.0, 0.0)]


def padded(sizes: list[int], num: int) -> int:
    """The captured size; what is larger than all of them runs as it is."""
    return sizes[bisect_left(sizes, num)] if sizes and num <= sizes[-1] else num
