"""What ends or turns an answer inside a run of accepted drafts, with the drafter of the product and the real worker.

The prediction of a request is the answer that it would have had otherwise. So drafts are right up to the place where a
setting ends or changes the answer, which is a different place of the run each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from pd_cluster.protocol.messages import AddRequest, FinishReason, TokensOut
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.drafters import lookup_drafter
from tests.engine.drafting_node import Answered, Node, Told, expect_same, roomy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["roomy"]

PROMPT = [(3 * j + j * j) % 200 + 5 for j in range(40)]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)
SEEDED = msgspec.structs.replace(GREEDY, temperature=0.9, seed=11)
PLACES = range(13, 19)
JUNK = (7, 8, 7, 8, 7)  # of a prediction, after its answer


class RunBench(Told):
    """Knows how many tokens each step told of a sequence."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.runs: dict[tuple[str, int], list[int]] = {}

    def _collect(self) -> None:
        for message in self.mailbox.outbox:
            if not isinstance(message, TokensOut):
                continue
            for part in message.sequences:
                if part.tokens:
                    self.runs.setdefault((message.request_id, part.index), []).append(len(part.tokens))
        super()._collect()


def answered(
    node: Node, samplings: Sequence[SamplingParams], prediction: Sequence[int] = (), mode: str = "off"
) -> tuple[Answered, list[int]]:
    """One request of each sampling, and the tokens of the last step of each sequence.

    With a prediction the node drafts, and they come one after the other: a step has few drafts of all sequences.
    """
    bench = RunBench(node.executor, node.connector, mode, drafter=lookup_drafter() if prediction else None)
    for index, sampling in enumerate(samplings):
        bench.send(AddRequest(f"r{index}", list(PROMPT), sampling, prediction=tuple(prediction)))
        if prediction:
            bench.answered()
    found = bench.answered()
    if prediction:
        assert bench.stats is not None
        assert bench.stats.counters["spec_decode_num_accepted_tokens_total"] > 3 * len(samplings)
    return found, [runs[-1] for runs in bench.runs.values()]


def check(node: Node, samplings: Sequence[SamplingParams], prediction: Sequence[int]) -> tuple[Answered, list[int]]:
    """With drafts, where steps overlap and where they do not: tokens, logprobs, ends are those without."""
    single, ones = answered(node, samplings)
    assert set(ones) == {1}
    lasts = list[int]()
    for mode in ("off", "on"):
        found, more = answered(node, samplings, prediction, mode)
        expect_same(found, single)
        lasts += more
    return single, lasts


@pytest.fixture(scope="module")
def whole(roomy: Node) -> list[int]:
    return answered(roomy, [GREEDY])[0].ids["r0", 0]


def test_the_most_tokens(roomy: Node, whole: list[int]) -> None:
    asked = [msgspec.structs.replace(GREEDY, max_tokens=num) for num in PLACES]
    single, lasts = check(roomy, asked, [*whole, *JUNK])
    assert {len(ids) for ids in single.ids.values()} == set(PLACES)
    assert len(set(lasts)) > 3, "the last token is at different places of runs"


def test_tokens_that_stop(roomy: Node, whole: list[int]) -> None:
    """The token that stops is a draft that is accepted; the drafts after it are right, too."""
    asked = [msgspec.structs.replace(GREEDY, stop_token_ids=(whole[at],)) for at in PLACES]
    single, lasts = check(roomy, asked, [*whole, *JUNK])
    assert set(single.reasons.values()) == {FinishReason.STOP}
    assert len(set(lasts)) > 1, lasts


def eos_of(node: Node) -> tuple[SamplingParams, list[int]]:
    """A sampling with an answer that ends by itself after some tokens, and that answer."""
    for seed in range(8, 200):  # 8 was one
        sampling = SamplingParams(max_tokens=40, temperature=1.3, seed=seed, logprobs=2)
        found, _ = answered(node, [sampling])
        if found.reasons["r0", 0] is FinishReason.STOP and len(found.ids["r0", 0]) > 12:
            return sampling, found.ids["r0", 0]
    raise AssertionError("no answer ends by itself")


def test_an_end_of_the_text_as_a_draft(roomy: Node) -> None:
    """Where it counts, where it does not, and where least tokens forbid it: then it is a wrong draft."""
    sampling, ended = eos_of(roomy)
    more: list[dict[str, Any]] = [
        {}, {"ignore_eos": True}, {"min_tokens": len(ended)}, {"min_tokens": len(ended) - 1},
        {"min_tokens": len(ended) + 4}, {"min_tokens": len(ended) - 1, "n": 3},
    ]  # fmt: skip
    single, lasts = check(roomy, [msgspec.structs.replace(sampling, **one) for one in more], [*ended, *JUNK])
    assert single.ids["r0", 0] == ended
    assert len(single.ids["r1", 0]) == 40 > len(ended)
    assert lasts[0] > 1, "the end is in a run"


def test_bad_words(roomy: Node, whole: list[int]) -> None:
    """Of one token and of two: the draft that would complete a word is wrong, whatever the run has before it."""
    words: list[Callable[[int], tuple[int, ...]]] = [lambda at: (whole[at],), lambda at: (whole[at], whole[at + 1])]
    asked = [msgspec.structs.replace(GREEDY, bad_words=(word(at),)) for at in PLACES[::3] for word in words]
    single, _ = check(roomy, asked, whole)
    for index, sampling in enumerate(asked):
        ids = single.ids[f"r{index}", 0]
        (word,) = sampling.bad_words
        assert ids != whole
        assert all(tuple(ids[at : at + len(word)]) != word for at in range(len(ids)))


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_several_answers(roomy: Node, sampling: SamplingParams) -> None:
    """Each of three follows the prediction as far as it says the same."""
    first = answered(roomy, [sampling])[0].ids["r0", 0]
    asked = [msgspec.structs.replace(sampling, n=3, max_tokens=num) for num in (17, 24)]
    asked.append(msgspec.structs.replace(sampling, n=3, min_tokens=18, frequency_penalty=0.4, presence_penalty=0.1))
    single, _ = check(roomy, asked, first)
    assert {len(ids) for ids in single.ids.values()} == {17, 24}
