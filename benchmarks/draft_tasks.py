"""What `python -m benchmarks drafts` asks a model: to edit texts, to go on with records, to write prose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PIECE, PIECES = 800, 8  # characters of a file's text that one prompt has, and how many of its pieces are asked for


@dataclass(frozen=True, slots=True)
class Question:
    """What a user asks. prediction: of the answer, as a client would send it; "": none."""

    text: str
    prediction: str = ""


# A text, and the change that is asked for
EDITS = (
    (
        "def total_price(items, tax_rate):\n"
        '    """Sum up the prices of all items and add the tax."""\n'
        "    total = 0\n"
        "    for item in items:\n"
        '        total += item["price"] * item["count"]\n'
        "    tax = total * tax_rate\n"
        "    return total + tax\n",
        "Rename the variable total to amount.",
    ),
    (
        "class Stack:\n"
        "    def __init__(self):\n"
        "        self.items = []\n\n"
        "    def push(self, item):\n"
        "        self.items.append(item)\n\n"
        "    def pop(self):\n"
        "        return self.items.pop()\n\n"
        "    def is_empty(self):\n"
        "        return len(self.items) == 0\n",
        "Add a method size that returns the number of items.",
    ),
    (
        "SELECT customers.name, orders.total, orders.created_at\n"
        "FROM customers\n"
        "JOIN orders ON orders.customer_id = customers.id\n"
        "WHERE orders.total > 100\n"
        "ORDER BY orders.created_at DESC\n"
        "LIMIT 20;\n",
        "Change the limit to 50.",
    ),
    (
        "server:\n  host: 127.0.0.1\n  port: 8080\n  workers: 4\n"
        "logging:\n  level: info\n  file: /var/log/app.log\n"
        "database:\n  host: localhost\n  port: 5432\n  user: app\n  name: orders\n",
        "Set the logging level to debug.",
    ),
    (
        "The harbour opens at six in the morning. Fishing boats leave first, and the ferry to the island follows at "
        "seven. Tickets are sold at the small house beside the pier. Children under ten travel free. The last ferry "
        "comes back at nine in the evening, and the harbour closes at ten.",
        "The ferry leaves at eight, not at seven.",
    ),
    (
        "Dear Ms. Keller,\n\nthank you for your order of 12 May. The three chairs were sent today and will arrive by "
        "Friday. The table is not in stock at the moment; we expect it at the end of the month. You will receive a "
        "message when it leaves our warehouse.\n\nKind regards,\nTom Brandt",
        "Replace Ms. Keller by Mr. Olsen.",
    ),
    (
        "To make the dough, mix 500 grams of flour with a spoon of salt and 300 millilitres of warm water. Add 20 "
        "grams of yeast and knead for ten minutes. Cover the bowl and let the dough rest for one hour. Then form two "
        "loaves and bake them at 220 degrees for 35 minutes.",
        "Bake the loaves for 40 minutes.",
    ),
    (
        "Water boils at 100 degrees Celsius at sea level. On a high mountain the air is thinner, so water boils at a "
        "lower temperature. Food therefore takes longer to cook there. A pressure cooker raises the pressure, and with "
        "it the temperature at which water boils.",
        "Write the word temperature in capital letters.",
    ),
)
RECORDS = (
    '{"id": 1, "name": "Anna Berg", "city": "Oslo", "age": 34, "active": true},',
    '{"sku": "A-100", "title": "Wooden chair", "price": 49.5, "currency": "EUR", "in_stock": 12},',
    '{"date": "2024-01-01", "min_c": -3, "max_c": 4, "rain_mm": 0.0, "wind": "north"},',
    '{"flight": "LH100", "from": "Frankfurt", "to": "Rome", "departs": "08:15", "gate": "B12"},',
    '{"question": "What is 2 + 3?", "options": ["4", "5", "6"], "answer": "5"},',
    '{"country": "France", "capital": "Paris", "population": 68000000, "continent": "Europe"},',
    '{"host": "web-1", "cpu_percent": 12.5, "memory_mb": 512, "status": "up", "tags": ["web", "eu"]},',
    '{"title": "Dune", "author": "Frank Herbert", "year": 1965, "genres": ["science fiction"]},',
)
TOPICS = (
    "a lighthouse keeper in winter",
    "how bread is made",
    "why the sky is blue",
    "a train journey through the mountains",
    "the first day at a new school",
    "how bees find flowers",
    "an old clock that stops at midnight",
    "what makes a good friend",
)


def _edit(text: str, change: str) -> str:
    return f"Write the following text again with one change. {change} Write nothing else.\n\n{text}"


def _file_edits(path: Path) -> list[Question]:
    """Pieces of a file, cut at lines: the change is a line above them."""
    pieces, piece = list[str](), ""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        if piece and len(piece) + len(line) > PIECE:
            pieces.append(piece)
            piece = ""
        piece += line[:PIECE]
    pieces.append(piece)
    change = "Put the line DRAFT above it."
    return [Question(_edit(piece, change)) for piece in pieces[:PIECES] if piece.strip()]


def make_tasks(files: Sequence[Path]) -> dict[str, list[Question]]:
    """Questions by task. `files`: of texts that are to be edited, a task each. Raises OSError."""
    edits = [(_edit(text, change), text) for text, change in EDITS]
    tasks = {
        "edit": [Question(question) for question, _ in edits],
        "predicted": [Question(question, text) for question, text in edits],
        "json": [
            Question(f"Write ten more records of this form, one a line, as JSON. Write nothing else.\n\n{record}")
            for record in RECORDS
        ],
        "prose": [Question(f"Write three paragraphs about {topic}.") for topic in TOPICS],
    }
    return tasks | {f"edit of {path.name}": _file_edits(path) for path in files}
