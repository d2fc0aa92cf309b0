"""What `pd-cluster plan` prints, writes and plots."""

from __future__ import annotations

import json
from dataclasses import asdict
from operator import attrgetter
from statistics import mean
from typing import TYPE_CHECKING

import msgspec
from rich.table import Table

import pd_cluster
from pd_cluster.bench.plot import BLUE, GREY, ORANGE, RED
from pd_cluster.bench.report import report_console
from pd_cluster.errors import StartupError
from pd_cluster.planning.delays import MEASURED

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.planning.search import Judged, Sought

NOT_SIMULATED = (
    "Not simulated: equal prompts (prefix caches, tiers), drafts, links that are busy, failures. Handover and HTTP "
    "take what they took on one host (pd_cluster/planning/delays.py)."
)


def steps_line(sought: Sought, card: str, model: str) -> str:
    """Where the steps are from, and in what the table differs from what is planned."""
    table = next(iter(sought.tables.values()))
    others = []
    if card and card != table.card:
        others.append(f"ANOTHER CARD than {card}")
    if (version := table.versions.get("pd_cluster", "no release")) != pd_cluster.__version__:
        others.append(f"another version ({version}) than {pd_cluster.__version__}")
    if not table.model.fingerprint:
        others.append(f"the shape of {model or table.model.name} with random weights")
    told = f"; of {', and '.join(others)}" if others else ""
    ranks = "/".join(map(str, sorted(sought.tables)))
    return f"Steps: {table.model.name} on {table.card}, TP {ranks}, {table.source}{told}."


def limit_of(judged: Judged, sought: Sought) -> str:
    """What would have to be more for a higher attainment."""
    figures = judged.figures
    if figures.num_short:
        return f"KV room ({figures.num_short} waits)"
    first, later = figures.late
    near = (figures.ttft_ms[2] / (sought.ttft_ms or 1e12), figures.tpot_ms[2] / (sought.tpot_ms or 1e12))
    return "reading prompts" if (first, near[0]) > (later, near[1]) else "steps of streams"


def verdict(judged: list[Judged]) -> list[str]:
    """How far apart the best are, and whether pairs or replicas are better."""
    best, lines = judged[0], list[str]()
    alike = [one for one in judged[1:] if one.high >= best.low]
    moved = max(best.high - best.low, *(one.high - one.low for one in judged))
    if alike:
        names = ", ".join(one.setting.name for one in alike)
        gap = max(best.figures.attained - one.figures.attained for one in alike)
        lines.append(
            f"{best.setting.name} and {names} are one answer: {max(0.0, gap):.3f} apart at most, and other draws and "
            f"steps 5% shorter or longer change up to {moved:.3f}."
        )
    else:
        gap = best.figures.attained - judged[1].figures.attained if len(judged) > 1 else 1.0
        lines.append(f"{best.setting.name} is the best by {gap:.3f}; draws and steps 5% off change up to {moved:.3f}.")
    replicas = next((one for one in judged if one.setting.is_replicas), None)
    pair = next((one for one in judged if not one.setting.is_replicas), None)
    if replicas and pair:
        first, second = (replicas, pair) if judged.index(replicas) < judged.index(pair) else (pair, replicas)
        what = "Replicas win" if first is replicas else "Prefill/decode pays"
        if second.high >= first.low:
            what = "Prefill/decode makes no difference that this plan can tell"
        lines.append(
            f"{what}: {first.setting.name} {first.figures.attained:.3f}, {second.setting.name} "
            f"{second.figures.attained:.3f}."
        )
    if best.untargeted > best.high:
        lines.append(f"Without targets as flags of the nodes it would be {best.untargeted:.3f}: leave them out.")
    return lines


def commands(judged: Judged, sought: Sought, model: str) -> dict[str, str]:
    """What starts this setting: `up`, values of the chart, a spec for Ray."""
    roles, ranks = judged.setting
    slo = {name: ms for name, ms in (("ttft", sought.ttft_ms), ("tpot", sought.tpot_ms)) if ms}
    kinds = [*zip(roles._fields, roles, ranks, ("--prefill-tp", "--decode-tp", "--tp"), strict=True)]
    up = f"pd-cluster up --model {model}" + "".join(
        f" --{kind} {number}" + f" {flag} {each}" * (each > 1) for kind, number, each, flag in kinds
    ) + "".join(f" --slo-{name}-ms {ms:g}" for name, ms in slo.items())  # fmt: skip
    values = {
        "model": {"id": model},
        "slo": {f"{name}Ms": ms for name, ms in slo.items()},
        "roles": {
            kind: {"kind": kind, "replicas": number, "gpus": {"count": each}} if number else None
            for kind, number, each, _ in kinds if number or kind != "mixed"
        },
    }  # fmt: skip
    spec = {
        "flags": {"model": model, **{f"slo-{name}-ms": ms for name, ms in slo.items()}},
        **{kind: {"count": number, "gpus": each} for kind, number, each, _ in kinds if number},
    }
    return {"up": up, "helm": json.dumps(values), "ray": json.dumps(spec)}


def print_plan(sought: Sought, judged: list[Judged], enough: float, card: str, model: str) -> None:
    console = report_console()
    targets = f"TTFT {sought.ttft_ms}, TPOT {sought.tpot_ms} ms"
    title = f"{len(sought.arrivals):,} requests, {sought.rate:.2f}/s; targets {targets}"
    table = Table("setting", "attained", "low to high", "TTFT p50/90/99", "TPOT", "good/s/GPU", "limit", title=title)
    for one in judged:
        figures = one.figures
        spreads = ("/".join(f"{value:.1f}" for value in each) for each in (figures.ttft_ms, figures.tpot_ms))
        table.add_row(
            one.setting.name, f"{figures.attained:.3f}", f"{one.low:.2f} to {one.high:.2f}", *spreads,
            f"{one.goodput(sought.rate):.2f}", limit_of(one, sought),
        )  # fmt: skip
    console.print(steps_line(sought, card, model), soft_wrap=True)
    console.print(table)
    lines = verdict(judged)
    best = judged[0]
    if best.figures.attained < enough:
        lines.append(f"NOT ENOUGH: {best.figures.attained:.3f} of {enough:g} that --attainment asks for.")
    for one in judged:
        if one.by_rate:
            rates = [rate for rate, share in one.by_rate.items() if share >= enough]
            told = f"{max(rates):.2f} requests/s" if rates else "none of the simulated rates"
            lines.append(f"{one.setting.name} meets {enough:g} up to {told}.")
    named = commands(best, sought, model or "MODEL")
    lines += [
        NOT_SIMULATED,
        f"Start it: {named['up']}",
        f"  Helm values: {named['helm']}",
        f"  Ray spec: {named['ray']}",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def write_plan(path: Path, sought: Sought, judged: list[Judged], num_settings: int) -> None:
    """Raises StartupError."""
    tables = {ranks: {**msgspec.to_builtins(one), "points": len(one.points)} for ranks, one in sought.tables.items()}
    lengths = (("prompt_tokens", attrgetter("num_input")), ("answer_tokens", attrgetter("num_output")))
    load = {name: mean(map(length, sought.arrivals)) for name, length in lengths}
    record = {
        "kind": "plan", "load": load, "handover_ms": 1e3 * MEASURED.link_s,
        "num_requests": len(sought.arrivals), "rate": sought.rate, "ttft_ms": sought.ttft_ms,
        "tpot_ms": sought.tpot_ms, "seed": sought.seed, "num_settings": num_settings, "tables": tables,
        "settings": [
            {"name": one.setting.name, "num_gpus": one.setting.num_gpus, "limit": limit_of(one, sought), **asdict(one),
             "start": commands(one, sought, next(iter(sought.tables.values())).model.name)}
            for one in judged
        ],
        "verdict": verdict(judged),
    }  # fmt: skip
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--json {path} cannot be written: {error.strerror}") from error


def plot_rates(path: Path, judged: list[Judged], enough: float) -> None:
    """Attainment over rate. Raises StartupError."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.4), layout="constrained")
    try:
        for one, color in zip((one for one in judged if one.by_rate), (BLUE, ORANGE, RED, GREY), strict=False):
            assert one.by_rate is not None
            axes.plot(list(one.by_rate), list(one.by_rate.values()), "o-", color=color, label=one.setting.name)
        axes.axhline(enough, color=GREY, linewidth=0.8)
        axes.set(xlabel="requests a second", ylabel="share within the targets", ylim=(0, 1.02))
        axes.legend()
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise StartupError(f"--plot {path} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
