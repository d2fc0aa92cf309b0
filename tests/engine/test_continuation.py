"""Answers that go on after known tokens, with the real worker on CPU: they are the rest of the whole answer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pd_cluster.protocol.messages import AddRequest, RequestFailed
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import ONE_LAYERED, PROMPTS, SAMPLINGS, Bench, generate, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pd_connectors.base import Connector

Answers = dict[tuple[str, int], list[int]]


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    roomy = replace(ONE_LAYERED, cache=replace(ONE_LAYERED.cache, num_blocks=64))
    executor = DeviceExecutor.started(roomy, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


@pytest.fixture(scope="module")
def whole(executor: DeviceExecutor, connector: Connector) -> Bench:
    bench = Bench(executor, connector, "off")
    generate(bench)
    return bench


@pytest.mark.parametrize(("mode", "num_known"), [("off", 1), ("on", 17)])
def test_known_tokens_and_the_rest_are_the_whole_answer(
    executor: DeviceExecutor, connector: Connector, whole: Bench, mode: str, num_known: int
) -> None:
    """Greedy, seeded, top k with n = 3, frequency penalty with logprobs, and min_tokens 12."""
    bench = Bench(executor, connector, mode, prefix_caching=mode == "on")
    expected: Answers = {}
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        answers = [whole.tokens[f"r{index}", sequence] for sequence in range(sampling.n)]
        known = tuple(tuple(answer[: min(num_known, len(answer) - 1)]) for answer in answers)
        bench.send(AddRequest(f"r{index}", list(prompt), sampling, known=known))
        for sequence, (answer, first) in enumerate(zip(answers, known, strict=True)):
            expected[f"r{index}", sequence] = answer[len(first) :]
    bench.run()
    assert bench.tokens == expected
    assert bench.reasons == whole.reasons


def test_known_tokens_outside_the_vocabulary_are_refused(executor: DeviceExecutor, connector: Connector) -> None:
    bench = Bench(executor, connector, "off")
    bench.send(AddRequest("r", list(PROMPTS[0]), SAMPLINGS[0], known=((executor.model.vocab_size,),)))
    bench.core.turn()
    failures = [message for message in bench.mailbox.outbox if isinstance(message, RequestFailed)]
    assert [(failure.error, failure.param) for failure in failures] == [("InvalidRequest", "known")]
