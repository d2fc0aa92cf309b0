"""The workload `edits`: chats that show a file and ask for all of it with one name changed.

Most of an answer is a text of its prompt, which is what drafts by lookup and `prediction` are for. That takes a model
that does as it is asked. The files are Python, written from a seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pd_cluster.bench.workload import Arrival

CHARS_PER_TOKEN = 3.5  # of such a file, about
VERBS = ("collect", "merge", "filter", "count", "load", "order", "check", "update", "split", "join", "rank", "trim")
NOUNS = ("orders", "users", "events", "items", "routes", "pages", "rows", "prices", "notes", "tasks", "files", "links")
FIELDS = ("size", "age", "weight", "score", "level", "total", "width", "delay")
FUNCTION = '''

def {verb}_{field}_of_{noun}_{number}({noun}, limit={low}, step={high}):
    """Return the {noun} with a {field} above the limit, by {other}."""
    found = []
    for place, one in enumerate({noun}):
        if one.{field} > limit and place % step != {low}:
            found.append({old}(one, limit + {high}))
    return sorted(found, key=lambda one: one.{other})
'''


@dataclass(frozen=True, slots=True)
class Edit:
    """A file, and a name in it that shall be another. predicts: the request has the file as its `prediction`."""

    text: str
    old: str
    new: str
    predicts: bool = False

    def fields(self) -> dict[str, Any]:
        """Of the body of a chat. The model is told not to think, where its template knows that."""
        task = f"Rename `{self.old}` to `{self.new}` in this file. Answer with the whole file in one code block."
        file = f"```python\n{self.text}```"
        fields: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"{task}\n\n{file}"}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        return fields | {"prediction": {"type": "content", "content": file}} if self.predicts else fields


def edit_of(arrival: Arrival, index: int, seed: int, *, predicts: bool) -> Edit:
    """The arrival's edit, of a file of about `num_input` tokens that ends with a whole function."""
    rng = random.Random(f"{seed}/edit/{index}")
    verbs, nouns = rng.sample(VERBS, 2), rng.sample(NOUNS, 2)
    old, new = (f"{verb}_{noun}" for verb, noun in zip(verbs, nouns, strict=True))
    text, number = f"def {old}(one, limit):\n    return one if limit > one.{rng.choice(FIELDS)} else None\n", 0
    while len(text) < CHARS_PER_TOKEN * arrival.num_input:
        number += 1
        field, other = rng.sample(FIELDS, 2)
        low, high = rng.randrange(9), rng.randrange(9, 99)
        names = {"verb": rng.choice(VERBS), "noun": rng.choice(NOUNS), "field": field, "other": other, "old": old}
        text += FUNCTION.format(number=number, low=low, high=high, **names)
    return Edit(text, old, new, predicts)
