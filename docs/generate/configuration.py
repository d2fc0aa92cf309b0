"""The tables of `docs/configuration.md`, from the parsers of the command line."""

from __future__ import annotations

import argparse
import re
from dataclasses import field, fields, make_dataclass
from textwrap import fill
from typing import TYPE_CHECKING, get_type_hints

from docs.generate.document import code, table
from pd_cluster.config import NodeConfig
from pd_cluster.launch.cli import build_parser
from pd_cluster.launch.up_flags import PER_NODE
from pd_http.settings import add_flags
from pd_router.config import RouterConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCUMENT = "docs/configuration.md"
_DEFAULT = re.compile(r"\s*\(default: (?P<value>[^()]*)\)(?P<end>\.?)$")
_NODE_SECTIONS = {
    "model": "Which model, and how it is held",
    "cache": "The paged KV cache",
    "scheduler": "What one step may hold",
    "handoff": "How KV moves between nodes",
    "server": "The node's HTTP side",
    "http": "Bounds on HTTP clients",
}


def parsers(
    parser: argparse.ArgumentParser | None = None, name: str = ""
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command that runs something, by its words after `pd-cluster`."""
    parser = parser or build_parser()
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        shown = {choice.dest for choice in action._choices_actions}
        for word, child in action.choices.items():
            if word in shown:
                yield from parsers(child, f"{name} {word}".strip())


def node_flags() -> set[str]:
    """The flags that every node has."""
    prefill = dict(parsers())["prefill"]
    return {flag for action in prefill._actions for flag in action.option_strings}


def _rows(actions: list[argparse.Action]) -> Iterator[list[str]]:
    for action in actions:
        if isinstance(action, argparse._HelpAction) or action.help is argparse.SUPPRESS:
            continue
        text = (action.help or "") % {"default": action.default, "prog": "pd-cluster"}
        default = ""
        if match := _DEFAULT.search(text):
            default, text = match["value"], text[: match.start()]
            text += "" if text.endswith(".") else "."
        if action.choices:
            text += f" One of: {', '.join(map(str, action.choices))}."
        yield [_usage(action), code(default), text.replace("<", "&lt;").replace("*", "\\*")]


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        return code(str(action.metavar or action.dest))
    if isinstance(action, argparse.BooleanOptionalAction):
        return " ".join(map(code, action.option_strings))
    if action.nargs == 0 or action.choices:
        return code(action.option_strings[0])
    return code(f"{action.option_strings[0]} {action.metavar or action.dest.upper()}")


def _table(actions: list[argparse.Action]) -> str:
    rows = list(_rows(actions))
    return table(["flag", "default", "meaning"], rows) if rows else ""


def _nodes() -> str:
    """The flags of `prefill`, `decode` and `mixed`, which are the same, by section."""
    groups = {group.title: group._group_actions for group in dict(parsers())["prefill"]._action_groups}
    return "\n".join(f"### {title}\n\n{_table(groups[name])}" for name, title in _NODE_SECTIONS.items())


def _up() -> str:
    (cluster,) = [group for group in dict(parsers())["up"]._action_groups if group.title == "cluster"]
    flags = ", ".join(code(f"--{name.replace('_', '-')}") for name in sorted(PER_NODE))
    decided = fill(flags, 119, break_on_hyphens=False)
    told = "`up` decides these flags of a node by itself, or leaves them out"
    return f"{_table(cluster._group_actions)}\n{told}:\n{decided}."


def _check() -> str:
    parser = dict(parsers())["check"]
    own = [action for action in parser._actions if action.dest in ("ports", "skip_model")]
    others = sorted(node_flags() - {flag for action in parser._actions for flag in action.option_strings})
    without = f", except {', '.join(map(code, others))}" if others else ""
    return f"{parser.description}\n\n{_table(own)}\nIt takes a node's flags besides{without}."


def _step_table() -> str:
    parser = dict(parsers())["step-table"]
    own = [action for action in parser._actions if action.dest == "out"]
    return f"{parser.description}\n\n{_table(own)}\nIt takes a node's flags of model, cache and steps besides."


def _of(*names: str) -> Callable[[], str]:
    """The flags of these commands, with a heading for each if there are several."""

    def make() -> str:
        known = dict(parsers())
        texts = []
        for name in names:
            heading = f"### pd-cluster {name}\n\n" if len(names) > 1 else ""
            texts.append(f"{heading}{known[name].description}\n\n{_table(known[name]._actions)}")
        return "\n".join(texts)

    return make


def _rare() -> str:
    """The flags that `--help` leaves out."""
    texts = []
    for title, kinds in (("nodes", NodeConfig.sections().values()), ("routers", [RouterConfig])):
        parser = argparse.ArgumentParser(add_help=False)
        for kind in kinds:
            types, hidden = get_type_hints(kind), [item for item in fields(kind) if item.metadata.get("hidden")]
            shown = [field(default=one.default, metadata={**one.metadata, "hidden": False}) for one in hidden]
            parts = [(old.name, types[old.name], new) for old, new in zip(hidden, shown, strict=True)]
            add_flags(parser, make_dataclass(kind.__name__, parts))
        texts.append(f"### Of {title}\n\n{_table(parser._actions)}")
    return "\n".join(texts)


COMMANDS: dict[str, tuple[str, ...]] = {
    "router": ("router",),
    "epp": ("epp",),
    "nodes": (
        "nodes list",
        "nodes add",
        "nodes remove",
        "nodes drain",
        "nodes undrain",
        "nodes role",
        "nodes reset-cache",
        "nodes start-profile",
        "nodes stop-profile",
        "nodes load-adapter",
        "nodes unload-adapter",
    ),
    "balance": ("balance",),
    "keys": ("keys new",),
    "pool": ("pool",),
    "ray": ("ray up", "ray status", "ray scale", "ray down"),
    "bench": ("bench serve",),
    "plan": ("plan",),
}
PARTS: dict[str, Callable[[], str]] = {
    "up": _up,
    "node-flags": _nodes,
    "check": _check,
    "rare-flags": _rare,
    "step-table": _step_table,
}
PARTS |= {name: _of(*commands) for name, commands in COMMANDS.items()}
