"""After a step with drafts the next one is launched before anything is told of it, and nothing is lost by that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pd_cluster.errors import Overloaded
from pd_cluster.protocol.messages import Abort, AddRequest, FinishReason, TokensOut
from pd_cluster.protocol.sampling_params import SamplingParams
from tests.engine.drafting_node import Answered, Node, Told, Wanted, expect_same, roomy, small

if TYPE_CHECKING:
    from pd_cluster.protocol.messages import FromEngine
    from pd_cluster.scheduling.batch import Batch, StepResult
    from pd_cluster.worker.executor import Pending

__all__ = ["roomy", "small"]

PROMPTS = [[(7 * i + j * j) % 200 + 5 for j in range(length)] for i, length in enumerate((60, 3, 33, 17, 80))]
WANTED = Wanted(PROMPTS, [SamplingParams(max_tokens=52 + 4 * i, seed=5 + i, ignore_eos=True) for i in range(5)])


class DeviceLostError(Exception):
    """Of a launch."""


@dataclass
class Watch:
    """What an engine does, in order: `retired` (with drafts), `plain` (without), `launched`, `told`."""

    bench: Told
    log: list[str] = field(default_factory=list)
    fails_after: int = 1 << 30  # launches

    def __post_init__(self) -> None:
        pipeline, mailbox = self.bench.core._pipeline, self.bench.mailbox
        executor, retire, send = pipeline._executor, pipeline.retire, mailbox.send

        def launch(batch: Batch, *args: Any) -> Pending:
            if self.log.count("launched") == self.fails_after:
                raise DeviceLostError
            self.log.append("launched")
            return executor.launch(batch, *args)

        def retired() -> tuple[Batch, StepResult]:
            batch, result = retire()
            self.log.append("retired" if any(chunk.drafts for chunk in batch.chunks) else "plain")
            return batch, result

        def told(message: FromEngine) -> None:
            if isinstance(message, TokensOut):
                self.log.append("told")
            send(message)

        pipeline._executor = Launching(executor, launch)
        pipeline.retire, mailbox.send = retired, told  # type: ignore[method-assign]

    @property
    def after(self) -> list[str]:
        """What was first after each retired step with drafts."""
        return [then for one, then in zip(self.log, self.log[1:], strict=False) if one == "retired"]


class Launching:
    """An executor with another `launch`."""

    def __init__(self, executor: Any, launch: Any) -> None:
        self._executor, self.launch = executor, launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@pytest.fixture(scope="module")
def single(roomy: Node, small: Node) -> Answered:
    """Without a drafter."""
    return WANTED.answered(roomy, small)


def untold(bench: Told) -> int:
    """Updates that wait for a launch."""
    return len(bench.core._replies.untold)


@pytest.mark.parametrize("is_small", [False, True])
def test_the_next_step_is_launched_first(roomy: Node, small: Node, single: Answered, is_small: bool) -> None:
    """Also where sequences are preempted in between. When nothing is left to launch it is told at once."""
    bench = (small if is_small else roomy).bench("right", "on")
    watch = Watch(bench)
    WANTED.send(bench)
    expect_same(bench.answered(), single)
    assert len(watch.after) > 8
    assert watch.after.count("told") <= 1, "the last step alone has no successor"
    assert bench.stats is not None
    num_preempted = sum(bench.stats.counters[f"preemptions_{kind}_total"] for kind in ("recompute", "swap"))
    assert bool(num_preempted) == is_small
    assert not untold(bench)


def test_without_overlap_it_is_told_first(roomy: Node, single: Answered) -> None:
    """A CPU's launch takes the whole step."""
    bench = roomy.bench("right", "off")
    watch = Watch(bench)
    WANTED.send(bench)
    expect_same(bench.answered(), single)
    assert set(watch.after) == {"told"}


def test_an_abort_in_between_comes_after_the_tokens(roomy: Node, single: Answered) -> None:
    bench = roomy.bench("right", "on")
    WANTED.send(bench)
    known = dict[tuple[str, int], int]()

    def abort() -> None:
        if not known and (waiting := bench.core._replies.untold) and ("r2", 0) in bench.told:
            for one in waiting:
                if one.request.request_id == "r2":
                    known["r2", 0] = len(bench.told["r2", 0]) + len(one.sequences[0].tokens)
                    bench.send(Abort("r2"))

    bench.run(abort)
    assert bench.reasons["r2", 0] is FinishReason.ABORT
    own = [token.token_id for token in bench.told["r2", 0]]
    assert own == single.ids["r2", 0][: known["r2", 0]], "what was drawn before, and nothing after it"
    for key, tokens in single.ids.items():
        if key[0] != "r2":
            assert [token.token_id for token in bench.told[key]] == tokens


def test_a_failure_in_between_comes_after_the_tokens(roomy: Node, single: Answered) -> None:
    """Of a sequence that cannot be planned, as with a late mask."""
    bench = roomy.bench("right", "on")
    WANTED.send(bench)
    core = bench.core
    while not untold(bench) or not any(one.request.request_id == "r1" for one in core._replies.untold):
        core.turn()
    bench.mailbox.outbox.clear()
    (tokens,) = (one.sequences[0].tokens for one in core._replies.untold if one.request.request_id == "r1")
    (seq,) = core._live._requests["r1"].sequences
    core._live.fail(seq.seq_id, Overloaded("late"))
    told = [one for one in bench.mailbox.outbox if getattr(one, "request_id", "") == "r1"]
    assert [type(one).__name__ for one in told] == ["TokensOut", "RequestFailed"]
    assert isinstance(told[0], TokensOut)
    assert told[0].sequences[0].tokens == tokens
    bench.mailbox.outbox.clear()
    bench.open.discard("r1")
    bench.run()


def test_a_launch_that_fails_loses_no_token(roomy: Node, single: Answered) -> None:
    bench = roomy.bench("right", "on")
    watch = Watch(bench)
    bench.send(AddRequest("r0", list(PROMPTS[0]), WANTED.samplings[0]))
    watch.fails_after = 5
    with pytest.raises(DeviceLostError):
        bench.core.run()
    assert watch.log[-2:] == ["retired", "told"]
    bench._collect()
    own = [token.token_id for token in bench.told["r0", 0]]
    assert len(own) > 5
    assert own == single.ids["r0", 0][: len(own)]
    bench.core._executor.clear()  # type: ignore[attr-defined]
