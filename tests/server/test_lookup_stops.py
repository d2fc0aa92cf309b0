"""Stop strings inside runs of accepted drafts, of the drafter of the product: found where single tokens find them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pd_http.frames import Frame
from tests.cut_streams import CHAT, COMPLETIONS, Case, Said, data_of, same_content
from tests.lookup_nodes import longest_run, running, text_of, workers
from tests.server.test_continued_generation import plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lookup_nodes import Worker

pytestmark = pytest.mark.anyio

BASE = plain("a story", CHAT, max_tokens=40, temperature=0, logprobs=True, top_logprobs=1, ignore_eos=True)
COUNTING = plain(
    "counting", COMPLETIONS, guided_regex="(ab|cde){9}", max_tokens=40, temperature=0.9, seed=4, logprobs=1
)


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Worker]]:
    with workers("d0", "d1") as found:
        yield found


def ends(text: str, step: int) -> Iterator[dict[str, Any]]:
    """Settings of stop strings in the second half of a text, at each `step`th letter.

    They are inside a token, over the border of two, or of one letter.
    """
    for at in range(len(text) // 2, len(text) - 6, step):
        for length in (1, 3, 6):
            if text.find(stop := text[at : at + length]) > len(text) // 4:  # the first tokens are in no run
                yield {"stop": [stop, "zzz"], "include_stop_str_in_output": at % 2 == 0}
    yield {"stop": [text[len(text) // 3 :][:4]], "min_tokens": 25}


@pytest.mark.long
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 23])
async def test_stop_strings(found: dict[str, Worker], step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1.8e9)  # answers say when they were created
    lasts, runs = set[int](), list[int]()
    async with running(found, {"d0"}) as nodes:
        drafting, alone = nodes["d0"].ask, nodes["d1"].ask
        text = text_of(data_of(await alone(CHAT, BASE.body)))
        predicted = BASE.drawn(prediction={"type": "content", "content": text})
        asked: list[Case] = [predicted.drawn(**end) for end in ends(text, step)]
        asked += [COUNTING.drawn(stop=stop, n=2, min_tokens=9) for stop in ("bc", "ecde", "dec")]
        for case in asked:
            messages, single = await drafting(case.path, case.body), await alone(case.path, case.body)
            same_content(data_of(messages), data_of(single))
            assert Said.by(data_of(messages)).choices[0]["ends"][0][0] == "stop" or case.path == COMPLETIONS
            assert longest_run(single) == 1
            runs.append(longest_run(messages))
            told = [one for frame in messages if isinstance(frame, Frame) for one in frame.choices if one.token_ids]
            lasts.add(len(told[-1].token_ids))
        # Not each: a step that overlaps another one drafts without the newest tokens, which depends on the machine
        assert sum(run > 1 for run in runs) > len(runs) / 2
        assert len(lasts) > 2, "stop strings end at different places of runs"
        assert nodes["d0"].num_accepted > 10 * len(asked)
