"""Texts that models of coding agents read and write, made of this repository: six tasks, and one that matches nothing.

    rewrite   a piece of a file and a change; the answer is the changed piece
    patch     the same; the answer is search-and-replace hunks
    json      records, one a line, and the beginning of one; the answer is the rest of it and the next one
    code      the first half of a piece of code; the answer is the second half
    prose     the same of the documentation
    message   a change; the answer is its commit message
    unmatched random tokens: no pair comes twice, so nothing is looked up with success

Changes are of commits. `changes.jsonl` has them, so that a tree without its history has them, too; `python -m
benchmarks.recorded_texts` writes it again from the history. All else is made of the files that are there.

Tokens: those of a tokenizer.json, or *pieces*, which are about as long as those of large vocabularies and need no file.
"""

from __future__ import annotations

import difflib
import json
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Encode = Callable[[str], list[int]]

ROOT = Path(__file__).parents[1]
CHANGES = Path(__file__).parent / "texts" / "changes.jsonl"
TASKS = ("rewrite", "patch", "json", "code", "prose", "message")
UNMATCHED = "unmatched"
PIECE = re.compile(r" ?[A-Za-z]{1,7}|[0-9]{1,3}| ?[^\sA-Za-z0-9]{1,2}|\n *|\s+")
NUM_TEXTS = 48  # of a task
LEAST, MOST = 900, 2200  # characters of a piece: 1k tokens have room for it and its change
NUM_BESIDE = 20  # lines before and after a change
LONGEST_RECORD, MOST_RECORDS = 1500, 100  # characters of a line of JSON, and lines of a file
COMMITS = 600  # the newest ones, of which changes are taken


@dataclass(frozen=True, slots=True)
class TaskText:
    """What is asked, and the answer that is written to it."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """The same as tokens: a prompt of a fixed length, and the answer."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def make_texts(root: Path = ROOT) -> dict[str, list[TaskText]]:
    """At most NUM_TEXTS of each of TASKS, the same at each call. Raises StartupError."""
    try:
        changes = [json.loads(line) for line in CHANGES.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise StartupError(f"there are no recorded changes: {error}") from error
    texts: dict[str, list[TaskText]] = {task: [] for task in TASKS}
    for change in changes[:NUM_TEXTS]:
        before, after = change["before"], _applied(change)
        asked = f"{before}\nChange {change['path']}: {change['message']}\n"
        texts["rewrite"].append(TaskText(asked, after))
        texts["patch"].append(TaskText(asked, _hunks(before, after)))
        told = "".join(_difference(before, after, 3))
        texts["message"].append(TaskText(f"{told}\nThe message of this commit:\n", change["message"]))
    texts["json"] = _chosen(_record_texts(root))
    texts["code"] = _chosen(_halves(root, "pd_cluster", "*.py"))
    texts["prose"] = _chosen(_halves(root, "docs", "*.md"))
    return texts


def encoder(tokenizer: Path | None, vocab_size: int) -> Encode:
    """Encodes by the tokenizer.json of a directory, or by pieces. Ids are below `vocab_size`. Raises StartupError."""
    if tokenizer is None:
        return lambda text: [1 + crc32(piece.encode()) % (vocab_size - 1) for piece in PIECE.findall(text)]
    from tokenizers import Tokenizer

    try:
        known = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    except Exception as error:  # the library's, of no class of its own
        raise StartupError(f"the tokenizer in {tokenizer} cannot be loaded: {error}") from error
    return lambda text: [one % vocab_size for one in known.encode(text, add_special_tokens=False).ids]


class AnswerMaker:
    """Makes prompts of one length: other text of the repository, and then a task's."""

    def __init__(self, encode: Encode, vocab_size: int, root: Path = ROOT) -> None:
        self._vocab_size, self._texts = vocab_size, make_texts(root)
        self._encoded = {
            task: [(encode(one.prompt), encode(one.answer)) for one in found] for task, found in self._texts.items()
        }
        paths = sorted((root / "pd_cluster").rglob("*.py")) + sorted((root / "docs").glob("*.md"))
        self._other = encode("\n".join(path.read_text(encoding="utf-8") for path in paths[::3])[:1_500_000])

    def answers(self, task: str, num: int, length: int, longest: int) -> list[RecordedAnswer]:
        """So many, each with a prompt of `length` tokens. `longest`: tokens of an answer.

        task: one, or several that "+" joins and that take turns. Where texts come again, what is before them differs.
        """
        tasks = task.split("+")
        return [self._answer(tasks[at % len(tasks)], at, length, longest) for at in range(num)]

    def _answer(self, task: str, at: int, length: int, longest: int) -> RecordedAnswer:
        rng = random.Random(at)
        if task == UNMATCHED:
            tokens = rng.choices(range(1, self._vocab_size), k=length + longest)
            return RecordedAnswer(task, tuple(tokens[:length]), tuple(tokens[length:]))
        found = self._encoded[task]
        prompt, answer = found[at % len(found)]
        num_other = max(16, length - len(prompt))
        start = rng.randrange(max(1, len(self._other) - num_other))
        whole = self._other[start : start + num_other] + prompt[max(0, len(prompt) + 16 - length) :]
        return RecordedAnswer(task, tuple(whole[-length:]), tuple(answer[:longest]))


def _applied(change: dict[str, Any]) -> str:
    """The piece after the change."""
    lines = change["before"].splitlines(keepends=True)
    for start, end, text in reversed(change["edits"]):
        lines[start:end] = [text]
    return "".join(lines)


def _difference(before: str, after: str, num_beside: int) -> list[str]:
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return list(difflib.unified_diff(*lines, n=num_beside))[2:]


def _hunks(before: str, after: str) -> str:
    """The change as search-and-replace hunks."""
    told, old, new = list[str](), list[str](), list[str]()
    for line in [*_difference(before, after, 2), "@@"]:
        if line.startswith("@@"):
            if old or new:
                told.append(f"<<<<<<< SEARCH\n{''.join(old)}=======\n{''.join(new)}>>>>>>> REPLACE\n")
            old, new = [], []
            continue
        if line[0] in " -":
            old.append(line[1:])
        if line[0] in " +":
            new.append(line[1:])
    return "".join(told)


def _chosen(texts: list[TaskText]) -> list[TaskText]:
    return random.Random(1).sample(texts, min(NUM_TEXTS, len(texts)))


def _halves(root: Path, folder: str, pattern: str) -> list[TaskText]:
    """Pieces of files, cut at a line in the middle."""
    found = []
    for path in sorted((root / folder).rglob(pattern)):
        text = path.read_text(encoding="utf-8")
        for start in range(0, len(text) - 2 * MOST, 4 * MOST):
            piece = text[start : start + 2 * MOST]
            half = piece.find("\n", MOST)
            if half > 0:
                found.append(TaskText(piece[: half + 1], piece[half + 1 :]))
    return found


def _record_texts(root: Path) -> list[TaskText]:
    """Neighbouring lines of files of results, cut somewhere in the fourth one."""
    found, rng = list[TaskText](), random.Random(1)
    for path in sorted((root / "benchmarks" / "results").glob("*.jsonl")):
        lines = [line[:LONGEST_RECORD] for line in path.read_text(encoding="utf-8").splitlines()]
        for at in range(0, min(len(lines), MOST_RECORDS) - 4, 5):
            text = "\n".join(lines[at : at + 5])
            cut = len("\n".join(lines[at : at + 3])) + 1 + rng.randrange(len(lines[at + 3]))
            found.append(TaskText(text[max(0, cut - MOST) : cut], text[cut : cut + MOST]))
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def _commit_changes() -> Iterator[dict[str, Any]]:
    """Changes of one place of a Python file, a commit each, the newest first."""
    for commit in _git("rev-list", "--no-merges", f"-n{COMMITS}", "HEAD").split():
        message = _git("log", "-1", "--format=%B", commit).strip()
        for line in _git("show", "--format=", "--name-status", commit).splitlines():
            kind, *paths = line.split("\t")
            if kind != "M" or not paths[0].endswith(".py") or not 60 < len(message) < 500:
                continue
            if (change := _change(message, commit, paths[0])) is not None:
                yield change
                break


def _change(message: str, commit: str, path: str) -> dict[str, Any] | None:
    """The first change of a file that a piece has room for; None: there is none."""
    old, new = (_git("show", f"{one}:{path}").splitlines(keepends=True) for one in (f"{commit}~1", commit))
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(NUM_BESIDE):
        start, end = group[0][1], group[-1][2]
        before = "".join(old[start:end])
        edits = [(i - start, j - start, "".join(new[k:m])) for tag, i, j, k, m in group if tag != "equal"]
        if LEAST < len(before) < MOST and 20 < sum(len(text) for *_, text in edits) < MOST // 2:
            return {"message": message, "path": path, "before": before, "edits": edits}
    return None


def main() -> int:
    """Write the changes of the newest commits. Returns 0."""
    CHANGES.parent.mkdir(exist_ok=True)
    found = [change for change, _ in zip(_commit_changes(), range(NUM_TEXTS), strict=False)]
    CHANGES.write_text("".join(json.dumps(change, ensure_ascii=False) + "\n" for change in found), encoding="utf-8")
    sys.stdout.write(f"{CHANGES}: {len(found)} changes\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
