"""Command-line flags from the configuration's dataclasses, and back.

A flag's absence is kept apart from its default: `up` forwards only what the user gave, and an environment variable
(`env` in the field's metadata) counts only when the flag is absent.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from pd_cluster.config import NodeConfig
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

MAX_PORT = 65535
_TYPES: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


def add_config_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """One flag per field of NodeConfig's sections, in a group per section. `skip`: field names without a flag."""
    for section, kind in NodeConfig.sections().items():
        group = parser.add_argument_group(section, _first_line(kind))
        types = get_type_hints(kind)
        for item in fields(kind):
            if item.name not in skip:
                _add_flag(group, item, types[item.name])


def config_from(namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ, **overrides: Any) -> NodeConfig:
    """The configuration that the parsed flags name. `overrides` (by field name) win over flags.

    Raises StartupError when a value of the environment is of the wrong type or values contradict each other.
    """
    given = {**vars(namespace), **overrides}
    sections: dict[str, Any] = {}
    for section, kind in NodeConfig.sections().items():
        types = get_type_hints(kind)
        values: dict[str, Any] = {}
        for item in fields(kind):
            env = item.metadata.get("env", "")
            if item.name in given:
                value = given[item.name]
                values[item.name] = tuple(value) if isinstance(value, list) else value
            elif env and environ.get(env):
                values[item.name] = _from_environment(env, environ[env], item, types[item.name])
        sections[section] = kind(**values)
    return NodeConfig(**sections)


def given_flags(namespace: argparse.Namespace, skip: Collection[str] = ()) -> list[str]:
    """The configuration flags that were given, as arguments again. `skip`: field names to leave out."""
    given = vars(namespace)
    arguments: list[str] = []
    for kind in NodeConfig.sections().values():
        for item in fields(kind):
            if item.name not in given or item.name in skip:
                continue
            value, flag = given[item.name], flag_of(item)
            if isinstance(value, bool):
                arguments.append(f"--{flag}" if value else f"--no-{flag}")
            elif isinstance(value, list):
                arguments += [f"--{flag}={part}" for part in value]
            else:
                arguments.append(f"--{flag}={value}")
    return arguments


def flag_of(item: Field[Any]) -> str:
    """The flag's name without dashes in front."""
    return str(item.metadata.get("flag", item.name)).replace("_", "-")


def port_number(text: str) -> int:
    """argparse type: a TCP port, 0 for any free one."""
    number = int(text)
    if not 0 <= number <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{number} is no port: write 0 to {MAX_PORT} (0: any free one)")
    return number


def _add_flag(group: argparse._ArgumentGroup, item: Field[Any], kind: type) -> None:
    name, text = f"--{flag_of(item)}", item.metadata["help"]
    if env := item.metadata.get("env"):
        text = f"{text} [${env}]"
    if item.default not in ("", 0, 0.0, ()) or isinstance(item.default, bool):
        shown = item.default if not isinstance(item.default, bool) else ("on" if item.default else "off")
        text = f"{text} (default: {shown})"
    text = text.replace("%", "%%")
    if kind is bool:
        group.add_argument(
            name, dest=item.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
        )
        return
    if get_origin(kind) is tuple:  # of texts: the flag may be repeated
        group.add_argument(
            name, dest=item.name, action="append", metavar=_TYPES[str], default=argparse.SUPPRESS, help=text
        )
        return
    group.add_argument(
        name,
        dest=item.name,
        type=kind,
        choices=item.metadata.get("choices"),
        metavar=None if item.metadata.get("choices") else _TYPES[kind],
        default=argparse.SUPPRESS,
        help=text,
    )


def _from_environment(env: str, text: str, item: Field[Any], kind: type) -> Any:
    try:
        value = text.lower() in ("1", "true", "yes", "on") if kind is bool else kind(text)
    except ValueError as error:
        raise StartupError(f"${env} must be {kind.__name__}, not {text!r}") from error
    choices = item.metadata.get("choices")
    if choices and value not in choices:
        raise StartupError(f"${env} must be one of {', '.join(choices)}, not {text!r}")
    return value


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().splitlines()[0]
