"""`pd-cluster plan --check URL`: what a running cluster does beside what its plan expected, term by term.

Routers and nodes are asked twice, and what their counters have grown by is compared. Each worker of a router counts for
itself, so none may be missing or begin anew between the two. Nodes count the requests of all routers.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import chain
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from pd_cluster.bench.report import report_console
from pd_cluster.errors import StartupError
from pd_cluster.planning.role_counts import RoleCounts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Awaitable, Callable, Iterable, Sequence

ASK_S = 10.0  # for an answer of a router or node
LEAST_REQUESTS = 100  # that must have been answered between the two looks
APART = 0.1  # of what was planned, or SIGMAS of what so few requests scatter
SIGMAS = 3
NOT_KNOWN = "Not known: bursts, lengths beyond their means, what part of a step was prompts, waits for KV memory."
LOAD_TERMS = ("requests/s", "prompt tokens", "answer tokens", "prefix hits")
STEPS, ANSWERS, HANDOVER = ("steps", "step_tokens", "step_seconds"), "generation_tokens_total", "handover_step_seconds"
Growth: TypeAlias = "dict[tuple[str, tuple[tuple[str, str], ...]], float]"  # by name and labels


class CheckedTerm(NamedTuple):
    """One figure. None: not planned, or not known."""

    name: str
    planned: float | None
    seen: float | None
    is_share: bool = False

    @property
    def apart(self) -> float | None:
        if self.planned is None or self.seen is None:
            return None
        return self.seen - self.planned if self.is_share or not self.planned else self.seen / self.planned - 1


def growth(before: str, after: str) -> Growth:
    """Of two expositions of metrics. Raises ValueError when one is none, or when what it counts began anew."""
    first, last = (
        {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}
        for families in map(text_string_to_metric_families, (before, after))
    )
    if not first:
        raise ValueError("tells no metrics")
    workers = [{dict(labels).get("worker") for _, labels in one} for one in (first, last)]
    if workers[0] != workers[1]:
        raise ValueError("has workers of which one told nothing: check again")
    if any(last.get(key, -1.0) < value for key, value in first.items() if key[0].endswith(("_total", "_count"))):
        raise ValueError("was started again between the two looks: check again")
    return {key: value - first.get(key, 0.0) for key, value in last.items()}


def total(growths: Iterable[Growth], name: str, **labels: str) -> float:
    """Over all other labels."""
    pairs = (pair for one in growths for pair in one.items())
    return sum(value for (known, own), value in pairs if known == name and labels.items() <= dict(own).items())


class ClusterLook(NamedTuple):
    """What all routers and nodes told at one moment. A node without an answer has told nothing."""

    at_s: float
    nodes: list[dict[str, Any]]
    routers: list[str]
    told: dict[str, str]  # by the nodes' URLs


@dataclass(slots=True)
class SeenCluster:
    """Of the time between two looks."""

    seconds: float
    num: float  # answered requests
    setting: list[list[int]]  # numbers of nodes, and their ranks, by role
    routers: list[Growth]
    nodes: dict[str, list[Growth]] = field(default_factory=dict)  # by role
    notes: list[str] = field(default_factory=list)

    def router(self, name: str, **labels: str) -> float:
        return total(self.routers, f"pd_router_{name}", **labels)

    def node(self, name: str, **labels: str) -> float:
        return total(chain(*self.nodes.values()), f"pd_{name}", **labels)


def run_plan_check(namespace: argparse.Namespace) -> int:
    """Returns 0, or 1 when the cluster parts from its plan. Raises StartupError."""
    plan = _read_plan(Path(namespace.json))
    if not namespace.minutes > 0:
        raise StartupError(f"--minutes {namespace.minutes:g} is not above 0")

    async def checked() -> SeenCluster:
        async with httpx.AsyncClient(trust_env=False, timeout=ASK_S) as client:
            return await watch(client, namespace.check, lambda: asyncio.sleep(60 * namespace.minutes))

    seen = asyncio.run(checked())
    terms = compare(plan, seen)
    parting = [one for one in terms if one.apart is not None and abs(one.apart) > allowed_of(seen.num)]
    title = f"{seen.seconds:.0f} s; nothing is apart within {allowed_of(seen.num):.0%}"
    table = Table("term", "planned", "seen", "apart", title=title)
    for one in terms:
        figures = ("not known" if value is None else f"{value:.4g}" for value in (one.planned, one.seen))
        table.add_row(one.name, *figures, "" if one.apart is None else f"{one.apart:+.1%}")
    console = report_console()
    console.print(table)
    for line in (*seen.notes, verdict_of(parting), NOT_KNOWN):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    return 1 if parting else 0


def verdict_of(parting: Sequence[CheckedTerm]) -> str:
    """Steps follow from the load, so that comes first."""
    names = [one.name for one in parting]
    if loads := [name for name in names if name in LOAD_TERMS]:
        return f"The load is another one than planned: {', '.join(loads)}. Steps follow from it: plan again with it."
    return f"The load is as planned; it parts in: {', '.join(names)}." if names else "It does what the plan expected."


async def watch(
    client: httpx.AsyncClient, urls: Sequence[str], wait: Callable[[], Awaitable[object]],
    clock: Callable[[], float] = time.monotonic,
) -> SeenCluster:  # fmt: skip
    """Look, wait, look again. Raises StartupError."""
    first = await _look(client, urls, clock())
    await wait()
    last = await _look(client, urls, clock())
    try:
        routers = [growth(*pair) for pair in zip(first.routers, last.routers, strict=True)]
    except ValueError as error:
        raise StartupError(f"the router at {', '.join(urls)} {error}") from error
    used = [node for node in last.nodes if node["state"] == "active" and node["healthy"]]
    ranks = {role: max((n["tp"] or 1 for n in used if n["role"] == role), default=1) for role in RoleCounts._fields}
    numbers = [sum(node["role"] == role for node in used) for role in RoleCounts._fields]
    num = total(routers, "pd_router_requests_total", outcome="ok")
    seen = SeenCluster(last.at_s - first.at_s, num, [numbers, list(ranks.values())], routers)
    roles = {node["url"]: node["role"] for node in first.nodes}
    for node in used:
        url, role = node["url"], node["role"]
        try:
            if role != roles.get(url) or url not in first.told.keys() & last.told.keys():
                raise ValueError("changed its role, or gives no metrics")
            seen.nodes[role] = [*seen.nodes.get(role, ()), growth(first.told[url], last.told[url])]
        except ValueError as error:
            seen.notes.append(f"Steps of {node['node_id']} are not known: it {error}.")
    told, given = seen.router(ANSWERS), seen.node(ANSWERS)
    if num < LEAST_REQUESTS:
        raise StartupError(
            f"{num:.0f} requests were answered in {seen.seconds:.0f} s: a check needs {LEAST_REQUESTS}: more --minutes"
        )
    if given > (1 + allowed_of(num)) * told:
        seen.notes.append(
            f"Nodes gave {given:.0f} tokens and these routers {told:.0f}: others send to these nodes, and "
            "their steps are of all requests. Name each router with --check."
        )
    return seen


def compare(plan: dict[str, Any], seen: SeenCluster) -> list[CheckedTerm]:
    num, prompt_tokens = seen.num, seen.router("prompt_tokens_total")
    came = seen.router("requests_total") + seen.router("requests_in_flight")
    load = plan["load"]
    hits = _by(seen.router("cached_tokens_total"), prompt_tokens)
    seen_load = (came / seen.seconds, prompt_tokens / num, seen.router(ANSWERS) / num, hits)
    planned_load = (plan["rate"], load["prompt_tokens"], load["answer_tokens"], 0.0)  # no equal prompts are simulated
    rows = zip(LOAD_TERMS, planned_load, seen_load, strict=True)
    terms = [CheckedTerm(*row, is_share=row[0] == "prefix hits") for row in rows]
    planned = next((one for one in plan["settings"] if one["setting"] == seen.setting), None)
    if planned is None:
        names = ", ".join(one["name"] for one in plan["settings"])
        seen.notes.append(
            f"The plan has no figures of {RoleCounts(*seen.setting[0]).name} with such ranks (it has {names}): "
            "steps and targets are not compared."
        )
    figures = planned["figures"] if planned else {"steps": {}, "attained": None}
    for role, growths in seen.nodes.items():
        told = figures["steps"].get(role, [0, 0, 0.0])
        own = [total(growths, f"pd_engine_{name}_total") for name in STEPS]
        for at, what, scale in ((2, "ms", 1e3), (1, "tokens", 1)):
            figure = _by(scale * told[at], told[0]), _by(scale * own[at], own[0])
            terms.append(CheckedTerm(f"{role}: {what} of a step", *figure))
    if seen.setting[0][0]:
        num, taken_s = seen.node(f"{HANDOVER}_count", step="announce"), seen.node(f"{HANDOVER}_sum")
        terms.append(CheckedTerm("ms of a handover", plan["handover_ms"], _by(1e3 * taken_s, num)))
    within = _by(seen.router("slo_requests_total", result="met"), seen.router("slo_requests_total"))
    return [*terms, CheckedTerm("within the router's targets", figures["attained"], within, is_share=True)]


async def _look(client: httpx.AsyncClient, urls: Sequence[str], at_s: float) -> ClusterLook:
    """Raises StartupError."""
    nodes: list[dict[str, Any]] = []
    try:
        routers = list(await asyncio.gather(*(_text(client, f"{url.rstrip('/')}/metrics") for url in urls)))
        nodes = json.loads(await _text(client, f"{urls[0].rstrip('/')}/nodes"))["nodes"]
        found = await asyncio.gather(
            *(_text(client, f"{node['url']}/metrics") for node in nodes), return_exceptions=True
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise StartupError(f"--check {', '.join(urls)} gives no answer: {error or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StartupError(f"--check {', '.join(urls)} is not a router of this release") from error
    told = {node["url"]: text for node, text in zip(nodes, found, strict=True) if isinstance(text, str)}
    return ClusterLook(at_s, nodes, routers, told)


async def _text(client: httpx.AsyncClient, url: str) -> str:
    """Raises ValueError for an answer that is not 200, and httpx's errors."""
    answer = await client.get(url)
    if answer.status_code != 200:
        raise ValueError(f"{url} answers {answer.status_code}")
    return answer.text


def _read_plan(path: Path) -> dict[str, Any]:
    refusal = StartupError(f"--check needs the --json of a plan by this release: {path} is none")
    try:
        plan: dict[str, Any] = json.loads(path.read_bytes())
        is_plan = plan["kind"] == "plan" and "load" in plan
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refusal from error
    if not is_plan:
        raise refusal
    return plan


def allowed_of(num: float) -> float:
    return max(APART, SIGMAS / sqrt(num))


def _by(value: float, num: float) -> float | None:
    return value / num if num else None
