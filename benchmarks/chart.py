"""`python -m benchmarks chart`: draws the README's chart from the records, as SVG for light and for dark pages.

Each workload has a line for pd-cluster and one for the peer: a circle for one prefill and one decode node, a square for
two replicas, both on two GPUs. Text stays text, and the same records give the same bytes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.presets import PEER, PRESETS, PeerRow, Preset
from benchmarks.records import RESULTS
from benchmarks.tables import latest_runs
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    Runs = Mapping[tuple[str, str], dict[str, Any]]

ASSETS = Path("docs/assets")
WIDTH, MARGIN, NAMES = 640, 10, 194  # units of the picture; NAMES: width of the column of workloads
MAX_NAME_CHARS = 22  # in the first line of a workload's name; the rest is in the second
LABEL = 50  # room for a figure beside the outermost mark
ROW, LINE = 52, 20  # height of a workload, distance of its two lines
HEAD, PANEL_TITLE, AXIS = 74, 40, 34
ROOM = 8  # between a mark and its figure
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of one picture. The background is the page's."""

    name: str
    text: str
    faint: str  # secondary text
    grid: str
    ours: str
    peer: str


THEMES = (
    Theme("light", "#1f2328", "#59636e", "#d1d9e0", "#0969da", "#bc4c00"),
    Theme("dark", "#f0f6fc", "#9198a1", "#3d444d", "#4493f8", "#f0883e"),
)


class Pair(NamedTuple):
    """Milliseconds of one engine under one workload."""

    disaggregated: float
    replicas: float


class Figures(NamedTuple):
    """One workload's two lines."""

    title: str
    ours: Pair
    peer: Pair


class Panel(NamedTuple):
    """One measure over all workloads."""

    title: str
    figures: tuple[Figures, ...]


class Scale(NamedTuple):
    """A logarithmic axis."""

    low: float
    high: float
    left: float
    right: float

    def x(self, value: float) -> float:
        """The place of a value, in units of the picture."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.left + share * (self.right - self.left)

    def ticks(self) -> list[float]:
        """Round values inside the axis: 1, 2 and 5 times powers of ten."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
        return [value for value in values if self.low <= value <= self.high]


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks chart", allow_abbrev=False)
    parser.add_argument("directory", type=Path, nargs="?", default=ASSETS, help="Default: %(default)s.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="Default: %(default)s.")
    namespace = parser.parse_args(arguments)
    try:
        for theme in THEMES:
            (namespace.directory / f"chart-{theme.name}.svg").write_text(draw(panels(namespace.results), theme))
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"the chart cannot be drawn: {type(error).__name__}: {error}") from error
    return 0


def panels(results: Path) -> tuple[Panel, ...]:
    """The figures of the chart. Raises KeyError for a run that the records lack, OSError and ValueError."""
    runs = latest_runs(results)
    return (
        _panel("ITL p99: the pauses in a stream, ms (lower is better)", runs, "itl", "p99_ms", lambda row: row.itl[1]),
        _panel(
            "TTFT p90: the wait for the first token, ms (lower is better)",
            runs,
            "ttft",
            "p90_ms",
            lambda row: row.ttft[1],
        ),
    )


def _panel(title: str, runs: Runs, spread: str, name: str, of_peer: Callable[[PeerRow], float]) -> Panel:
    def ours(preset: Preset, setting: str) -> float:
        return float(runs[preset.name, setting]["summary"]["spreads"][spread][name])

    figures = [
        Figures(
            preset.title,
            Pair(ours(preset, "1P1D"), ours(preset, "2M")),
            Pair(of_peer(peer_disaggregated(preset)), of_peer(peer_replicas(preset))),
        )
        for preset in PRESETS.values()
    ]
    return Panel(title, tuple(figures))


def peer_disaggregated(preset: Preset) -> PeerRow:
    """The peer with one prefill and one decode node: tuned where it was measured so, else with its defaults."""
    rows = {row.setting: row for row in preset.peers}
    return rows.get("1P1D tuned") or rows["1P1D default"]


def peer_replicas(preset: Preset) -> PeerRow:
    """The peer's two replicas."""
    return next(row for row in preset.peers if row.setting == "2M")


def draw(found: Sequence[Panel], theme: Theme) -> str:
    """The picture."""
    height = HEAD + sum(PANEL_TITLE + ROW * len(panel.figures) + AXIS for panel in found)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="{FONT}" font-size="17" '
        f'fill="{theme.text}" role="img" aria-labelledby="title">',
        f'<title id="title">{_summary(found)}</title>',
        *_legend(theme),
    ]
    top = float(HEAD)
    for panel in found:
        parts += _draw_panel(panel, top, theme)
        top += PANEL_TITLE + ROW * len(panel.figures) + AXIS
    return "\n".join([*parts, "</svg>", ""])


def _summary(found: Sequence[Panel]) -> str:
    """All figures in words, for readers of the file and for screen readers."""
    lines = ["1P1D / two replicas, of pd-cluster and of " + PEER]
    for panel in found:
        lines.append(panel.title)
        for title, ours, peer in panel.figures:
            figures = "; ".join(f"{_number(one.disaggregated)} / {_number(one.replicas)}" for one in (ours, peer))
            lines.append(f"{_escaped(title)}: {figures}")
    return "\n".join(lines)


def _legend(theme: Theme) -> Iterator[str]:
    for column, (name, colour) in enumerate((("pd-cluster", theme.ours), (PEER, theme.peer))):
        left = MARGIN + 10 + column * (WIDTH / 2 - MARGIN)
        for line, (text, mark) in enumerate((("1 prefill + 1 decode", _circle), ("2 replicas", _square))):
            y = 24 + line * 26
            yield mark(left, y, colour)
            yield _text(left + 16, y, f"{name}, {text}")


def _draw_panel(panel: Panel, top: float, theme: Theme) -> Iterator[str]:
    values = [value for _, *pairs in panel.figures for pair in pairs for value in pair]
    scale = Scale(min(values), max(values), MARGIN + NAMES + LABEL, WIDTH - MARGIN - LABEL)
    first, last = top + PANEL_TITLE, top + PANEL_TITLE + ROW * len(panel.figures)
    yield _text(MARGIN, top + 18, panel.title, 'font-weight="600" font-size="18"')
    for tick in scale.ticks():
        x = _number(scale.x(tick))
        yield f'<path d="M{x} {first:g}V{last:g}" stroke="{theme.grid}"/>'
        yield _text(scale.x(tick), last + 14, f"{tick:g}", f'text-anchor="middle" fill="{theme.faint}"')
    for index, (title, ours, peer) in enumerate(panel.figures):
        y = first + ROW * index + ROW / 2
        name, _, rate = title.rpartition(", ")
        name, *more = wrap(name, MAX_NAME_CHARS)
        yield _text(MARGIN, y - LINE / 2, _escaped(name))
        yield _text(MARGIN, y + LINE / 2, _escaped(", ".join([*more, rate])), f'fill="{theme.faint}"')
        yield from _draw_pair(ours, y - LINE / 2, theme.ours, scale)
        yield from _draw_pair(peer, y + LINE / 2, theme.peer, scale)


def _draw_pair(pair: Pair, y: float, colour: str, scale: Scale) -> Iterator[str]:
    circle, square = scale.x(pair.disaggregated), scale.x(pair.replicas)
    yield f'<path d="M{_number(circle)} {y:g}H{_number(square)}" stroke="{colour}" stroke-width="2"/>'
    yield _square(square, y, colour)
    yield _circle(circle, y, colour)
    side = 1 if circle >= square else -1  # figures stand outside of the two marks
    for x, value, way, weight in ((circle, pair.disaggregated, side, "700"), (square, pair.replicas, -side, "400")):
        anchor = "start" if way > 0 else "end"
        yield _text(
            x + way * (ROOM + 4), y, _figure(value), f'text-anchor="{anchor}" font-weight="{weight}" fill="{colour}"'
        )


def _circle(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{_number(x)}" cy="{y:g}" r="7" fill="{colour}"/>'


def _square(x: float, y: float, colour: str) -> str:
    return f'<rect x="{_number(x - 5.5)}" y="{y - 5.5:g}" width="11" height="11" fill="{colour}"/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    """A line of text that is centred on `y`."""
    return f'<text x="{_number(x)}" y="{y + 5.5:g}"{" " * bool(attributes)}{attributes}>{text}</text>'


def _number(value: float) -> str:
    return f"{value:.1f}"


def _figure(value: float) -> str:
    """Milliseconds as the picture shows them."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
