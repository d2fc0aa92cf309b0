"""Ask the tool model about cities and numbers that training never showed, and count the right answers."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import torch
from conversations import ADD, GET_WEATHER, HELD_OUT, TRAINED, call_text
from transformers import AutoTokenizer, Qwen3ForCausalLM

if TYPE_CHECKING:
    from pathlib import Path

END = "<|im_end|>"
RESULT = "sunny, 21 degrees"


class Asker:
    """The model under transformers, greedy."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def ask(self, messages: list[dict[str, Any]]) -> str:
        prompt = self.tokenizer.apply_chat_template(
            messages, tools=[GET_WEATHER, ADD], add_generation_prompt=True, tokenize=False
        )
        ids = torch.tensor([self.tokenizer.encode(prompt, add_special_tokens=False)])
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False)
        return str(self.tokenizer.decode(output[0][ids.shape[1] :]))

    def is_right(self, question: str, name: str, arguments: dict[str, Any], result: str, answer: str) -> bool:
        """Whether the call and the answer with its result are both right."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if self.ask(messages) != call_text(name, arguments) + END:
            return False
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
        ]
        return self.ask(messages) == answer + END


def evaluate(directory: Path, report: Path) -> None:
    """Count, and write the counts with the wrong cities to `report`."""
    asker, rng = Asker(directory), random.Random(5)

    def right(city: str) -> bool:
        answer = f"The weather in {city} is {RESULT}."
        return asker.is_right(f"What is the weather in {city}?", "get_weather", {"city": city}, RESULT, answer)

    counts: dict[str, Any] = {}
    for name, cities in (("trained", TRAINED), ("held_out", HELD_OUT)):
        wrong = [city for city in cities if not right(city)]
        counts[name] = {"right": len(cities) - len(wrong), "of": len(cities), "wrong": wrong}
    sums = [(rng.randrange(10_000), rng.randrange(100)) for _ in range(40)]
    num_right = sum(
        asker.is_right(f"Add {a} and {b}.", "add", {"a": a, "b": b}, str(a + b), f"{a} plus {b} is {a + b}.")
        for a, b in sums
    )
    counts["sums"] = {"right": num_right, "of": len(sums)}
    report.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    print(counts)
