"""Settings as fields of frozen dataclasses, and their command-line flags.

A field's metadata: `help`, and optionally `choices`, `metavar`, `flag` (if it differs from the name), `env` (an
environment variable that counts if the flag is absent), `hidden` (rarely needed: not in `--help`), and for
`number_problems` the bounds `least` (default: 0), `most` (default: LARGEST) and `positive` (default: for timeouts and
intervals). The absence of a flag is kept apart from its default.
"""

from __future__ import annotations

import argparse
import functools
import math
from dataclasses import Field, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pd_http.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from _typeshed import DataclassInstance

MAX_PORT = 65535
LARGEST = (1 << 63) - 1  # of integers in messages between processes
_POSITIVE = ("_timeout_s", "_interval_s")  # suffixes of settings that must be above 0
_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}
Settings = TypeVar("Settings", bound="DataclassInstance")


def setting(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that becomes a flag."""
    return field(default=default, metadata={"help": help, **metadata})


def flag_of(item: Field[Any]) -> str:
    """The flag's name, without leading dashes."""
    return str(item.metadata.get("flag", item.name)).replace("_", "-")


def add_flags(group: argparse._ActionsContainer, kind: type, skip: Collection[str] = ()) -> None:
    """One flag per field of the dataclass `kind`, of type bool, int, float, str or tuple[str, ...].

    `skip`: names of fields without a flag.
    """
    types = _types(kind)
    for item in fields(kind):
        if item.name not in skip:
            options = _options(item, types[item.name])
            group.add_argument(f"--{flag_of(item)}", dest=item.name, default=argparse.SUPPRESS, **options)


def given_values(given: Mapping[str, Any], kind: type, environ: Mapping[str, str]) -> dict[str, Any]:
    """Field name -> value, for the fields of `kind` that are in `given` (of a parsed namespace) or in `environ`.

    Raises StartupError if a value of the environment is of the wrong type.
    """
    types = _types(kind)
    values: dict[str, Any] = {}
    for item in fields(kind):
        env = item.metadata.get("env", "")
        if item.name in given:
            value = given[item.name]
            values[item.name] = tuple(value) if isinstance(value, list) else value
        elif env and environ.get(env):
            values[item.name] = _from_environment(env, environ[env], item, types[item.name])
    return values


def number_problems(settings: Any) -> Iterator[str]:
    """The numbers that are out of their field's bounds, or not finite, by flag. A default is in bounds."""
    return (problem for _, problem in _wrong_numbers(settings))


def in_bounds(settings: Settings) -> Settings:
    """The default in place of each number of which `number_problems` tells, so that no other check tells of it too."""
    return replace(settings, **{item.name: item.default for item, _ in _wrong_numbers(settings)})


def check_numbers(settings: Any) -> None:
    """Raises StartupError with all of `number_problems`."""
    refuse(number_problems(settings))


def refuse(problems: Iterable[str]) -> None:
    """Raise StartupError with all problems, a line each, if there are any."""
    if found := "\n".join(problems):
        raise StartupError(found)


def port_number(text: str) -> int:
    """argparse type: a TCP port, 0 for any free one."""
    try:
        number = int(text)
    except ValueError:
        number = -1
    if not 0 <= number <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port: write 0 to {MAX_PORT} (0: any free one)")
    return number


def _wrong_numbers(settings: Any) -> Iterator[tuple[Field[Any], str]]:
    """The fields, and what is wrong with each."""
    for item in fields(settings):
        value, bounds = getattr(settings, item.name), item.metadata
        if isinstance(value, bool) or not isinstance(value, int | float) or value == item.default:
            continue
        flag, least, most = f"--{flag_of(item)}", bounds.get("least", 0), bounds.get("most", LARGEST)
        if isinstance(value, float) and not math.isfinite(value):
            yield item, f"{flag} {value} is not a finite number"
        elif value <= 0 and (bounds.get("positive") or item.name.endswith(_POSITIVE)):
            yield item, f"{flag} must be above 0, not {value}"
        elif value < least:
            yield item, f"{flag} must be {f'{item.default} or ' * (item.default < least)}at least {least}, not {value}"
        elif value > most:
            yield item, f"{flag} must be at most {most}, not {value}"


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    """Of its fields. They are texts in the class, and reading them anew was a quarter of making the command line."""
    return get_type_hints(kind)


def _options(item: Field[Any], kind: Any) -> dict[str, Any]:
    text = item.metadata["help"]
    if env := item.metadata.get("env"):
        text = f"{text} [${env}]"
    if isinstance(item.default, bool):
        text = f"{text} (default: {'on' if item.default else 'off'})"
    elif item.default:
        text = f"{text} (default: {item.default})"
    text = argparse.SUPPRESS if item.metadata.get("hidden") else text.replace("%", "%%")
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if kind == tuple[str, ...]:
        return {"nargs": "+", "action": "extend", "metavar": item.metadata.get("metavar", _METAVARS[str]), "help": text}
    choices = item.metadata.get("choices")
    return {
        "type": kind,
        "choices": choices,
        "metavar": None if choices else item.metadata.get("metavar", _METAVARS[kind]),
        "help": text,
    }


def _from_environment(env: str, text: str, item: Field[Any], kind: type) -> Any:
    try:
        value = text.lower() in ("1", "true", "yes", "on") if kind is bool else kind(text)
    except ValueError as error:
        raise StartupError(f"${env} must be {kind.__name__}, not {text!r}") from error
    choices = item.metadata.get("choices")
    if choices and value not in choices:
        raise StartupError(f"${env} must be one of {', '.join(choices)}, not {text!r}")
    return value
