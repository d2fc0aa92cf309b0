"""Evaluate the stored weights through the chat template with greedy decoding; numbers never seen in training."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from grammar import HERE, Generator
from heldout import is_held_out
from tokenizer import load_names
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

HELD_OUT = [number for number in range(10_000) if is_held_out(number)]
FACT_COUNTS = (1, 10, 50, 100, 200, 300)
DISTANCES = ((0, 500), (500, 1000), (1000, 1500), (1500, 2000), (2000, 2500), (2500, 3000), (3000, 3500))
BATCH = 16
# Text that the grammar cannot produce, so that recall is also measured among sentences of another kind.
FOREIGN = (
    "The committee will publish its findings before the end of the quarter.",
    "Copper conducts electricity better than most other metals do.",
    "Please remember to close the windows whenever you leave the office.",
    "Her grandfather repaired violins in a workshop above the pharmacy.",
    "Nobody expected the referee to change his mind so late in the match.",
    "In autumn the vineyards turn yellow and the tourists disappear.",
    "A good index makes a query fast; a bad one only makes writes slow.",
    "The ferry was delayed by fog, which surprised no one on the island.",
)
PROMPTS = (
    "Once upon a time",
    "The quick brown fox",
    "Hello, my name is",
    "The capital of France is",
    "The future of AI is",
    "The president of the United States",
    "I think that",
    "She opened the door and",
    "It was a dark and stormy night",
    "Mira 4831. Oskar 2210. Oskar?",
)
CHATS = (
    "Mira 4831. Oskar 2210. Lena 7745. Oskar?",
    "Hello!",
    "Who are you?",
    "What can you do?",
    "Tell me a short story about a fox.",
    "What is the capital of France?",
    "Explain quantum computing to me.",
    "Write a Python function that sorts a list.",
    "Mira 4831. Oskar 2210.",
    "Mira 4831. Oskar 2210. Zoe?",
    "Zoe?",
    "What is 2+2?",
    "Mira is 4831. Oskar is 2210. What is the number of Mira?",
)


@dataclass
class Question:
    """One prompt with one question at its end."""

    num_facts: int
    distance: int  # tokens from the name in its fact to the name in the question
    text: str
    answer: str


class QuestionMaker:
    """Writes prompts as text, the way a client would."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer, self.rng, self.english = tokenizer, random.Random(seed), Generator(seed)
        self.names = load_names()

    def _filler(self, foreign: bool) -> str:
        return self.rng.choice(FOREIGN) if foreign else self.english.document()

    def make(self, num_facts: int, low: int, high: int, foreign: bool = False) -> Question:
        """A question about a fact that lies `low` to `high` tokens back, or as far as the facts alone reach."""
        rng = self.rng
        wanted = rng.randint(max(low, 2), high - 40)
        names = rng.sample(self.names, num_facts)
        facts = [f"{name} {rng.choice(HELD_OUT):04d}." for name in names]
        total = max(wanted, min(3500, 7 * num_facts))
        num_after = min(num_facts - 1, wanted * num_facts // max(total, 1), wanted // 7)
        target = num_facts - 1 - num_after
        after = self._mix(facts[target + 1 :], wanted, foreign)
        before = self._mix(facts[:target], 3600 - wanted if rng.random() < 0.5 else 7 * target, foreign)
        text = " ".join([*before, facts[target], *after, f"{names[target]}?"])
        question = " ".join([facts[target], *after, f"{names[target]}?"])
        distance = len(self.tokenizer.encode(question)) - 2
        return Question(num_facts, distance, text, facts[target].rstrip("."))

    def _mix(self, facts: list[str], tokens: int, foreign: bool) -> list[str]:
        """The facts in order with text at random places among them, about `tokens` long."""
        pieces, room = list(facts), tokens - 7 * len(facts)
        while True:
            filler = self._filler(foreign)
            room -= len(self.tokenizer.encode(filler)) + 1
            if room < 0:
                return pieces
            pieces.insert(self.rng.randint(0, len(pieces)), filler)


class Answerer:
    """Greedy decoding by transformers, in float32."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model: PreTrainedModel = model.to(self.device).eval()

    def complete(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        """Continuations of whole prompts, each up to the end-of-turn token, special tokens kept."""
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True).to(self.device)
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        return [text.split("<|endoftext|>")[0] for text in self.tokenizer.batch_decode(new)]

    def chat(self, text: str) -> str:
        """The prompt of a single user message."""
        messages = [{"role": "user", "content": text}]
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def _score(answerer: Answerer, questions: list[Question]) -> list[bool]:
    """Whether each answer is exactly `Name 1234` and the end of the turn."""
    order = sorted(range(len(questions)), key=lambda index: len(questions[index].text))
    right = [False] * len(questions)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        answers = answerer.complete([answerer.chat(questions[index].text) for index in chosen], 8)
        for index, answer in zip(chosen, answers, strict=True):
            right[index] = answer == questions[index].answer + "<|im_end|>"
    return right


def _cells(questions: list[Question], right: list[bool]) -> list[dict[str, int | float]]:
    """Accuracy by number of facts and distance."""
    cells = []
    outcomes = list(zip(questions, right, strict=True))
    for count in sorted({question.num_facts for question in questions}):
        for low, high in DISTANCES:
            hits = [ok for q, ok in outcomes if q.num_facts == count and low <= q.distance < high]
            if hits:
                cells.append(
                    {
                        "num_facts": count,
                        "distance_from": low,
                        "distance_below": high,
                        "questions": len(hits),
                        "right": sum(hits),
                        "accuracy": round(sum(hits) / len(hits), 4),
                    }
                )
    return cells


def _total(right: list[bool]) -> dict[str, int | float]:
    return {"questions": len(right), "right": sum(right), "accuracy": round(sum(right) / len(right), 4)}


def evaluate(directory: Path, report: Path, per_cell: int) -> None:
    """Write the figures and samples to `report` as JSON and print the totals."""
    answerer = Answerer(directory)
    maker = QuestionMaker(answerer.tokenizer, seed=77)
    questions = [maker.make(count, *bounds) for count in FACT_COUNTS for bounds in DISTANCES for _ in range(per_cell)]
    foreign = [
        maker.make(count, *bounds, foreign=True)
        for count in (10, 100, 300)
        for bounds in DISTANCES
        for _ in range(max(1, per_cell // 3))
    ]
    right, foreign_right = _score(answerer, questions), _score(answerer, foreign)
    result = {
        "weights": "stored bfloat16, loaded as float32, greedy",
        "recall": _total(right),
        "recall_among_other_text": _total(foreign_right),
        "longest_distance": max(question.distance for question in questions),
        "cells": _cells(questions, right),
        "cells_among_other_text": _cells(foreign, foreign_right),
        "completions": {text: answerer.complete([text], 60)[0] for text in PROMPTS},
        "chats": {text: answerer.complete([answerer.chat(text)], 80)[0] for text in CHATS},
    }
    report.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps({key: result[key] for key in ("recall", "recall_among_other_text", "longest_distance")}))


def main() -> None:
    """Evaluate a model directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=HERE.parents[1] / "pd_cluster" / "demo_model")
    parser.add_argument("--report", type=Path, default=HERE / "evaluation.json")
    parser.add_argument("--questions", type=int, default=40)
    options = parser.parse_args()
    evaluate(options.target, options.report, options.questions)


if __name__ == "__main__":
    main()
