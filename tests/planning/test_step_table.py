"""A step table: what it says of steps between its points, and which files it refuses."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.slo.device import DEVICES
from benchmarks.slo.fitted_tables import SOURCES, fitted_table
from pd_cluster.errors import StartupError
from pd_cluster.planning.coarse_node import CoarseNode, CoarseStream
from pd_cluster.planning.device import steps_at_start
from pd_cluster.planning.step_table import StepPoint, StepTable, packaged_tables, read_table
from pd_cluster.planning.table_points import planned_points
from pd_cluster.scheduling.step_model import StepModel, StepWork, keys_of
from pd_cluster.scheduling.targets import Targets


@pytest.mark.parametrize("name", [source[0] for source in SOURCES.values()])
def test_a_fitted_table_says_what_its_source_does_between_the_points(name: str) -> None:
    table = packaged_tables()[name]
    [(shape, ranks)] = [key for key, source in SOURCES.items() if source[0] == name]
    assert table == fitted_table(shape, ranks), "python -m benchmarks slo --write-tables pd_cluster/planning/tables"
    source = DEVICES[shape, ranks]
    works = [StepWork(num, num * 1500) for num in (3, 20, 50, 100, 200)]
    works += [StepWork(num, num * 1500, size, keys_of(size, 700)) for num in (20, 40, 100) for size in (150, 600, 1500)]
    works += [StepWork(0, 0, size, keys_of(size, 3000)) for size in (100, 700, 1700)]
    for work in works:
        assert table.device.seconds(work) == pytest.approx(source.seconds(work), rel=0.07), work


def test_the_heat_of_steps_measured_one_after_the_other_is_taken_off() -> None:
    """Else the simulation, which heats a device by its steps, would heat these twice."""
    table = packaged_tables()["8b-h200-tp1"]
    device, times = table.device, {point[:4]: (point.ms, point.hot_ms) for point in table.points}
    alone, hot = times[0, 0, 2048, 0]
    beside = times[1, 1024, 2047, 0][0]
    assert device.heat == pytest.approx(times[0, 0, 1024, 0][1] / times[0, 0, 1024, 0][0] - 1)
    found = 1e3 * device.seconds(StepWork(1, 1024, 2047, keys_of(2047, 0)))
    assert found == pytest.approx(beside / (1 + device.heat), rel=0.02)
    assert 1e3 * device.seconds(StepWork(0, 0, 2048, keys_of(2048, 0))) == pytest.approx(alone, rel=0.001)
    assert alone < hot
    few = 1e3 * device.seconds(StepWork(8, 8 * 1024, 8, keys_of(8, 0)))
    assert few == pytest.approx(times[8, 1024, 8, 0][0], rel=0.01), "few tokens heat nothing"


def test_a_step_between_points_takes_what_the_points_say() -> None:
    points = (
        StepPoint(1, 1000, 0, 0, 4.0), StepPoint(11, 1000, 0, 0, 6.0), StepPoint(11, 3000, 0, 0, 8.2),
        StepPoint(0, 0, 100, 0, 5.0), StepPoint(0, 0, 300, 0, 9.0), StepPoint(0, 0, 300, 1000, 9.6),
    )  # fmt: skip
    device = _table(points).device
    assert device.seconds(StepWork(11, 11_000)) == pytest.approx(6.0e-3)
    assert device.seconds(StepWork(11, 22_000)) == pytest.approx(7.1e-3)
    assert 4.0e-3 < device.seconds(StepWork(6, 6000)) < 6.0e-3
    alone, after = (device.seconds(StepWork(0, 0, 200, 200 * before)) for before in (0, 1000))
    assert alone == pytest.approx(7.0e-3, rel=0.02)
    assert after - alone == pytest.approx(0.4e-3), "0.6 ms of 300 tokens after 1,000"
    assert device.seconds(StepWork(11, 11_000, 300)) > device.seconds(StepWork(0, 0, 300)) + 1.9e-3


@pytest.mark.parametrize("ms", [3.9, 4.0])
def test_prompts_beside_which_a_step_is_measured_no_longer_are_read_in_every_step(ms: float) -> None:
    points = [StepPoint(num, 1000, 0, 0, 4.0) for num in (1, 11)] + [StepPoint(0, 0, num, 0, ms) for num in (100, 300)]
    device, targets = _table((*points, StepPoint(0, 0, 300, 1000, ms))).device, Targets(tpot_s=0.02, itl_s=0.06)
    node, now_s, num_steps = CoarseNode(device, StepModel(steps_at_start(device)), targets, prompts_first=False), 0.0, 0
    node.begin(CoarseStream(0, 100, 1000, now_s))
    node.read(1, 640, now_s)
    read = list[int]()
    while not read:
        node.plan(now_s)
        now_s, num_steps = node.end_s, num_steps + 1
        read, _ = node.end()
    assert read == [1]
    assert num_steps < 20, "ten steps of 64 tokens at most, and keys"


def test_points_fit_the_limits_of_a_node() -> None:
    full, small = planned_points(256, 2048, 131_072), planned_points(8, 512, 256)
    assert 55 <= len(full) <= 70
    assert 10 <= len(small) <= 40
    for point in small:
        assert point.num_decodes <= 8
        assert point.num_decodes + point.num_tokens <= 512
        assert max(point.context, point.before + point.num_tokens) < 256


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (b'{"card": 1', "is not a step table"),
        ({"schema": 9}, "of schema 9; this release reads 1"),
        ({"points": [[1, 1024, 0, 0, 4.0]]}, "has too few points"),
        ({"points": [[1, 1024, 0, 0, -4.0]]}, "has a point that is not above 0"),
        ({"points": [[1, 1024, 0, 0]]}, "is not a step table"),
    ],
)
def test_a_bad_file_is_refused_in_a_sentence(change: bytes | dict[str, object], problem: str) -> None:
    table = msgspec.to_builtins(packaged_tables()["8b-h200-tp1"])
    data = change if isinstance(change, bytes) else msgspec.json.encode({**table, **change})
    with pytest.raises(StartupError, match=problem):
        read_table(data, "x.json")


def _table(points: tuple[StepPoint, ...]) -> StepTable:
    table = packaged_tables()["8b-h200-tp1"]
    flags = msgspec.structs.replace(table.flags, is_captured=False)
    return msgspec.structs.replace(table, points=points, flags=flags)
