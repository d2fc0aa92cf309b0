"""Sampling, its edges and its logprobs come out of P and D as they come out of one node, streamed or not."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import orjson
import pytest

from tests.integration.system import Answer, Path, System

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.reference import DemoModel, Reference

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOGPROB_TOLERANCE = 1e-4
STORY = "Mira 4831. Oskar 2210. Once upon a time there was a"  # what follows is open
FACTS = "Mira 4831. Oskar 2210. Lena 7745. Anton 1902. Oskar?"
EOS = 2
HANDOFFS = (Path.P_FIRST, Path.D_FIRST)

# name -> what is added to a completion of STORY
SETTINGS: dict[str, dict[str, Any]] = {
    "seed": {"seed": 1, "temperature": 1.0, "logprobs": 5},
    "hot": {"seed": -7, "temperature": 2.0, "logprobs": 20, "ignore_eos": True},
    "n": {"seed": 3, "n": 2, "temperature": 1.2, "logprobs": 2},
    "n of different lengths": {"seed": 5, "n": 5, "temperature": 1.5, "logprobs": 0, "logit_bias": {str(EOS): 4}},
    "n greedy": {"n": 3, "temperature": 0, "logprobs": 1},
    "n streams of one token": {"seed": 4, "n": 4, "temperature": 1.5, "max_tokens": 1, "logprobs": 1},
    "presence": {"seed": 6, "temperature": 1.0, "presence_penalty": 1.5, "logprobs": 1},
    "frequency": {"seed": 6, "temperature": 0.8, "frequency_penalty": 2.0, "ignore_eos": True, "logprobs": 1},
    "repetition": {"temperature": 0, "repetition_penalty": 1.3, "ignore_eos": True, "logprobs": 1},
    "all penalties, n": {"seed": 8, "n": 3, "temperature": 1.1, "presence_penalty": -1.0, "frequency_penalty": 0.7,
                         "repetition_penalty": 1.1, "ignore_eos": True, "logprobs": 1},
    "penalties decide": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 2.0, "logprobs": 0,
                         "logit_bias": {"1000": 100, "1001": 100, "1002": 100}},
    "bias": {"seed": 9, "temperature": 1.0, "logit_bias": {"1000": 8, "1001": 7.5, "17": -100}, "logprobs": 3},
    "allowed": {"seed": 19, "n": 2, "temperature": 1.5, "allowed_token_ids": [*range(1000, 1020), EOS], "logprobs": 1},
    "bad words": {"temperature": 0, "bad_words": ["the", "was a", "boy named"], "ignore_eos": True, "logprobs": 1},
    "top_k": {"seed": 10, "temperature": 1.5, "top_k": 4, "ignore_eos": True, "logprobs": 1},
    "top_p": {"seed": 11, "temperature": 1.5, "top_p": 0.7, "ignore_eos": True, "logprobs": 1},
    "min_p": {"seed": 12, "temperature": 1.8, "min_p": 0.05, "ignore_eos": True, "logprobs": 1},
    "all limits": {"seed": 13, "n": 2, "temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "logprobs": 1},
    "min_tokens": {"seed": 14, "temperature": 1.0, "min_tokens": 6, "logit_bias": {str(EOS): 100}, "logprobs": 1},
    "one token": {"seed": 15, "temperature": 1.0, "max_tokens": 1, "logprobs": 4},
    "two tokens": {"seed": 15, "temperature": 1.0, "max_tokens": 2, "logprobs": 4},
    "eos first": {"temperature": 0, "logit_bias": {str(EOS): 100}, "logprobs": 1},
    "eos first, n": {"seed": 16, "n": 2, "temperature": 1.0, "logit_bias": {str(EOS): 100}, "logprobs": 1},
    "eos ignored": {"temperature": 0, "logit_bias": {str(EOS): 100}, "ignore_eos": True, "logprobs": 1},
    "eos included": {"temperature": 0, "logit_bias": {str(EOS): 100}, "include_stop_str_in_output": True,
                     "skip_special_tokens": False, "logprobs": 0},
    "stop token first": {"temperature": 0, "logit_bias": {"77": 100}, "stop_token_ids": [77], "logprobs": 1},
    "no logprobs": {"seed": 17, "temperature": 1.3, "n": 2},
}  # fmt: skip


@pytest.fixture
def system(system_with_mixed: System) -> System:
    return system_with_mixed


@pytest.fixture(scope="module")
def alone(system_with_mixed: System) -> Alone:
    return Alone(system_with_mixed)


class Alone:
    """Answers of the mixed node, each asked for once and by itself."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._answers: dict[bytes, Answer] = {}

    def answer(self, endpoint: str, body: dict[str, Any]) -> Answer:
        key = orjson.dumps([endpoint, body])
        if key not in self._answers:
            self._answers[key] = self._system.ask(Path.MIXED, endpoint, body)
        return self._answers[key]

    def setting(self, name: str) -> Answer:
        return self.answer(COMPLETIONS, body_of(name))


def body_of(name: str) -> dict[str, Any]:
    """A completion with this setting."""
    return {"prompt": STORY, "max_tokens": 12} | SETTINGS[name]


class Together:
    """Answers to all settings at once by one order, every second one streamed. Asked for once."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._answers: dict[tuple[Path, bool], dict[str, Answer]] = {}

    def setting(self, name: str, path: Path, *, stream: bool) -> Answer:
        names = list(SETTINGS)
        is_first_streamed = stream ^ bool(names.index(name) % 2)
        key = path, is_first_streamed
        if key not in self._answers:
            bodies = [salted(path, body_of(one), stream=bool(i % 2) ^ is_first_streamed) for i, one in enumerate(names)]
            answers = self._system.ask_all(path, [(COMPLETIONS, body) for body in bodies])
            self._answers[key] = dict(zip(names, answers, strict=True))
        return self._answers[key][name]


@pytest.fixture(scope="module")
def together(system_with_mixed: System) -> Together:
    return Together(system_with_mixed)


def settings_by_order() -> Iterator[object]:
    """Each setting in both orders, streamed in one of them; what is streamed in the other one is slow."""
    for (index, name), (by_d, path), stream in product(enumerate(SETTINGS), enumerate(HANDOFFS), (False, True)):
        marks = [pytest.mark.slow] if (index + by_d + stream) % 2 else []
        yield pytest.param(name, path, stream, id=f"{name}-{path}-{'stream' if stream else 'whole'}", marks=marks)


@pytest.mark.parametrize(("name", "path", "stream"), list(settings_by_order()))
def test_settings(name: str, path: Path, stream: bool, alone: Alone, together: Together) -> None:
    """Handed over with all others at once: a sequence's tokens do not depend on its batch either."""
    check_handed_over(together.setting(name, path, stream=stream), alone.setting(name))


def salted(path: Path, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Cold on P and on D."""
    body = body | {"cache_salt": f"{path} {stream} {body}"}
    return body | {"stream": True, "stream_options": {"include_usage": True}} if stream else body


def check_same(
    system: System, path: Path, endpoint: str, body: dict[str, Any], mixed: Answer, *, stream: bool
) -> Answer:
    """The handoff's answer is the mixed node's, and the prompt was computed on P."""
    answer = system.ask(path, endpoint, salted(path, body, stream=stream))
    check_handed_over(answer, mixed)
    return answer


def check_handed_over(answer: Answer, mixed: Answer) -> None:
    """It is the mixed node's, and the prompt was computed on P."""
    assert answer.headers["x-pd-prefill"] == "prefill"
    assert answer.headers["x-pd-decode"] == "decode"
    assert answer.body["usage"] == mixed.body["usage"] | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert len(answer.choices) == len(mixed.choices)
    for ours, theirs in zip(answer.choices, mixed.choices, strict=True):
        assert ours["index"] == theirs["index"]
        assert ours.get("text") == theirs.get("text")
        assert (ours.get("message") or {}).get("content") == (theirs.get("message") or {}).get("content")
        assert ours["finish_reason"] == theirs["finish_reason"]
        assert ours.get("stop_reason") == theirs.get("stop_reason")
        same_numbers(ours.get("logprobs"), theirs.get("logprobs"))


def same_numbers(ours: Any, theirs: Any) -> None:
    """Asserts that they are equal, floats to the tolerance; keys in any order, since near ties may swap."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            same_numbers(ours[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same_numbers(one, other)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)
    else:
        assert ours == theirs


@pytest.fixture(scope="module")
def story(demo_model: DemoModel) -> Reference:
    """What follows STORY."""
    return demo_model.generate([demo_model.encode(STORY)], 12)[0]


@pytest.mark.parametrize("path", Path)
def test_every_logprob_is_there_once(path: Path, system: System, demo_model: DemoModel, story: Reference) -> None:
    body = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "once"}
    answer = system.ask(path, COMPLETIONS, body)
    logprobs = answer.choices[0]["logprobs"]
    assert demo_model.token_ids(logprobs["tokens"]) == list(story.tokens)
    assert logprobs["token_logprobs"] == pytest.approx(list(story.logprobs), abs=LOGPROB_TOLERANCE)
    assert logprobs["text_offset"] == sorted(set(logprobs["text_offset"]))
    assert answer.body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", HANDOFFS)
@pytest.mark.parametrize("where", ["in the first token", "over the border", "after the border", "in none"])
def test_stop_strings(
    where: str, path: Path, stream: bool, system: System, demo_model: DemoModel, story: Reference, alone: Alone
) -> None:
    """The border: P samples the first token, D the second."""
    first, second, third = (demo_model.text([token]) for token in story.tokens[:3])
    stop, text = {
        "in the first token": (first, ""),
        "over the border": (first[-1] + second[0], first[:-1]),
        "after the border": (second + third, first),
        "in none": ("no such text", demo_model.text(story.until(EOS).tokens)),
    }[where]
    body = {"prompt": story.prompt, "max_tokens": 12, "temperature": 0, "stop": [stop, "another"], "logprobs": 1}
    mixed = alone.answer(COMPLETIONS, body)
    assert mixed.choices[0]["text"] == text
    if where != "in none":
        assert mixed.choices[0]["stop_reason"] == stop
    check_same(system, path, COMPLETIONS, body, mixed, stream=stream)


@pytest.mark.parametrize("path", HANDOFFS)
def test_the_first_tokens_of_some_sequences_end_them(path: Path, system: System, alone: Alone) -> None:
    """One sequence's first token completes a stop string, others go on."""
    body = {"prompt": STORY, "max_tokens": 8, "seed": 21, "n": 4, "temperature": 2.0, "logprobs": 0}
    plain = alone.answer(COMPLETIONS, body)
    firsts = [choice["logprobs"]["tokens"][0] for choice in plain.choices]
    assert len(set(firsts)) > 1, "the seed must make them differ"
    body["stop"] = firsts[1]
    mixed = alone.answer(COMPLETIONS, body)
    assert mixed.choices[1]["text"] == ""
    assert {choice["finish_reason"] for choice in mixed.choices} == {"stop", "length"}
    check_same(system, path, COMPLETIONS, body, mixed, stream=False)
    check_same(system, path, COMPLETIONS, body, mixed, stream=True)


@pytest.fixture(scope="module")
def turn(demo_model: DemoModel) -> Reference:
    """The answer to FACTS, to its end."""
    [reference] = demo_model.generate([demo_model.chat_prompt([{"role": "user", "content": FACTS}])])
    return reference.until(EOS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", HANDOFFS)
def test_a_turn_that_is_over_at_once(
    path: Path, stream: bool, system: System, demo_model: DemoModel, turn: Reference, alone: Alone
) -> None:
    """Greedy decoding itself yields the end of the turn as the first token."""
    assert turn.tokens[-1] == EOS
    body = {"prompt": [*turn.prompt, *turn.tokens[:-1]], "max_tokens": 12, "temperature": 0, "logprobs": 1}
    mixed = alone.answer(COMPLETIONS, body)
    [choice] = mixed.choices
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    assert demo_model.token_ids(choice["logprobs"]["tokens"]) == [EOS]
    check_same(system, path, COMPLETIONS, body, mixed, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", HANDOFFS)
def test_chat(path: Path, stream: bool, system: System, alone: Alone) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": FACTS}]
    body = {"messages": messages, "max_completion_tokens": 12, "seed": 30, "n": 2, "temperature": 1.4}
    body |= {"logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    mixed = alone.answer(CHAT, body)
    assert all(len(choice["logprobs"]["content"]) == 12 for choice in mixed.choices)
    check_same(system, path, CHAT, body, mixed, stream=stream)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", HANDOFFS)
def test_several_prompts(path: Path, stream: bool, system: System, demo_model: DemoModel, alone: Alone) -> None:
    """A ticket is for one prompt, so that the router sends these D-first whatever was asked for."""
    prompts = [demo_model.encode(STORY), demo_model.encode("Zoe 1234. Zoe?"), demo_model.encode("Hello! " * 40)]
    body = {"prompt": prompts, "max_tokens": 9, "seed": 31, "n": 2, "temperature": 1.2, "logprobs": 1}
    mixed = alone.answer(COMPLETIONS, body)
    assert len(mixed.choices) == 6
    answer = check_same(system, path, COMPLETIONS, body, mixed, stream=stream)
    assert answer.headers["x-pd-route"].startswith("d-first")


def test_seeds_matter(system: System) -> None:
    body = {"prompt": STORY, "max_tokens": 12, "temperature": 1.5, "ignore_eos": True}
    texts = [system.ask(Path.P_FIRST, COMPLETIONS, body | {"seed": seed}).choices[0]["text"] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


@pytest.mark.parametrize("name", ["n", "bias", "min_tokens", "no logprobs"])
def test_a_router_that_knows_no_tickets(name: str, system: System, alone: Alone) -> None:
    """As vLLM's routers do it: P's whole answer first, then its dict to D, with an address that they made up."""
    body = body_of(name)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
             "remote_host": None, "remote_port": None}  # fmt: skip
    body["cache_salt"] = f"foreign {name}"
    given = system.ask_node("prefill", COMPLETIONS, body | {"max_tokens": 1, "kv_transfer_params": asked})
    params = given.body["kv_transfer_params"] | {"remote_host": "192.0.2.1", "unknown": 1}
    answer = system.ask_node("decode", COMPLETIONS, body | {"kv_transfer_params": params})
    assert answer.headers["x-pd-prefill"] == "prefill"
    for ours, theirs in zip(answer.choices, alone.setting(name).choices, strict=True):
        assert ours["text"] == theirs["text"]
        assert ours["finish_reason"] == theirs["finish_reason"]
        same_numbers(ours["logprobs"], theirs["logprobs"])
