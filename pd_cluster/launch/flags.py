"""The node's command-line flags, made from NodeConfig's sections, and back."""

from __future__ import annotations

import os
from dataclasses import fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from pd_cluster.config import NodeConfig
from pd_cluster.errors import StartupError
from pd_http.settings import add_flags, flag_of, given_values, number_problems, refuse

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Mapping


def add_config_flags(parser: argparse.ArgumentParser, skip: Collection[str] = ()) -> None:
    """One flag per field of NodeConfig's sections, in a group per section. `skip`: field names without a flag."""
    for section, kind in NodeConfig.sections().items():
        add_flags(parser.add_argument_group(section, (kind.__doc__ or "").strip().splitlines()[0]), kind, skip)


def config_from(namespace: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> NodeConfig:
    """The configuration that the parsed flags name.

    Raises StartupError if a value of the environment is of the wrong type or values contradict each other. It then
    tells all numbers that are out of bounds, too; else `setting_problems` does.
    """
    given, problems = vars(namespace), list[str]()
    made: dict[str, Any] = {}
    for section, kind in NodeConfig.sections().items():
        try:
            made[section] = kind(**given_values(given, kind, environ))
        except StartupError as error:
            problems.append(str(error))
    if problems:
        refuse(chain(*map(number_problems, made.values()), problems))
    return NodeConfig(**made)


def given_flags(namespace: argparse.Namespace, skip: Collection[str] = (), kinds: Collection[type] = ()) -> list[str]:
    """The configuration flags that were given, as arguments again. `up` forwards only these.

    `skip`: field names. `kinds`: the dataclasses of the flags; (): NodeConfig's sections.
    """
    given = vars(namespace)
    arguments: list[str] = []
    for kind in kinds or NodeConfig.sections().values():
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
