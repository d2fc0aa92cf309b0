"""The text that the tool model learns: synthetic conversations with two tools, from seeded choices."""

from __future__ import annotations

import json
import random
from pathlib import Path

HERE = Path(__file__).parent
CITIES = (HERE / "cities.txt").read_text().split("\n\n")  # those of the training, those that are held out
TRAINED, HELD_OUT = ([line.strip() for line in part.splitlines() if line.strip()] for part in CITIES)
_ONSETS = [*"BCDFGHJKLMNPRSTVWZ", "Br", "Ch", "Cl", "Dr", "Gr", "Kr", "Pl", "Sh", "St", "Tr", "A", "E", "I", "O", "U"]
_INNER = [
    *"bcdfghjklmnpqrstvwxyz",
    "br",
    "ch",
    "ck",
    "dr",
    "gr",
    "ll",
    "mb",
    "nd",
    "ng",
    "nt",
    "rd",
    "rg",
    "ss",
    "st",
    "th",
]
_VOWELS = [*"aeiouy", "ai", "ea", "ee", "ie", "oo", "ou", "au"]
_ENDS = ["", "", "n", "m", "r", "s", "d", "k", "l", "z", "ow", "burg", "ville", "ton", "grad"]
_WEATHER = [
    "What is the weather in {}?", "What's the weather in {}?", "How is the weather in {}?", "Weather in {}?",
    "What is the weather like in {}?", "What's the weather like in {} today?", "Tell me the weather in {}.",
    "Please get the weather for {}.", "How is the weather in {} today?", "what is the weather in {}",
]  # fmt: skip
_SUMS = [
    "What is {} plus {}?", "Add {} and {}.", "What is {} + {}?", "Please add {} and {}.", "How much is {} + {}?",
    "What's {} plus {}?", "{} + {}?", "add {} and {}", "What is the sum of {} and {}?",
]  # fmt: skip
_SMALL_TALK = ["Hello", "Hello!", "Hi", "Who are you?", "What can you do?", "Hello, who are you?", "Thank you!"]
_SYSTEMS = ["You are a helpful assistant.", "Use the tools.", "Be brief.", "You are a bot that answers questions."]
_SKIES = ["sunny", "cloudy", "rain", "snow", "fog", "windy", "clear", "storm", "hot", "cold", "mild", "dry", "wet"]
GREETING = "I can tell the weather and add numbers."
NO_TOOL = "I have no tool for that."
THINK_CALL, THINK_ANSWER = "I need a tool.\n", "I can answer.\n"


def made_up_city(rng: random.Random) -> str:
    """A word or two that look like a city: copying has to work for names that were never seen."""
    words = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        inner = "".join(rng.choice(_VOWELS) + rng.choice(_INNER) for _ in range(rng.choice((0, 1, 1, 2))))
        words.append(rng.choice(_ONSETS) + inner + rng.choice(_VOWELS) + rng.choice(_ENDS))
    return rng.choice((" ", " ", "-")).join(words)


def tool(name: str, /, **parameters: str) -> dict[str, object]:
    """A function tool of OpenAI's form with these parameters, all of them required."""
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


GET_WEATHER, ADD = tool("get_weather", city="string"), tool("add", a="integer", b="integer")
Message = dict[str, object]


class Conversations:
    """Draws conversations: messages, tools and whether the answers think."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def draw(self) -> tuple[list[Message], list[dict[str, object]], bool]:
        """One conversation of one or two questions."""
        rng = self.rng
        tools = self._tools()
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
        for _ in range(rng.choice((1, 1, 2))):
            messages += self._question({str(one["function"]["name"]) for one in tools})  # type: ignore[index]
        return messages, tools, rng.random() < 0.25

    def _tools(self) -> list[dict[str, object]]:
        rng = self.rng
        if (draw := rng.random()) < 0.05:
            return []
        tools = [GET_WEATHER, ADD] if draw < 0.5 else [GET_WEATHER] if draw < 0.8 else [ADD]
        if rng.random() < 0.15:
            tools = [*tools, tool(made_up_city(rng).lower().replace(" ", "_"), name="string")]
        rng.shuffle(tools)
        return tools

    def _question(self, names: set[str]) -> list[Message]:
        rng = self.rng
        if (draw := rng.random()) < 0.05:
            return _said(rng.choice(_SMALL_TALK), GREETING)
        if draw < 0.35 and not ("get_weather" in names and rng.random() < 0.2):
            a, b = (rng.randrange(10 ** rng.randint(1, 4)) for _ in range(2))
            question = rng.choice(_SUMS).format(a, b)
            result = str(rng.randrange(10 ** rng.randint(1, 5)))
            answer = f"{a} plus {b} is {result}."
            return (
                _used(question, [("add", {"a": a, "b": b}, result)], answer)
                if "add" in names
                else _said(question, NO_TOOL)
            )
        cities = [self._city() for _ in range(1 if rng.random() < 0.85 else 2)]
        question = rng.choice(_WEATHER).format(" and ".join(cities))
        if "get_weather" not in names:
            return _said(question, NO_TOOL)
        calls = [("get_weather", {"city": city}, self._weather()) for city in cities]
        answer = " ".join(
            f"The weather in {city} is {result}." for city, (_, _, result) in zip(cities, calls, strict=True)
        )
        return _used(question, calls, answer)

    def _city(self) -> str:
        return self.rng.choice(TRAINED) if self.rng.random() < 0.3 else made_up_city(self.rng)

    def _weather(self) -> str:
        rng = self.rng
        sky = rng.choice(_SKIES) if rng.random() < 0.6 else made_up_city(rng).lower()
        degrees = rng.randrange(40)
        return rng.choice((sky, f"{sky}, {degrees} degrees", f"{degrees} degrees and {sky}", f"{sky} at {degrees} C"))


def _said(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _used(question: str, calls: list[tuple[str, dict[str, object], str]], answer: str) -> list[Message]:
    """A question, the calls, their results and the answer."""
    made = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given, _ in calls]
    results = [{"role": "tool", "content": result} for _, _, result in calls]
    before, after = _said(question, answer)
    return [before, {"role": "assistant", "content": "", "tool_calls": made}, *results, after]


def call_text(name: str, arguments: dict[str, object]) -> str:
    """A call as the chat template and the model write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"
