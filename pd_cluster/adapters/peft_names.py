"""PEFT's rules for names of modules: which one has an adapter, of which rank and alpha. Imports no torch.

They are those of `check_target_module_exists` and `get_pattern_key` in PEFT 0.21. The texts are regexes of
others, which may take for ever: all of them together have one deadline. `re` has none, and holds the interpreter, and
with it each stream, while it matches. `regex` knows more than `re`, so than PEFT: recursion, which takes GB in seconds,
and errors that a match may have. Both are refused, and so are long repeats: `a{4000000000}` takes 8 GB to compile, and
`(((a{99}){99}){99}){99}` more than 3.
"""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

import regex

from pd_cluster.adapters.peft_config import ALL_LINEAR, MAX_PATTERNS
from pd_cluster.errors import BadAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pd_cluster.adapters.peft_config import PeftConfig

MOST_COPIED = 100_000  # characters of a pattern with repeats in repeats, each as often as it is repeated
MATCH_DEADLINE_S = 5.0  # of all names of an adapter: 560 modules by 560 patterns take 1 s
_LAYER_LIST = r".*?\.[^.]*"  # up to the first list of layers, where the config names none
_REPEAT = re.compile(r"\{(\d{0,2}|100)(,(\d{0,2}|100))?\}")
_PLAIN = re.compile(r"\^?[A-Za-z0-9_.]+")
_Value = TypeVar("_Value")


@lru_cache(maxsize=MAX_PATTERNS)
def _word(pattern: str) -> str:
    """The word with which names end that a plain pattern matches; "": the pattern is not plain, or has none.

    A match takes 6 us, this 0.1: ranks of each of 560 modules are 313,600 looks.
    """
    return pattern.rpartition(".")[2].removeprefix("^") if _PLAIN.fullmatch(pattern) else ""


class PeftNames:
    """The rules of one adapter. `file`: for messages. The deadline begins when it is made."""

    def __init__(self, config: PeftConfig, file: Path) -> None:
        self._config, self._file, self._end_s = config, file, time.monotonic() + MATCH_DEADLINE_S
        self._compiled: dict[str, Any] = {}  # the cache of `regex` has 500

    def is_target(self, name: str) -> bool:
        """Whether PEFT puts an adapter at the module `name` of the model that was trained, if it is a Linear."""
        config = self._config
        targets, layers = config.target_modules, config.layers_to_transform
        if self._is_named(config.exclude_modules, name):
            return False
        if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
            return True
        if not self._is_named(targets, name):
            return False
        return layers == [] or name in targets or self._layer(name) in ([layers] if isinstance(layers, int) else layers)

    def rank(self, name: str) -> int:
        """Of the module's A and B."""
        return self._of_pattern(self._config.rank_pattern, name, self._config.r)

    def scale(self, name: str) -> float:
        """The factor on the module's B A x."""
        rank, alpha = self.rank(name), self._of_pattern(self._config.alpha_pattern, name, self._config.lora_alpha)
        return alpha / (math.sqrt(rank) if self._config.use_rslora else rank)

    def _is_named(self, names: str | frozenset[str], name: str) -> bool:
        """Whether a regex is for all of `name`, or one of `names` is it, or its end after a dot."""
        if isinstance(names, str):
            return bool(names) and self._match(names, name) is not None
        parts = name.split(".")
        return any(".".join(parts[first:]) in names for first in range(len(parts)))

    def _layer(self, name: str) -> int | None:
        given = self._config.layers_pattern
        patterns = [given] if isinstance(given, str) and given else list(given)
        for pattern in [rf"(?:^|.*?\.){one}" for one in patterns] or [_LAYER_LIST]:
            if found := self._match(rf"{pattern}\.(\d+)\..*", name):
                return int(found)
        return None

    def _of_pattern(self, patterns: Mapping[str, _Value], name: str, default: _Value) -> _Value:
        """The value of the first pattern that matches an end of the name from a dot on."""
        for pattern, value in patterns.items():
            if name.endswith(_word(pattern)) and self._match(rf"(.*\.)?({pattern})", name) is not None:
                return value
        return default

    def _match(self, pattern: str, name: str) -> str | None:
        """What the last group of `pattern` matched, or ""; None: it does not match all of `name`. Raises BadAdapter."""
        left_s = self._end_s - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError
            if (compiled := self._compiled.get(pattern)) is None:
                if "{" in _REPEAT.sub("", pattern):
                    raise re.error("its braces hold more than a count of up to 100")
                copies = prod(max(1, int(least or 0)) for least, _, _ in _REPEAT.findall(pattern))
                if copies > 1 and copies * len(pattern) > MOST_COPIED:
                    raise re.error("its repeats make it too long")
                re.compile(pattern)  # what is only `regex`'s is an error, in PEFT, too
                compiled = self._compiled[pattern] = regex.compile(pattern)
            found = compiled.fullmatch(name, timeout=left_s)
        except TimeoutError:
            raise BadAdapter(f"{self._file}: its patterns take too long to match, the last {pattern[:200]}") from None
        except (regex.error, re.error, RecursionError, MemoryError, OverflowError) as error:
            raise BadAdapter(f"{self._file}: {pattern[:200]} is not a regular expression: {error}") from error
        if found is None:
            return None
        return str(found.groups()[-1] or "") if found.groups() else ""
