"""Answers of scripted engines that are cut after each frame and continued by a second node."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections import Counter
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.protocol.messages import PromptRead, Timeline
from pd_cluster.server.app import create_app
from pd_cluster.server.params.sampling import SamplingDefaults
from pd_cluster.server.state import NodeState
from pd_cluster.server.tools.known_formats import FORMATS
from pd_http.frames import AnyFrame, Continuation, KnownChoice
from tests.cut_streams import (
    CHAT,
    COMPLETIONS,
    Case,
    Refused,
    Said,
    asking,
    check_cuts,
    continuation_of,
    continuing,
    data_of,
    same_bytes,
    same_choices,
)
from tests.server.cut_nodes import (
    ASKED,
    FIRST_CACHED,
    PACKAGE,
    PROMPTS,
    SCRIPTED,
    SECOND_CACHED,
    SEVERAL,
    TOOL,
    Pair,
    chat,
    says_nothing,
    tool_state,
)
from tests.server.fake_engine import FakeEngine, Line
from tests.server.test_template_parser import written

if TYPE_CHECKING:
    from pathlib import Path

    from pd_cluster.config import NodeConfig

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the wall clock is a minute after the one before: `created` must be the first node's."""
    minutes = itertools.count(30_000_000)
    monkeypatch.setattr("time.time", lambda: next(minutes) * 60.0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "texts", "end"), SCRIPTED, ids=lambda value: str(value) if isinstance(value, Case) else ""
)
async def test_a_cut_answer_goes_on_byte_by_byte(case: Case, texts: tuple[str, ...], end: bool) -> None:
    async with Pair(texts, end=end) as pair:
        num_cuts = await check_cuts(case, pair.first, pair.second, same=same_bytes)
        assert num_cuts > 4
        # the last cut is after the last choice's end: nothing is generated
        assert len(pair.engines[1].requests) == num_cuts - 1
        assert all(request.priority == -1 for request in pair.engines[1].requests)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["glm47", "minimax_m2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("glm45", "kimi_k2"))]
)
async def test_a_cut_answer_goes_on_in_formats_of_other_models(name: str) -> None:
    """Reasoning, text and two calls, the second of which is cut off."""
    calls = [("get_weather", {"city": city}) for city in ("é", "Oslo")]
    text = written(FORMATS[name], calls, thought="a", before="b")[:-30]
    case, texts, end = chat(name, text, end=False, tools=[TOOL])
    async with Pair(texts, end=end, tool_format=name) as pair:
        said = Said.by(data_of(await pair.first(case.path, case.body)))
        assert "get_weather" in str(said)
        await check_cuts(case, pair.first, pair.second, same=same_bytes)


@pytest.mark.long
@pytest.mark.parametrize(("case", "texts", "end"), SCRIPTED[:1] + SCRIPTED[5:6] + SCRIPTED[-1:], ids=str)
async def test_the_harness_sees_what_is_missing_without_continuation(
    case: Case, texts: tuple[str, ...], end: bool
) -> None:
    async with Pair(texts, end=end) as pair:
        with pytest.raises(AssertionError, match="cut after message 2 "):
            await check_cuts(case, pair.first, pair.second, same=same_bytes, continues=False)


@pytest.mark.long
async def test_a_cut_answer_to_several_prompts_goes_on() -> None:
    """Prompts that have ended are not computed again, those that have not begun are."""
    case, texts, end = SEVERAL
    async with Pair(texts, end=end) as pair:
        num_cuts = await check_cuts(case, pair.first, pair.second, same=same_choices)
        requests = pair.engines[1].requests
        assert num_cuts > 20
        assert num_cuts < len(requests) < 3 * (num_cuts - 1), "some prompts had ended, and the last cut needs none"
        assert all(request.priority == -1 for request in requests)
        assert any(not request.known for request in requests)
        with pytest.raises(AssertionError, match="cut after message 2 "):
            await check_cuts(case, pair.first, pair.second, same=same_choices, continues=False)


@pytest.mark.long
async def test_of_several_prompts_usage_says_what_the_node_that_began_each_had_cached() -> None:
    case, texts, end = SEVERAL
    async with Pair(texts, end=end) as pair:
        messages = await pair.first(case.path, case.body)
        for num in range(2, len(messages), 5):
            begun = {choice.index // 2 for choice in continuation_of(messages[:num]).choices}
            rest = await pair.second(case.path, continuing(case.body, continuation_of(messages[:num])))
            usage = Said.by(data_of(messages[:num]) + data_of(rest)).usage
            cached = FIRST_CACHED * len(begun) + SECOND_CACHED * (3 - len(begun))
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
    assert len(begun) == 3, "the last cut is after all beginnings"


@pytest.mark.long
async def test_prompts_that_are_only_read_come_once() -> None:
    """With `max_tokens` 0 each choice is its echoed prompt, and ends without a token."""

    num_read: Counter[FakeEngine] = Counter()

    async def read(line: Line) -> None:
        """One prompt after the other."""
        while num_read[line.engine] < line.engine.requests.index(line.request):  # noqa: ASYNC110
            await asyncio.sleep(0)
        line.push(PromptRead(line.request.request_id, timeline=Timeline(queue_s=0.001)))
        await line.taken()
        num_read[line.engine] += 1

    body = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "stream": True, "stream_options": {"include_usage": True}}
    engines = [FakeEngine(read), FakeEngine(read)]
    first, second = (asking(create_app(tool_state(engine, f"node{i}"))) for i, engine in enumerate(engines))
    num_cuts = await check_cuts(Case("only read", COMPLETIONS, body), first, second, same=same_choices)
    assert (num_cuts, len(engines[1].requests)) == (3, 2 + 1 + 0), "those that were read are not read again"
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize(
    ("more", "known", "status", "what"),
    [
        ({"prompt": [PROMPTS[1], PROMPTS[0], PROMPTS[2]]}, {}, 409, "prompt"),
        ({"prompt": PROMPTS[:2]}, {"index": 0}, 409, "prompt"),
        ({}, {"index": 6}, 400, "not below n"),
        ({}, {"num_cached_tokens": 9}, 400, "cannot be cached"),
        ({}, {"num_chars": 99}, 409, "choice 0 release"),
    ],
)
async def test_another_answer_to_several_prompts_is_refused(
    more: dict[str, Any], known: dict[str, Any], status: int, what: str
) -> None:
    case, texts, end = SEVERAL
    async with Pair(texts, end=end) as pair:
        begun = continuation_of((await pair.first(case.path, case.body))[:2])
        choices = (msgspec.structs.replace(begun.choices[0], **known),)
        with pytest.raises(Refused, match=what) as caught:
            await pair.second(case.path, continuing(case.body | more, Continuation(head=begun.head, choices=choices)))
        assert caught.value.status == status
        assert not pair.engines[1].requests


@pytest.mark.long
async def test_a_stream_may_be_cut_twice() -> None:
    case, texts, end = SCRIPTED[2]
    async with Pair(texts, end=end) as pair:
        messages = await pair.first(case.path, case.body)
        rest = await pair.second(case.path, continuing(case.body, continuation_of(messages[:9])))

        async def cut_once(path: str, body: dict[str, Any]) -> list[AnyFrame]:
            return [*messages[:9], *rest[1:]]

        await check_cuts(case, cut_once, pair.first, same=same_bytes)


BODY = {"messages": ASKED, "stream": True, "n": 2, "max_tokens": 5}


def choice(
    index: int = 0, token_ids: tuple[int, ...] = (70,), num_chars: int = 1, finish_reason: str = ""
) -> KnownChoice:
    return KnownChoice(index=index, token_ids=token_ids, num_chars=num_chars, finish_reason=finish_reason)


@pytest.mark.long_cases
@pytest.mark.parametrize(
    ("head", "choices", "more", "status", "what"),
    [
        ({"stream_version": "another"}, [choice()], {}, 409, "of version 'another'"),
        ({"prompt_digest": "00"}, [choice()], {}, 409, "prompt"),
        ({}, [choice()], {"messages": [{"role": "user", "content": "other"}]}, 409, "prompt"),
        ({}, [choice()], {"seed": 4}, 409, "another seed"),
        ({}, [choice(num_chars=99)], {}, 409, "characters here, not 99"),
        ({}, [choice()], {"stop": "e"}, 409, "release"),
        ({}, [choice(token_ids=(70,) * 3, finish_reason="stop")], {"stop": "e"}, 409, "of choice 0 end after"),
        ({}, [choice(token_ids=(70,) * 5)], {}, 409, "has had its last token"),
        ({}, [choice(token_ids=(70,) * 6, finish_reason="length")], {}, 409, "has had its last token"),
        ({}, [choice(2)], {}, 400, "not below n"),
        ({}, [choice(-1)], {}, 400, "not below n"),
        ({}, [choice(), choice()], {}, 400, "twice"),
        ({}, [choice(token_ids=())], {}, 400, "needs token_ids"),
        ({}, [choice(finish_reason="tired")], {}, 400, "needs token_ids"),
        ({}, [choice(token_ids=(1 << 40,))], {}, 400, "outside the vocabulary"),
        ({}, [choice(token_ids=(-1,))], {}, 400, "outside the vocabulary"),
        ({"num_cached_tokens": 1 << 20}, [choice()], {}, 400, "cannot be cached"),
        ({"response_id": "a\nb"}, [choice()], {}, 400, "response_id"),
        ({"created": 1 << 60}, [choice()], {}, 400, "out of range"),
        ({"seed": -1}, [choice()], {}, 400, "out of range"),
        ({}, [choice()], {"stream": False}, 400, "stream: true"),
    ],
)
async def test_a_stream_that_this_node_would_not_write_is_refused(
    head: dict[str, Any], choices: list[KnownChoice], more: dict[str, Any], status: int, what: str
) -> None:
    async with Pair(["e" * 5] * 2, end=False) as pair:
        begun = continuation_of((await pair.first(CHAT, BODY))[:2])
        good, token_id = begun.head, begun.choices[0].token_ids[0]
        choices = [
            msgspec.structs.replace(one, token_ids=tuple(token_id if id == 70 else id for id in one.token_ids))
            for one in choices
        ]
        known = Continuation(head=msgspec.structs.replace(good, **head), choices=tuple(choices))
        with pytest.raises(Refused, match=what) as caught:
            await pair.second(CHAT, continuing(BODY | more, known))
        assert (caught.value.status, caught.value.code) == (
            status,
            "cannot_continue" if status == 409 else "invalid_value",
        )
        assert not pair.engines[1].requests


@pytest.mark.long
async def test_the_replay_of_one_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 16 MiB has room for 8 million tokens, a minute of the node's event loop."""
    async with Pair(["e" * 5] * 2, end=False) as pair:
        begun = continuation_of((await pair.first(CHAT, BODY))[:3])
        monkeypatch.setattr("pd_cluster.server.requests.continuation.MAX_KNOWN_TOKENS", 3)
        with pytest.raises(Refused, match="more than 3 tokens") as caught:
            await pair.second(CHAT, continuing(BODY, begun))
        assert caught.value.code == "cannot_continue"


@pytest.mark.long
async def test_a_stream_goes_on_after_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node renders a template that writes the date as on the day of `created`."""
    tokenizer = tool_state(FakeEngine(says_nothing), "node").tokenizer._tokenizer
    template = tokenizer.chat_template

    async def begun_on(day: str) -> Continuation:
        monkeypatch.setattr(tokenizer, "chat_template", day + template)
        async with Pair(["e" * 5] * 2, end=False) as pair:
            return continuation_of((await pair.first(CHAT, BODY))[:3])

    dated = "{{ strftime_now( '%d %b %Y' ) }}"
    begun = await begun_on(dated)
    day = datetime.fromtimestamp(begun.head.created).strftime("%d %b %Y")
    then = (await begun_on(day)).head
    monkeypatch.setattr(tokenizer, "chat_template", dated + template)
    assert then.prompt_digest != begun.head.prompt_digest, "the clock of this test is not on the real day"
    head = msgspec.structs.replace(
        begun.head, prompt_digest=then.prompt_digest, num_prompt_tokens=then.num_prompt_tokens
    )
    async with Pair(["e" * 5] * 2, end=False) as pair:
        await pair.second(CHAT, continuing(BODY, msgspec.structs.replace(begun, head=head)))
        assert len(pair.engines[1].requests) == 1


@pytest.mark.long
async def test_only_the_node_with_the_same_settings_continues(tmp_path: Path) -> None:
    """What changes the text of an answer changes the version, and so does what ends one."""
    state = tool_state(FakeEngine(says_nothing), "node")
    other = tmp_path / "model"
    shutil.copytree(PACKAGE / "tool_model", other)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))

    def version(config: NodeConfig, **more: Any) -> str:
        return NodeState(
            **{"config": config, "engine": state.engine, "tokenizer": state.tokenizer, "key": b"", **more}
        ).stream_version(state.ready)

    config = state.config
    model, server = config.model, config.server
    versions = [
        version(config),
        version(config, defaults=SamplingDefaults(temperature=0.5)),
        version(config, tool_format=FORMATS["mistral"]),
        version(config, tokenizer=tool_state(state.engine, "node", "demo_model").tokenizer),
        version(replace(config, model=replace(model, served_model_name=("other",)))),
        version(replace(config, model=replace(model, model=str(other)))),
        version(replace(config, model=replace(model, logits_stages=("tests.ban_token:BanToken",)))),
        version(replace(config, server=replace(server, output_parser="a:B"))),
        version(replace(config, server=replace(server, tool_format="none"))),
    ]
    assert len(set(versions)) == len(versions)
    assert version(replace(config, server=replace(server, node_id="another", port=9))) == versions[0]
    shorter = msgspec.structs.replace(state.ready, max_model_len=100)
    other_weights = msgspec.structs.replace(state.ready, fingerprint="other")
    assert len({state.stream_version(ready) for ready in (state.ready, shorter, other_weights)}) == 3
