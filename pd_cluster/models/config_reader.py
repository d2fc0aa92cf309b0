"""Reads the settings of a parsed `config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pd_cluster.errors import StartupError, UnservedModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FLOAT32_MAX = 3.4e38


class ConfigReader:
    """Fields of one config, with errors that name file and field."""

    def __init__(self, directory: Path, config: Mapping[str, Any], field: str = "") -> None:
        """`field`: the object of the config that has the fields."""
        self._directory, self.file = directory, directory / "config.json"
        self._config = config
        self._prefix = field and f"{field}."

    def is_null(self, name: str) -> bool:
        """Whether the field is there as null, where that means something else than its absence."""
        return name in self._config and self._config[name] is None

    def optional(self, name: str, default: Any) -> Any:
        value = self._config.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.optional(name, default)
        value = int(value) if isinstance(value, float) and value.is_integer() else value  # 32768.0 is one, too
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise StartupError(f"{self.file}: {self._prefix}{name} must be {kind}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None, least: float = 0.0) -> float:
        """A number above 0 and of at least `least` that float32 holds."""
        value = self.optional(name, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < FLOAT32_MAX or value < least:
            kind = f"a number of at least {least:g}" if least else "a positive number"
            raise StartupError(f"{self.file}: {self._prefix}{name} must be {kind}, not {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self._config.get(name, default)
        if not isinstance(value, bool):
            raise StartupError(f"{self.file}: {self._prefix}{name} must be true or false, not {value!r}")
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object, empty if there is none."""
        value = self.optional(name, {})
        if not isinstance(value, dict):
            raise StartupError(f"{self.file}: {self._prefix}{name} must be an object, not {value!r}")
        return value

    def within(self, field: str, settings: Mapping[str, Any]) -> ConfigReader:
        """The reader of the `settings` of an object of the config."""
        return ConfigReader(self._directory, settings, field)

    def window(self, default: int) -> int:
        """`sliding_window`: null means none. `default`: without the setting."""
        none = "sliding_window" in self._config and not self._config["sliding_window"]
        return 0 if none else self.integer("sliding_window", default, 0)

    def refuse(self, name: str, condition: bool, why: str) -> None:
        if condition:
            raise UnservedModel(f"{self.file}: {name} = {self._config.get(name)!r} cannot be served: {why}")
