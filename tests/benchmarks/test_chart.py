"""The README's chart shows the figures of the records."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import main
from benchmarks.chart import THEMES, Scale, Theme, draw, panels, peer_disaggregated
from benchmarks.presets import PRESETS
from benchmarks.tables import latest_runs
from tests.cluster import ROOT

if TYPE_CHECKING:
    from pathlib import Path

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_pictures_are_those_of_the_records(theme: Theme) -> None:
    drawn = draw(panels(RESULTS), theme)
    assert drawn == (ROOT / f"docs/assets/chart-{theme.name}.svg").read_text(), "run `python -m benchmarks chart`"
    assert len(drawn) < 20_000


def test_figures_come_from_the_last_run_of_each_setting() -> None:
    itl, ttft = panels(RESULTS)
    spreads = latest_runs(RESULTS)["4096x128", "1P1D"]["summary"]["spreads"]
    assert itl.figures[0].ours.disaggregated == spreads["itl"]["p99_ms"]
    assert ttft.figures[0].ours.disaggregated == spreads["ttft"]["p90_ms"]
    replicas = latest_runs(RESULTS)["mooncake3", "2M"]["summary"]["spreads"]
    assert itl.figures[-1].ours.replicas == replicas["itl"]["p99_ms"]
    assert [figures.peer for figures in ttft.figures][:2] == [(754, 162), (133, 48)]


def test_the_peer_is_shown_tuned_where_it_was_tuned() -> None:
    settings = {name: peer_disaggregated(preset).setting for name, preset in PRESETS.items()}
    assert settings["4096x128"] == "1P1D default"
    assert settings["1024x256"] == "1P1D tuned"


def test_every_figure_is_in_the_picture_and_inside_it() -> None:
    found = panels(RESULTS)
    picture = ElementTree.fromstring(draw(found, THEMES[0]))
    _, _, width, height = map(float, picture.attrib["viewBox"].split())
    texts = picture.findall("{*}text")
    assert all(0 <= float(text.attrib["x"]) < width and 0 < float(text.attrib["y"]) < height for text in texts)
    shown = [text.text for text in texts]
    for value in (value for panel in found for _, *pairs in panel.figures for pair in pairs for value in pair):
        assert (f"{value:.0f}" if value >= 10 else f"{value:.1f}") in shown
    assert len(picture.findall("{*}circle")) == len(picture.findall("{*}rect")) == 2 + 2 * 2 * len(PRESETS)


def test_a_logarithmic_axis() -> None:
    scale = Scale(8.0, 128.0, 100.0, 500.0)
    assert [scale.x(value) for value in (8.0, 32.0, 128.0)] == pytest.approx([100.0, 300.0, 500.0])
    assert scale.ticks() == [10.0, 20.0, 50.0, 100.0]


def test_a_missing_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"workload": "4096x128", "setting": "1P1D", "scale": 1.0, "requests": [[]] * 150}
    (tmp_path / "disagg_gpu.jsonl").write_text(json.dumps({**record, "scale": 0.5}) + "\n")
    assert main(["chart", str(tmp_path), f"--results={tmp_path}"]) == 2
    assert "('4096x128', '1P1D')" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.svg"))
