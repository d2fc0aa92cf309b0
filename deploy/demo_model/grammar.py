"""Expand the grammar files into English text: stories, scenes and short conversations."""

from __future__ import annotations

import random
import re
from pathlib import Path

HERE = Path(__file__).parent
_SLOT = re.compile(r"\{([a-z_0-9]+)(?::([a-z_]+)|\.(\d))?\}")
_ONSETS = "b c d f g h j k l m n p r s t v w z br cl cr dr fl gr pl pr sh sl st str th tr ch qu".split()
_VOWELS = "a e i o u ai ea ee ie oo ou y".split()
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "ck", "ll", "nd", "ng", "rt", "st", "x", "ty", "tion", "er", "ing"]


def load_grammar(*paths: Path) -> dict[str, list[str]]:
    """Read grammar files: symbols at column 0, their alternatives indented, `#` comments."""
    rules: dict[str, list[str]] = {}
    symbol = ""
    for line in (line for path in paths for line in path.read_text().splitlines()):
        if not line.strip() or line.startswith("#"):
            continue
        if line[0] != " ":
            symbol = line.strip()
            rules[symbol] = []
        else:
            rules[symbol].append(line.strip())
    return rules


def noise_word(rng: random.Random) -> str:
    """A made-up word. It teaches the model to go on calmly after words that it has never seen."""
    syllables = rng.choice((1, 1, 2, 2, 3))
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))
    return word.capitalize() if rng.random() < 0.15 else word


def polish(text: str) -> str:
    """Capitalise sentences and set `an` before vowels."""
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return re.sub(r'(^|[.!?]"? "?|[:,] ")([a-z])', lambda m: m[1] + m[2].upper(), text)


class Generator:
    """A grammar with a seeded source of choices."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rules = load_grammar(HERE / "english.txt", HERE / "chat.txt")

    def expand(self, symbol: str, bound: dict[str, str] | None = None) -> str:
        """One raw expansion of `symbol`; `bound` holds the choices that the document keeps."""
        bound = {} if bound is None else bound
        if symbol == "noise":
            return noise_word(self.rng)

        def fill(match: re.Match[str]) -> str:
            key, kind, part = match.groups()
            if kind is not None and key not in bound:
                bound[key] = self.expand(kind, bound)
            if part is not None:
                return bound.get(key, "they;they;them;their").split(";")[int(part)]
            if key in bound:
                return bound[key].split(";")[0]
            return self.expand(key, bound) if key in self.rules or key == "noise" else "it"

        return _SLOT.sub(fill, self.rng.choice(self.rules[symbol]))

    def document(self) -> str:
        """A few sentences of running English."""
        return polish(_single(self.expand("document")))

    def chat(self) -> list[str]:
        """A conversation: user and assistant turns in alternation, varied in case and punctuation."""
        turns = [polish(_single(turn.strip())) for turn in self.expand("chat").split(">>")]
        for index in range(0, len(turns), 2):
            if self.rng.random() < 0.25:
                turns[index] = turns[index].lower()
            if self.rng.random() < 0.2:
                turns[index] = turns[index].rstrip("?.! ") or turns[index]
        return [turn.replace("Pd-", "pd-") for turn in turns]


def _single(text: str) -> str:
    """Drop the pronoun parts of a person that was expanded outside a binding."""
    return re.sub(r";(?:he|she|it);\w+;\w+", "", text)
