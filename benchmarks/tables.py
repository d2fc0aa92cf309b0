"""`python -m benchmarks tables`: writes a document's performance tables from the records.

The text between `<!-- table: NAME -->` and `<!-- end -->` is replaced. The last record of a measurement counts;
rehearsals do not.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.disagg import HEADERS, our_row, peer_row
from benchmarks.presets import PRESETS
from benchmarks.records import RESULTS
from pd_cluster.bench.statistics import HANDOVER_STEPS
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

DOCUMENT = Path("docs") / "benchmarks.md"
TARGETS = ", 200/10"  # after a setting's name, where runs without targets are in the same file
Record = dict[str, Any]

_DISAGG_INTRO = """\
Two H200s over NVLink, the same shape, one prefill and one decode node (1P1D) beside two mixed replicas (2M), everything
as the HTTP client sees it: ms as p50/p90/p99 or p50/p99, "leg" what the prefill node itself took to its first token,
and the share of requests within a TTFT and a TPOT
([records](../benchmarks/results/disagg_gpu.jsonl)):

"""
_HANDOVER_INTRO = """\
One handover, from the announcement of the prompt's last blocks to the decode node's queue
([records](../benchmarks/results/handover_gpu.jsonl)):

"""
_PLACE = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main(arguments: Sequence[str]) -> int:
    """Returns 0. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks tables", allow_abbrev=False)
    parser.add_argument("document", type=Path, nargs="?", default=DOCUMENT, help="Default: %(default)s.")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="Default: %(default)s.")
    namespace = parser.parse_args(arguments)
    try:
        old = namespace.document.read_text()
        namespace.document.write_text(fill(old, namespace.results))
    except (OSError, ValueError, KeyError) as error:
        raise StartupError(f"the tables cannot be written: {type(error).__name__}: {error}") from error
    return 0


def fill(text: str, results: Path) -> str:
    """`text` with its tables written again from the `.jsonl` files in `results`. Raises StartupError, OSError, KeyError
    for a record without a field, and ValueError for one that is not JSON."""

    def table(match: re.Match[str]) -> str:
        make = _TABLES.get(match["name"])
        if make is None:
            raise StartupError(f"unknown table {match['name']!r}; known are {', '.join(_TABLES)}")
        return match[1] + make(results) + match[3]

    return _PLACE.sub(table, text)


def _records(results: Path, name: str) -> list[Record]:
    path = results / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) + "\n" for line in lines)


def _figure(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1e3:.1f}k"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


# the tables


def _engine_cpu(results: Path) -> str:
    records = _records(results, "engine_cpu.jsonl")
    if not records:
        return ""
    names = [result["name"] for result in records[-1]["results"]]
    rows = []
    for record in records:
        rates = {result["name"]: result["rate"] for result in record["results"]}
        ours, *others = (rates.get(name, 0.0) for name in names)
        cells = [f"{rate:,.0f} ({ours / rate:.2f} x)" if rate else "" for rate in others]
        rows.append([_when(record), f"{ours:,.0f}", *cells])
    return _markdown(["output tokens/s (ours is)", *names], rows)


def _engine_gpu(shape: str, results: Path, num_ranks: int = 1) -> str:
    return _engine_gpu_rows(shape, lambda row: row["kind"] != "draws", results, num_ranks)


def _draws(results: Path) -> str:
    return _engine_gpu_rows("8b", lambda row: row["kind"] == "draws", results)


def _sums_over_ranks(num_ranks: int, results: Path) -> str:
    """Microseconds of a sum with residual and norm; the last record with each number of rows counts."""
    names, found, head = list[str](), dict[int, dict[str, float]](), ""
    for record in _records(results, "reduce_gpu.jsonl"):
        if record["ranks"] != num_ranks:
            continue
        names = list(dict.fromkeys(result["name"] for result in record["results"]))
        head = f"{_when(record)}: {record['ranks']} ranks, us"
        for result in record["results"]:
            found.setdefault(result["rows"], {})[result["name"]] = result["p50_us"]
            width = record["hidden"]
    rows = [
        [f"{num} x {width}", *(_figure(found[num][name]) if name in found[num] else "" for name in names)]
        for num in sorted(found)
    ]
    return _markdown([head, *names], rows) if rows else ""


def _engine_gpu_rows(shape: str, is_wanted: Callable[[Record], bool], results: Path, num_ranks: int = 1) -> str:
    """The table of the last run of a shape with wanted rows; "" for none."""
    runs = [
        (record, rows)
        for record in _records(results, "engine_gpu.jsonl")
        if record["shape"] == shape
        and record["config"]["model"].get("tp", 1) == num_ranks
        and (rows := list(filter(is_wanted, record["results"])))
    ]
    if not runs:
        return ""
    record, found = runs[-1]
    rows = []
    for _, group in groupby(found, lambda row: (row["kind"], row["kind"] == "decode" and row["length"])):
        some = list(group)
        cells = [[_figure(statistics.median(row["samples"])) for row in some]]
        for name, style in (("share", "{:.0%}"), ("gain", "{:.2f}")):
            cells.append([style.format(row[name]) for row in some if row[name] is not None])
        rows.append([_row_name(some), *(" / ".join(cell) for cell in cells)])
    return _markdown([_when(record), "pd-cluster", "of the roofline", f"x {record['peer']}"], rows)


def _row_name(rows: list[Record]) -> str:
    def several(*keys: str) -> str:
        return " / ".join(" x ".join(str(row[key]) for key in keys) for row in rows)

    match rows[0]["kind"]:
        case "decode":
            return f"decode, {rows[0]['length'] // 1024}k context, B = {several('count')}, ms a step"
        case "prefill":
            return f"prefill {several('count', 'length')}, tok/s"
        case "prompt":
            return f"one prompt of {several('length')}, ms"
        case "draws":
            return f"decode, 1k context, B = {rows[0]['count']}, {several('draws')}, ms a step"
    return f"{rows[0]['count']} mixed sequences, output tok/s"


def latest_runs(
    results: Path, file: str = "disagg_gpu.jsonl", rate_scale: float = 1.0
) -> dict[tuple[str, str], Record]:
    """The last whole run of each workload and setting of a disaggregation table."""
    latest: dict[tuple[str, str], Record] = {}
    for record in _records(results, file):
        num_requests = PRESETS[record["workload"]].times(rate_scale).num_requests
        found = (record["scale"], record.get("rate_scale", 1.0), len(record["requests"]))
        if found == (1.0, rate_scale, num_requests):
            latest[record["workload"], record["setting"]] = record
    return latest


def _disagg(results: Path) -> str:
    latest = latest_runs(results)
    rows = []
    for name, preset in PRESETS.items():
        ours = [
            our_row(f"**{setting}**, {_when(record)}", record["summary"])
            for (workload, setting), record in sorted(latest.items())
            if workload == name
        ]
        if ours:
            rows.append([f"*{preset.title}*", *[""] * (len(HEADERS) - 1)])
            rows += ours + [peer_row(peer) for peer in preset.peers]
    return _DISAGG_INTRO + _markdown(HEADERS, rows) if rows else ""


def _disagg_without_peer(file: str, results: Path) -> str:
    """The same for runs that the peer was not measured with."""
    latest = sorted(latest_runs(results, file).items())
    rows = []
    for name, preset in PRESETS.items():
        runs = [(setting, record) for (load, setting), record in latest if load == name]
        if ours := [our_row(f"{setting}, {_when(record)}", record["summary"]) for setting, record in runs]:
            rows += [[f"*{preset.title}*", *[""] * (len(HEADERS) - 1)], *ours]
    return _markdown(HEADERS, rows) if rows else ""


def _runs(results: Path) -> str:
    """The share of each run within its own targets, two settings beside each other."""
    runs = dict[tuple[str, str], dict[str, list[Record]]]()
    for record in _records(results, "disagg_gpu_runs.jsonl"):
        if record["scale"] != 1.0:
            continue
        row = (_load_title(record), record["slo"])
        runs.setdefault(row, {}).setdefault(record["setting"], []).append(record)
    settings = dict.fromkeys(setting for found in runs.values() for setting in found)
    rows = [
        [title, slo, *(cell for setting in settings for cell in _run_cells(slo, found.get(setting, [])))]
        for (title, slo), found in runs.items()
    ]
    heads = (head for setting in settings for head in (setting, "TTFT p90, TPOT p99"))
    return _markdown(["share within the targets, runs in turn", "targets", *heads], rows) if rows else ""


def _load_title(record: Record) -> str:
    preset = PRESETS[record["workload"]]
    if not record["trace"]:
        return preset.title
    return f"*{record['trace']}*, {preset.rate * record['rate_scale']:g}/s"


def _run_cells(slo: str, records: Sequence[Record]) -> tuple[str, str]:
    """The shares of the runs, and the medians of their TTFT p90 and TPOT p99."""
    if not records:
        return "", ""
    spreads = [record["summary"]["spreads"] for record in records]
    ttft = statistics.median(found["ttft"]["p90_ms"] for found in spreads)
    tpot = statistics.median(found["tpot"]["p99_ms"] for found in spreads)
    shares = ", ".join(f"{record['summary']['attained'][slo]:.2f}" for record in records)
    return shares, f"{ttft:.0f}, {tpot:.1f}"


def _slo_simulated(rate_scale: float, results: Path) -> str:
    """8B with targets, in every setting that was simulated, beside what was measured."""
    settings = dict.fromkeys(setting for _, setting in _simulated(results, "8b", "slack", rate_scale))
    columns = [(setting, "slack", setting) for setting in settings]
    return _shares_simulated(
        results, "8b", columns, latest_runs(results, "disagg_gpu_slo.jsonl", rate_scale), rate_scale
    )


def _slo_simulated_mixture(results: Path) -> str:
    """Runs with targets say so in the name of their setting."""
    columns = [
        ("1P1D, no targets", "no limit", "1P1D"), ("1P1D, P reads only", "slack, P reads only", "1P1D"),
        ("1P1D", "slack", "1P1D"), ("2M, no targets", "no limit", "2M"), ("2M", "slack", "2M"),
    ]  # fmt: skip
    runs = latest_runs(results, "disagg_gpu_30b_a3b_fp8.jsonl")
    measured = {
        (name, setting.removesuffix(TARGETS) if setting.endswith(TARGETS) else f"{setting}, no targets"): record
        for (name, setting), record in runs.items()
    }
    return _shares_simulated(results, "30b-a3b-fp8", columns, measured)


def _shares_simulated(
    results: Path,
    shape: str,
    columns: Sequence[tuple[str, str, str]],
    measured: Mapping[tuple[str, str], Record],
    rate_scale: float = 1.0,
) -> str:
    """Shares within 200/10. `columns`: title, rule and setting of each. `measured`: by workload and title."""
    simulated = [_simulated(results, shape, rule, rate_scale) for _, rule, _ in columns]

    def cell(workload: str, at: int) -> str:
        title, _, setting = columns[at]
        figures, run = simulated[at].get((workload, setting)), measured.get((workload, title))
        if figures is None:
            return ""
        ours = f"*{figures['attained']:.2f}*, {figures['ttft'][1]:.0f}, {figures['tpot'][2]:.1f}"
        if run is None:
            return ours
        told, spreads = run["summary"]["attained"]["200/10"], run["summary"]["spreads"]
        return f"{ours}; **{told:.2f}**, {spreads['ttft']['p90_ms']:.0f}, {spreads['tpot']['p99_ms']:.1f}"

    rows = [
        [preset.times(rate_scale).title, *cells]
        for name, preset in PRESETS.items()
        if any(cells := [cell(name, at) for at in range(len(columns))])
    ]
    head = "*simulated*: share within 200/10, TTFT p90, TPOT p99; **measured**: the same"
    return _markdown([head, *(title for title, _, _ in columns)], rows) if rows else ""


def _planned(shape: str, measured_file: str, results: Path) -> str:
    """Runs with targets beside what the planner says of them, and what the simulation before it said."""
    runs = latest_runs(results, measured_file)
    files = ("slo_simulated.jsonl", "slo_before_planner.jsonl")  # the latter has no row of Mooncake
    older, newer = (_simulated(results, shape, "slack", 1.0, file) for file in files)
    before = older | newer
    planned = _simulated(results, shape, "slack", 1.0, "slo_planned.jsonl")
    mended = _simulated(results, shape, "slack", 1.0, "slo_mended.jsonl")

    def told(figures: Record) -> str:
        shares = [*figures["by_draw"], *figures.get("by_steps", ())]
        span = f" ({min(shares):.2f} to {max(shares):.2f})" if "by_steps" in figures else ""
        return f"{figures['attained']:.2f}{span}, {figures['ttft'][1]:.0f}, {figures['tpot'][2]:.1f}"

    rows = []
    for (workload, setting), figures in planned.items():
        run = runs.get((workload, setting + TARGETS)) or runs.get((workload, setting))
        if run is None:
            continue
        spreads = run["summary"]["spreads"]
        seen = f"{run['summary']['attained']['200/10']:.2f}, {spreads['ttft']['p90_ms']:.0f}"
        rows.append(
            [PRESETS[workload].title, setting, f"**{seen}, {spreads['tpot']['p99_ms']:.1f}**",
             told(before[workload, setting]), told(figures),
             *([told(mended[workload, setting])] if mended else [])]
        )  # fmt: skip
    head = ["share within 200/10, TTFT p90, TPOT p99", "", "**measured**", "simulated before", "planned"]
    head += ["mended"] * bool(mended)
    return _markdown(head, rows) if rows else ""


def _simulated(
    results: Path, shape: str, rule: str, rate_scale: float, file: str = "slo_simulated.jsonl"
) -> dict[tuple[str, str], Record]:
    """Figures at 200/10, by workload and setting. The last record of each counts."""
    return {
        (record["workload"], record["setting"]): record["figures"]
        for record in _records(results, file)
        if (record["slo"], record["rule"], record["rate_scale"]) == ("200/10", rule, rate_scale)
        and record.get("shape", "8b") == shape
        and record["num_requests"] == PRESETS[record["workload"]].times(rate_scale).num_requests
    }


def _handover(results: Path) -> str:
    latest = {(record["tokens"], record["batch"]): record for record in _records(results, "handover_gpu.jsonl")}
    rows = []
    for (tokens, batch), record in sorted(latest.items()):
        phases, spreads = record["summary"]["phases"], record["summary"]["spreads"]
        told = [phases.get(step) for step in HANDOVER_STEPS]
        told += [spreads.get("handover"), spreads.get("join"), spreads.get("itl")]
        cells = ["" if found is None else f"{found['p50_ms']:.2f} / {found['p90_ms']:.2f}" for found in told]
        rows.append([f"{tokens} tokens, {batch} decoding, {_when(record)}", *cells])
    headers = ["p50 / p90, ms", *HANDOVER_STEPS, "together", "then to its first step's end", "a step"]
    return _HANDOVER_INTRO + _markdown(headers, rows) if rows else ""


def _when(record: Record) -> str:
    found = record["environment"]
    return f"{found['commit'][:7]}{' with changes' * bool(found['dirty'])}"


_TABLES: dict[str, Callable[[Path], str]] = {
    "engine-cpu": _engine_cpu,
    "engine-gpu": partial(_engine_gpu, "8b"),
    "engine-gpu-8b-tp2": partial(_engine_gpu, "8b", num_ranks=2),
    "engine-gpu-30b-a3b-tp2": partial(_engine_gpu, "30b-a3b", num_ranks=2),
    "reduce-gpu": partial(_sums_over_ranks, 2),
    "engine-gpu-30b-a3b": partial(_engine_gpu, "30b-a3b"),
    "engine-gpu-30b-a3b-fp8": partial(_engine_gpu, "30b-a3b-fp8"),
    "engine-gpu-8b-draws": _draws,
    "engine-gpu-8b-fp8": partial(_engine_gpu, "8b-fp8"),
    "engine-gpu-70b-fp8": partial(_engine_gpu, "70b-fp8"),
    "disagg": _disagg,
    "disagg-30b-a3b": partial(_disagg_without_peer, "disagg_gpu_30b_a3b.jsonl"),
    "disagg-30b-a3b-fp8": partial(_disagg_without_peer, "disagg_gpu_30b_a3b_fp8.jsonl"),
    "disagg-slo": partial(_disagg_without_peer, "disagg_gpu_slo.jsonl"),
    "disagg-runs": _runs,
    "slo-simulated": partial(_slo_simulated, 1.0),
    "slo-simulated-4": partial(_slo_simulated, 2.0),
    "slo-simulated-30b-a3b-fp8": _slo_simulated_mixture,
    "planned-8b": partial(_planned, "8b", "disagg_gpu_slo.jsonl"),
    "planned-30b-a3b-fp8": partial(_planned, "30b-a3b-fp8", "disagg_gpu_30b_a3b_fp8.jsonl"),
    "handover": _handover,
}
