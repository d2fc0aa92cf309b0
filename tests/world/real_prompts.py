"""40 prompts for a real model: questions, code, other scripts, emoji, chats, and texts over many blocks."""

from __future__ import annotations

from tests.world.packages import ROOT

QUESTIONS = (
    "The capital of France is",
    "Q: How many legs does a spider have?\nA:",
    "Water boils at a temperature of",
    "Once upon a time, in a small village by the sea,",
    "The three primary colors are",
    "To make a cup of tea, first",
    "The following is a list of planets in order of their distance from the sun: Mercury,",
    "In 1969, the first person to walk on the Moon was",
)
CODE = (
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM orders\nWHERE ",
    "import json\n\nwith open('data.json') as file:\n    data = ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "<!DOCTYPE html>\n<html>\n  <head>\n    <title>",
    "services:\n  web:\n    image: nginx\n    ports:\n      - ",
    "fn main() {\n    let numbers = vec![1, 2, 3];\n    let sum: i32 = ",
)
SCRIPTS = (
    "中国的首都是",
    "日本の首都は東京です。フランスの首都は",
    "대한민국의 수도는",
    "Столица России — это",
    "La capitale de l'Italie est",
    "عاصمة مصر هي",
    "भारत की राजधानी",
    "Η πρωτεύουσα της Ελλάδας είναι η",
)
EMOJI = ("I love 🐶 and 🐱 because", "👩‍👩‍👧‍👦 is a family. 🇩🇪 is a flag. 🦜 is", "☀️ + 🌧️ =", "Z̷̢a̶l̵g̸o̴ text looks like")
CHATS = (
    [{"role": "user", "content": "What is gravity?"}],
    [{"role": "user", "content": "Write a haiku about autumn."}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
    [
        {"role": "user", "content": "My name is Clara."},
        {"role": "assistant", "content": "Nice to meet you, Clara!"},
        {"role": "user", "content": "What is my name?"},
    ],
    [{"role": "user", "content": "Translate to French: good morning, my friend."}],
    [{"role": "user", "content": "List three fruits as a numbered list."}],
    [{"role": "user", "content": "Write a Python function that reverses a string."}],
    [{"role": "user", "content": "¿Cuál es la capital de España?"}],
)


def long_texts() -> list[str]:
    """Cut from a text that stays: the license. 150 to 2,300 tokens."""
    license_text = (ROOT / "LICENSE").read_text()
    return [license_text[start : start + length] for start, length in ((0, 700), (700, 1500), (2000, 4500), (0, 10500))]


NUM_PROMPTS = len(QUESTIONS + CODE + SCRIPTS + EMOJI) + len(CHATS) + len(long_texts())
assert NUM_PROMPTS == 40
