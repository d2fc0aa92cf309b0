"""Expand the grammar files into English text: stories, scenes and short conversations."""

from __future__ import annotations

import random
import re
from pathlib import Path

from heldout import is_held_out

HERE = Path(__file__).parent
_SLOT = re.compile(r"\{([a-z_0-9]+)(?::([a-z_]+)|\.(\d))?\}")
_ONSETS = [*"bcdfghjklmnprstvwz", "br", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "sh", "sl", "st", "str", "th", "qu"]
_VOWELS = [*"aeiouy", "ai", "ea", "ee", "ie", "oo", "ou"]
_CODAS = ["", "", "", "l", "m", "n", "r", "s", "t", "ck", "ll", "nd", "ng", "rt", "st", "x", "ty", "tion", "er", "ing"]

# Sentences that a document says at most once, whatever the words in their slots.
_ONCE = {"event", "middle", "speech", "describe", "about_me", "essay_more", "fact", "action", "step"}


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
    return word.capitalize() if rng.random() < 0.05 else word


def polish(text: str) -> str:
    """Capitalise sentences and set `an` before vowels."""
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    text = text.replace(" foxs", " foxes").replace(" mouses", " mice").replace(" fishs", " fish")
    return re.sub(r'(^|[.!?]"? "?|[:,] ")([a-z])', lambda m: m[1] + m[2].upper(), text)


class Generator:
    """A grammar with a seeded source of choices."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rules = load_grammar(HERE / "words.txt", HERE / "english.txt", HERE / "chat.txt")
        alternatives = " ".join(text for choices in self.rules.values() for text in choices)
        singular = set(re.findall(r"[a-z]+|[0-9]+", _SLOT.sub(" ", alternatives).lower()))
        self._words = singular | {f"{word}s" for word in self.rules["animal"]} | {"foxes", "mice", "an"}

    def expand(self, symbol: str, bound: dict[str, str] | None = None) -> str:
        """One raw expansion of `symbol`; `bound` holds the choices that the document keeps."""
        bound = {} if bound is None else bound
        if symbol == "noise":
            return noise_word(self.rng)
        if symbol == "number":
            number = self.rng.randrange(10 ** self.rng.randint(1, 4))
            return str(1984 if is_held_out(number) else number)

        def fill(match: re.Match[str]) -> str:
            key, kind, part = match.groups()
            if kind is not None and key not in bound:
                bound[key] = self.expand(kind, bound)
            if part is not None:
                return bound.get(key, "they;they;them;their").split(";")[int(part)]
            if key in bound:
                return bound[key].split(";")[0]
            return self.expand(key, bound) if key in self.rules or key in ("noise", "number") else "it"

        choices = self.rules[symbol]
        if symbol in _ONCE:
            choices = [choice for choice in choices if f"said {choice}" not in bound] or choices
        choice = self.rng.choice(choices)
        bound[f"said {choice}"] = ""
        return _SLOT.sub(fill, choice)

    def document(self) -> str:
        """A few sentences of running English."""
        text = _unrepeated(polish(_single(self.expand("document"))))
        if self.rng.random() < 0.25:  # unknown words in the middle of known ones
            text = re.sub(r"(?<= )[a-z]{4,}", lambda m: noise_word(self.rng) if self.rng.random() < 0.1 else m[0], text)
        return text

    def is_known(self, word: str) -> bool:
        """Whether the grammar spells this word; made-up words and numbers are read but never to be written."""
        return word.lower() in self._words

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


def _unrepeated(text: str) -> str:
    """Drop sentences that have been said before, so that the model does not learn to go in circles."""
    return " ".join(dict.fromkeys(re.split(r"(?<=[a-z][.!?]) ", text)))
