"""Beam searches through P and D, in both orders, and on one node: transformers' answers, and nothing is left."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.integration.calls import Call
from tests.integration.foreign import num_redraws
from tests.integration.system import POLL_S, Path, System, running_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.integration.reference import DemoModel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPTS = ("Once upon a time there was a", "Mira 4831. Oskar 2210. Lena 7745. Anton 1902. Oskar? " * 3)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"length_penalty": 0.3, "early_stopping": True, "stop_token_ids": [263, 278]},
)
SEARCH = {"use_beam_search": True, "n": 4, "max_tokens": 16, "logprobs": 0}


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """D has ten slots and few blocks: two searches and a stream at a time. No logits stage."""
    flags = ("--load-deadline-s=400", "--max-num-seqs=10")
    with running_system(*flags, role_flags={"decode": ["--num-blocks=40"]}) as system:
        yield system


@pytest.fixture(scope="module")
def expected(whole_model: DemoModel) -> list[list[list[int]]]:
    """Of each prompt with each of the settings."""
    return [by_transformers(whole_model, prompt, settings) for prompt in PROMPTS for settings in SETTINGS]


def by_transformers(model: DemoModel, prompt: str, settings: dict[str, Any]) -> list[list[int]]:
    ids = torch.tensor([model.encode(prompt)])
    stop_ids = [model.eos_token_id, *settings.get("stop_token_ids", ())]
    out = model._model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, num_beams=4,
        num_return_sequences=4, eos_token_id=stop_ids, pad_token_id=0,
        length_penalty=settings.get("length_penalty", 1.0), early_stopping=settings.get("early_stopping", False),
    )  # fmt: skip
    rows = out[:, ids.shape[1] :].tolist()
    ends = [min([index + 1 for index, token in enumerate(row) if token in stop_ids] + [16]) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]


@pytest.mark.parametrize("path", Path)
def test_answers_equal_transformers(
    path: Path, system: System, whole_model: DemoModel, expected: list[list[list[int]]]
) -> None:
    """Four searches at once beside greedy answers, two of them streamed."""
    before = num_redraws(system)
    asked = [(prompt, settings) for prompt in PROMPTS for settings in SETTINGS]
    bodies = [
        SEARCH | settings | {"prompt": prompt, "stream": index % 2 == 1, "cache_salt": f"{path}{index}"}
        for index, (prompt, settings) in enumerate(asked)
    ]
    others = [{"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0, "cache_salt": f"{path}"}] * 3
    answers = system.ask_all(path, [("/v1/completions", body) for body in [*bodies, *others]])
    for wanted, answer in zip(expected, answers, strict=False):
        found = [whole_model.token_ids(choice["logprobs"]["tokens"]) for choice in answer.choices]
        assert found == wanted
        assert answer.headers["x-pd-prefill"] == system.prefiller_of(path)
    system.settle()
    assert num_redraws(system) == before, "P's candidates were adopted"


@pytest.mark.parametrize("path", Path)
def test_a_client_that_leaves_leaves_nothing(path: Path, system: System) -> None:
    """It leaves once D says that the search runs there."""
    url = system.urls[system.mixed] if path is Path.MIXED else system.router_url
    body = SEARCH | {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True}

    async def leave() -> None:
        call = Call(url, body, "" if path is Path.MIXED else path.value)
        while not system.metric("decode", "pd_num_running"):
            assert not call.done, await call.outcome()
            await asyncio.sleep(POLL_S)
        await call.leave()

    asyncio.run(leave())
    system.settle()
