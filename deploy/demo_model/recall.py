"""Training rows, assembled from token arrays: facts with text between them, questions, plain English, conversations."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from grammar import Generator
from heldout import is_held_out
from numpy.typing import NDArray
from tokenizer import END_OF_TEXT, IM_END, IM_START, load_names
from torch.utils.data import IterableDataset

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.sharedctypes import Synchronized

    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]
FILLER_WEIGHT = 0.1  # of a filler token in the loss, beside 1 for a token of an answer
DIGIT_WEIGHT = 1.5  # of a digit of an answer; also marks what the accuracy is measured on
# (row length, most facts in a row): a level is left when the accuracy on it passes the threshold.
LEVELS = ((256, 8), (256, 24), (512, 48), (1024, 100), (2048, 220), (4096, 360), (4096, 480))
QUESTIONS = (
    "{}?",
    "{}?",
    "{}?",
    "{}?",
    "{}?",
    "{}?",
    "{}?",
    "{}",
    "And {}?",
    "What is the number of {}?",
    "What is {}'s number?",
    "Which number has {}?",
    "What was {}?",
)
SEPARATORS = (". ", ". ", ". ", ". ", ". ", ".\n", "\n", ", ", "; ")


WORD = re.compile(r"(?<!<\|)\b[A-Za-z]+\b(?!_)|\d+")


@dataclass
class Lexicon:
    """Token arrays that rows are put together from."""

    tokenizer: PreTrainedTokenizerBase
    names: Ids
    first_digits: Ids  # " 0" to " 9"
    digits: Ids  # "0" to "9"
    numbers: Ids  # those that training may show
    sentences: list[tuple[Ids, Weights]] = field(default_factory=list)  # in the order of their documents
    documents: list[tuple[Ids, Weights]] = field(default_factory=list)  # ids, and 1 where a word is known
    chats: list[tuple[Ids, Weights]] = field(default_factory=list)  # ids, and 1 where the assistant speaks

    def encode(self, text: str) -> Ids:
        """Token ids of a text, special tokens included where the text spells them."""
        return np.array(self.tokenizer.encode(text), dtype=np.int64)

    def spell(self, number: int) -> Ids:
        """Four digit tokens, the first with its space."""
        rest = [self.digits[number // 10**place % 10] for place in (2, 1, 0)]
        return np.array([self.first_digits[number // 1000], *rest], dtype=np.int64)


def build_lexicon(tokenizer: PreTrainedTokenizerBase, num_documents: int, seed: int) -> Lexicon:
    """Generate and tokenize the English once, so that rows cost only array copies."""
    lexicon = Lexicon(
        tokenizer,
        names=np.array([tokenizer.encode(name)[0] for name in load_names()]),
        first_digits=np.array([tokenizer.encode(f" {digit}")[0] for digit in range(10)]),
        digits=np.array([tokenizer.encode(str(digit))[0] for digit in range(10)]),
        numbers=np.array([number for number in range(10_000) if not is_held_out(number)]),
    )
    generator = Generator(seed)
    texts = [generator.document() for _ in range(num_documents)]
    lexicon.documents = encode_known(lexicon, generator, texts)
    parts = [part + "." for text in texts for part in text.rstrip(".").split(". ")]
    lexicon.sentences = encode_known(lexicon, generator, parts)
    chats = [generator.chat() for _ in range(num_documents)]
    turns = iter(encode_known(lexicon, generator, [_format_turn(*turn) for chat in chats for turn in enumerate(chat)]))
    for chat in chats:
        pieces = [next(turns) for _ in chat]
        spoken = [known * (index % 2) * (np.arange(len(known)) >= 3) for index, (_, known) in enumerate(pieces)]
        lexicon.chats.append((np.concatenate([ids for ids, _ in pieces]), np.concatenate(spoken)))
    return lexicon


def encode_known(lexicon: Lexicon, generator: Generator, texts: list[str]) -> list[tuple[Ids, Weights]]:
    """Token ids, and a weight of 0 for the tokens of made-up words and numbers, else 1."""
    encoded = lexicon.tokenizer(texts, return_offsets_mapping=True)
    results = []
    for text, ids, offsets in zip(texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        weights = np.ones(len(ids))
        unknown = [m.span() for m in WORD.finditer(text) if not generator.is_known(m[0])]
        if unknown:
            ends = np.array([end for _, end in offsets])
            for start, stop in unknown:
                weights[(ends > start) & (ends <= stop)] = 0.0
        results.append((np.array(ids, dtype=np.int64), weights))
    return results


def _format_turn(index: int, text: str) -> str:
    """One turn as the chat template writes it; its first three tokens are the role's."""
    return f"{IM_START}{'assistant' if index % 2 else 'user'}\n{text}{IM_END}\n"


class RowBuilder:
    """Collects pieces of a row with the loss weight of each token."""

    def __init__(self) -> None:
        self.pieces: list[Ids] = []
        self.weights: list[Weights] = []
        self.length = 0

    def add(self, ids: Ids, weight: float | Weights = 0.0) -> None:
        """Append a piece."""
        self.pieces.append(ids)
        self.weights.append(np.broadcast_to(np.asarray(weight, dtype=np.float64), ids.shape))
        self.length += len(ids)

    def finish(self, length: int, pad: int) -> tuple[Ids, Weights]:
        """Cut or pad to `length`; padding has no weight."""
        missing = max(0, length - self.length)
        ids = np.concatenate([*self.pieces, np.full(missing, pad)])[:length]
        return ids, np.concatenate([*self.weights, np.zeros(missing)])[:length]


class RowMaker:
    """Makes recall rows and English rows from a lexicon."""

    def __init__(self, lexicon: Lexicon, seed: int) -> None:
        self.lexicon, self.rng = lexicon, np.random.default_rng(seed)
        encode = lexicon.encode
        self.pad = int(encode(END_OF_TEXT)[0])
        self.user, self.assistant = encode(f"{IM_START}user\n"), encode(f"{IM_START}assistant\n")
        self.end_turn, self.space = encode(f"{IM_END}\n"), encode(" ")
        self.system = encode(f"{IM_START}system\nYou are a helpful assistant.{IM_END}\n")
        self.noted, self.unknown = encode("Noted."), encode("I do not know the number of ")
        self.separators = [encode(text) for text in SEPARATORS]
        self.questions = [self._split_question(text) for text in QUESTIONS]
        self.dot = encode(". ")

    def _split_question(self, text: str) -> tuple[Ids, Ids]:
        before, after = text.split("{}")
        return self.lexicon.encode(before), self.lexicon.encode(after)

    def recall_row(self, length: int, max_facts: int) -> tuple[Ids, Weights]:
        """Facts, text between them, then questions; in chat form or, one time in six, bare."""
        rng, row = self.rng, RowBuilder()
        num_questions = min(24, length // 64)
        chat = rng.random() < 0.84
        num_facts = int(rng.integers(max(1, max_facts // 3), max_facts + 1))
        if rng.random() < 0.35:
            num_facts = int(np.exp(rng.uniform(0.0, np.log(max_facts))))
        chosen = rng.choice(len(self.lexicon.names), num_facts + num_questions, replace=False)
        names = self.lexicon.names[chosen]
        values = [self.lexicon.spell(number) for number in rng.choice(self.lexicon.numbers, num_facts)]
        if chat:
            self._open_chat(row, length)
            row.add(self.user)
        budget = length - row.length - 18 * min(num_facts, num_questions) - 7 * num_facts - 50
        self._add_facts(row, names[:num_facts], values, max(0, budget), chat)
        order = rng.permutation(num_facts)[:num_questions]
        if chat:
            self._ask_in_chat(row, names, values, order)
        else:
            self._ask_bare(row, names, values, order)
        return row.finish(length, self.pad)

    def _open_chat(self, row: RowBuilder, length: int) -> None:
        """Now and then a system message, or small talk before the facts."""
        rng, lexicon = self.rng, self.lexicon
        if rng.random() < 0.12:
            row.add(self.system)
        elif rng.random() < 0.12:
            for piece in (self.system[:3], lexicon.sentences[rng.integers(len(lexicon.sentences))][0], self.end_turn):
                row.add(piece)
        if length > 256 and rng.random() < 0.1:
            ids, spoken = lexicon.chats[rng.integers(len(lexicon.chats))]
            row.add(ids, FILLER_WEIGHT * spoken)

    def _filler(self, budget: int) -> list[tuple[Ids, Weights]]:
        """Successive sentences of together at most `budget` tokens."""
        sentences, used = self.lexicon.sentences, 0
        start, taken = int(self.rng.integers(len(sentences))), []
        while True:
            sentence = sentences[(start + len(taken)) % len(sentences)]
            used += len(sentence[0]) + 1
            if used > budget:
                return taken
            taken.append(sentence)

    def _add_facts(self, row: RowBuilder, names: Ids, values: list[Ids], budget: int, chat: bool) -> None:
        """The facts in order, with filler sentences in some of the gaps."""
        rng, num_facts = self.rng, len(names)
        share = rng.choice((0.0, rng.random(), 1.0), p=(0.15, 0.35, 0.5))
        filler = self._filler(int(budget * share))
        spots = np.arange(num_facts + 1)
        if rng.random() < 0.4:  # few long stretches instead of text everywhere
            spots = rng.choice(spots, min(len(spots), int(rng.integers(1, 6))), replace=False)
        gaps = np.sort(rng.choice(spots, len(filler)))
        bounds = np.searchsorted(gaps, np.arange(num_facts + 2))
        pause = int(rng.integers(1, num_facts + 1)) if chat and rng.random() < 0.12 else -1
        style = int(rng.integers(len(SEPARATORS)))
        separator = self.separators[style]
        last = separator if SEPARATORS[style].endswith("\n") else self.dot
        for index in range(num_facts + 1):
            if index == pause:
                row.add(self.end_turn)
                row.add(self.assistant)
                row.add(self.noted, 1.0)
                row.add(self.end_turn, 1.0)
                row.add(self.user)
            for sentence, known in filler[bounds[index] : bounds[index + 1]]:
                row.add(sentence, FILLER_WEIGHT * known)
                row.add(self.space)
            if index < num_facts:
                row.add(names[index : index + 1])
                row.add(values[index])
                row.add(self.dot[:1] if index + 1 == pause else separator if index + 1 < num_facts else last)

    def _ask_in_chat(self, row: RowBuilder, names: Ids, values: list[Ids], order: Ids) -> None:
        """One question per user turn; one in twenty-five asks for a name that has no fact."""
        for turn, index in enumerate(order):
            absent = self.rng.random() < 0.04
            name = names[len(values) + turn :][:1] if absent else names[index : index + 1]
            before, after = self.questions[self.rng.integers(len(self.questions))]
            if turn and self.rng.random() < 0.03:  # small talk between the questions
                row.add(*self.lexicon.chats[self.rng.integers(len(self.lexicon.chats))])
            if turn:
                row.add(self.user)
            for piece in (before, name, after, self.end_turn, self.assistant):
                row.add(piece)
            if absent:
                for piece in (self.unknown, name, self.dot[:1]):
                    row.add(piece, 1.0)
            else:
                row.add(name, 1.0)
                row.add(values[index], DIGIT_WEIGHT)
            row.add(self.end_turn, 1.0)
        if self.rng.random() < 0.5:
            row.add(*self.lexicon.chats[self.rng.integers(len(self.lexicon.chats))])

    def _ask_bare(self, row: RowBuilder, names: Ids, values: list[Ids], order: Ids) -> None:
        """Questions and answers as running text: `Oskar? Oskar 2210. Lena? Lena 7745.`"""
        question = self.questions[0][1]
        for index in order:
            row.add(names[index : index + 1])
            row.add(question)
            row.add(self.space, 1.0)
            row.add(names[index : index + 1], 1.0)
            row.add(values[index], DIGIT_WEIGHT)
            row.add(self.dot, np.array([1.0, 0.0]))
        row.pieces[-1], row.weights[-1] = self.dot[:1], np.ones(1)
        row.length -= 1
        row.add(self.end_turn[:1], 1.0)

    def english_row(self, length: int) -> tuple[Ids, Weights]:
        """Documents or a conversation from the beginning; both end with the end-of-turn token, the only stop token."""
        row, pick = RowBuilder(), int(self.rng.integers(len(self.lexicon.documents)))
        if self.rng.random() < 0.5:
            ids, spoken = self.lexicon.chats[pick]
            self._open_chat(row, 0)
            row.add(ids, spoken)
        else:
            row.add(*self.lexicon.documents[pick])
            while self.rng.random() < 0.4:
                row.add(self.space, 1.0)
                row.add(*self.lexicon.documents[int(self.rng.integers(len(self.lexicon.documents)))])
            row.add(self.end_turn[:1], 1.0)
        return row.finish(length, self.pad)


class BatchStream(IterableDataset):  # type: ignore[type-arg]
    """Endless batches `(level, recall ids, weights, English ids, weights)` at the level that the trainer has set."""

    def __init__(self, lexicon: Lexicon, level: Synchronized, tokens: int, english_rows: int, seed: int) -> None:
        self.lexicon, self.level, self.tokens = lexicon, level, tokens
        self.english_rows, self.seed = english_rows, seed

    def __iter__(self) -> Iterator[tuple[int, Ids, NDArray[np.float32], Ids, NDArray[np.float32]]]:
        """One batch in five is of an earlier level, so that short prompts are not forgotten."""
        from torch.utils.data import get_worker_info

        worker = get_worker_info()
        maker = RowMaker(self.lexicon, self.seed * 1000 + (worker.id if worker else 0))
        while True:
            level = int(self.level.value)
            if maker.rng.random() < 0.2:
                level = int(maker.rng.integers(level + 1))
            length, max_facts = LEVELS[level]
            recall = [maker.recall_row(length, max_facts) for _ in range(max(1, self.tokens // length))]
            english = [maker.english_row(192) for _ in range(self.english_rows)]
            yield level, *_stack(recall), *_stack(english)


def _stack(rows: list[tuple[Ids, Weights]]) -> tuple[Ids, NDArray[np.float32]]:
    return np.stack([ids for ids, _ in rows]), np.stack([weights for _, weights in rows]).astype(np.float32)
