"""What clients read of a real engine with a drafter: stop strings and usage are those of single tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.protocol.messages import TokensOut
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_http.frames import Frame
from tests.cut_streams import CHAT, COMPLETIONS, Case, asking, data_of, same_content
from tests.drafters import KINDS, ScriptedDrafter
from tests.engine.test_core_pipeline import make_connector
from tests.in_loop_engine import InLoopEngine
from tests.server.test_continued_generation import PREDICTION, config_of, node_of, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_connectors.base import Connector

pytestmark = [pytest.mark.anyio]

STOPS = ["e ", "th", "zzz"]
ASKED = [
    plain("stop strings", CHAT, stop=STOPS, min_tokens=5, max_tokens=30).drawn(temperature=0),
    plain("stop strings that are kept", COMPLETIONS, stop=STOPS, include_stop_str_in_output=True, logprobs=2, n=2,
          max_tokens=30).drawn(temperature=0.9, seed=4),
    plain("a prediction", CHAT, n=2, max_tokens=30, prediction=PREDICTION).drawn(temperature=0.9, seed=4),
    plain("echo", COMPLETIONS, prompt=["Once upon", "A"], echo=True, logprobs=1).drawn(temperature=0.9, seed=-5),
    plain("an end", COMPLETIONS, max_tokens=40, logprobs=2, return_token_ids=True).drawn(temperature=1.4, seed=9),
]  # fmt: skip


class ListeningEngine(InLoopEngine):
    """Knows all tokens that it has told."""

    def _deliver(self) -> None:
        for message in self._mailbox.outbox:
            if isinstance(message, TokensOut):
                for part in message.sequences:
                    key = message.request_id, part.index
                    self.told.setdefault(key, []).extend(token.token_id for token in part.tokens)
        super()._deliver()

    told: dict[tuple[str, int], list[int]]

    @property
    def answers(self) -> list[list[int]]:
        """After their prompts."""
        prompts = {request.request_id: request.prompt_token_ids for request in self.requests}
        return [[*prompts[name], *ids] for (name, _), ids in self.told.items()]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[DeviceExecutor, Connector]]:
    executor = DeviceExecutor.started(config_of("demo_model"), lambda text: None)
    for connector in make_connector(executor):
        yield executor, connector
    executor.close()


async def told_by(
    served: tuple[DeviceExecutor, Connector], drafter: ScriptedDrafter | None
) -> tuple[list[list[Any]], ListeningEngine]:
    engine = ListeningEngine(config_of("demo_model"), *served, drafter)
    engine.told = {}
    async with asyncio.TaskGroup() as group, contextlib.AsyncExitStack() as stack:
        running = group.create_task(engine.run())
        ask = asking(node_of(engine, "node", "demo_model", stack))
        found = await asyncio.gather(*(ask(case.path, case.body) for case in ASKED))
        await engine.rest()
        running.cancel()
    return found, engine


@pytest.mark.long
async def test_each_token_of_a_run_has_its_logprobs_and_offset(served: tuple[DeviceExecutor, Connector]) -> None:
    _, engine = await told_by(served, None)
    found, engine = await told_by(served, ScriptedDrafter.of(engine.answers, "right"))
    case, messages = next((one, found[index]) for index, one in enumerate(ASKED) if "an end" in one.name)
    events = [json.loads(block[6:]) for block in data_of(messages).split(b"\n\n") if block[6:].startswith(b"{")]
    shown = [choice for event in events for choice in event["choices"] if choice["token_ids"]]
    runs = [one for frame in messages if isinstance(frame, Frame) for one in frame.choices]
    assert case.path == COMPLETIONS
    assert max(len(one.token_ids) for one in runs) > 2
    assert [tuple(choice["token_ids"]) for choice in shown] == [one.token_ids for one in runs]
    text, offsets = "".join(choice["text"] for choice in shown), list[int]()
    for choice in shown:
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(choice["token_ids"])}
        offsets += logprobs["text_offset"]
        for token, at in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            is_end = (token, at) == ("<|im_end|>", len(text))  # no text shows it
            assert is_end or text.startswith(token, at)
    assert offsets == sorted(offsets)
    assert offsets[0] == 0


@pytest.mark.long
async def test_texts_with_drafts(served: tuple[DeviceExecutor, Connector], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1.8e9)  # answers say when they were created
    single, engine = await told_by(served, None)
    assert any(b'"finish_reason":"stop"' in data_of(one) for one in single)
    for kind in KINDS:
        drafter = ScriptedDrafter.of(engine.answers, kind)
        found, _ = await told_by(served, drafter)
        assert drafter.num_proposed > 20
        for case, one, other in zip(ASKED, found, single, strict=True):
            assert isinstance(case, Case)
            same_content(data_of(one), data_of(other))
        assert (sum(map(len, found)) < sum(map(len, single))) == (kind != "wrong")
