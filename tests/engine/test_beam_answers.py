"""Beam searches with the real worker on CPU, float32: the tokens of transformers' `generate(num_beams)`.

The engine reads its own leases, so a search that is taken over goes the way from P to D.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pd_cluster.protocol.messages import Abort, AddRequest, FinishReason, RequestFailed, TicketOpened, Work
from pd_cluster.protocol.sampling_params import BeamParams, SamplingParams
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, SAMPLINGS, Bench, make_connector, no_garbage
from tests.models.state_models import STATE_MODELS
from tests.worker.conftest import save_model
from tests.worker.driver import random_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pd_connectors.base import Connector

pytestmark = pytest.mark.long

MAX_TOKENS = 16
TAKEN = (1, 2, 4)
# (early_stopping, length_penalty, stop tokens): some of these are likely, so that beams end
CASES: tuple[tuple[bool | str, float, tuple[int, ...]], ...] = (
    (False, 1.0, ()),
    (True, 1.0, (263, 278)),
    ("never", 0.6, (263, 278, 300)),
    (False, -0.5, (278,)),
    ("never", 2.0, ()),
)
Answers = list[list[int]]


class Beams:
    """A model under transformers."""

    def __init__(self, directory: str = CONFIG.model.model) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._known: dict[tuple[Any, ...], Answers] = {}

    def answers(self, prompt: Sequence[int], sampling: SamplingParams) -> Answers:
        beams = sampling.beams
        assert beams is not None
        stop_ids = [*([] if sampling.ignore_eos else [self.model.config.eos_token_id]), *sampling.stop_token_ids]
        key = (tuple(prompt), beams, tuple(stop_ids), sampling.n)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_tokens, do_sample=False,
                num_beams=beams.width, num_return_sequences=sampling.n, eos_token_id=stop_ids, pad_token_id=0,
                length_penalty=beams.length_penalty, early_stopping=beams.early_stopping,
            )  # fmt: skip
            self._known[key] = [_until(row, stop_ids, sampling.max_tokens) for row in out[:, len(prompt) :].tolist()]
        return self._known[key]


def _until(tokens: list[int], stop_ids: list[int], most: int) -> list[int]:
    """Rows are padded to the longest."""
    ends = [index + 1 for index, token in enumerate(tokens) if token in stop_ids]
    return tokens[: min([*ends, most])]


@pytest.fixture(scope="module")
def reference() -> Beams:
    return Beams()


@pytest.fixture(scope="module", params=[14, 96], ids=["few blocks", "many blocks"])
def executor(request: pytest.FixtureRequest) -> Iterator[DeviceExecutor]:
    cache = replace(CONFIG.cache, num_blocks=request.param)
    config = replace(CONFIG, cache=cache, scheduler=replace(CONFIG.scheduler, max_num_seqs=16))
    executor = DeviceExecutor.started(config, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


def beam_sampling(case: int, *, n: int = 4, width: int = 4, logprobs: int | None = None) -> SamplingParams:
    early_stopping, length_penalty, stop_token_ids = CASES[case]
    return SamplingParams(
        max_tokens=MAX_TOKENS, temperature=0.0, n=n, stop_token_ids=stop_token_ids, logprobs=logprobs,
        beams=BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping),
    )  # fmt: skip


def check(bench: Bench, reference: Beams, name: str, prompt: Sequence[int], sampling: SamplingParams) -> None:
    found = [bench.tokens[name, index] for index in range(sampling.n)]
    assert found == reference.answers(prompt, sampling), name
    assert (name, sampling.n) not in bench.tokens


@pytest.mark.slow_cases
@pytest.mark.parametrize("mode", ["off", "on"])
def test_searches_beside_each_other_equal_transformers(
    executor: DeviceExecutor, connector: Connector, reference: Beams, mode: str
) -> None:
    """Two searches at once over 6 slots, beside a draw: slots are short, and of few blocks memory too."""
    num_preempted = 0.0
    for start in (0, 2):
        bench, asked = Bench(executor, connector, mode), {}
        for case in (start, start + 1):
            asked[f"b{case}"] = (PROMPTS[case], beam_sampling(case, n=2 if case == 3 else 4))
            bench.send(AddRequest(f"b{case}", list(PROMPTS[case]), asked[f"b{case}"][1]))
        bench.send(AddRequest("r", list(PROMPTS[1]), SAMPLINGS[1]))
        bench.run()
        for name, (prompt, sampling) in asked.items():
            check(bench, reference, name, prompt, sampling)
        assert bench.stats is not None
        num_preempted += sum(bench.stats.counters[f"preemptions_{kind}_total"] for kind in ("recompute", "swap"))
    assert num_preempted > 0


@pytest.mark.slow
def test_searches_of_a_model_with_states_equal_transformers(tmp_path: Path) -> None:
    """A beam goes on from another one's state, which goes on as well, also over the end of a piece of 64 tokens."""
    kind, options = STATE_MODELS["qwen3-next"]
    save_model(kind, tmp_path, options)
    config = replace(
        CONFIG, model=replace(CONFIG.model, model=str(tmp_path)), cache=replace(CONFIG.cache, num_blocks=96),
        scheduler=replace(CONFIG.scheduler, max_num_seqs=16),
    )  # fmt: skip
    executor, prompts = DeviceExecutor.started(config, lambda text: None), random_prompts((9, 60, 70), 320)
    for connector in make_connector(executor):
        bench = Bench(executor, connector, "on")
        for case, prompt in enumerate(prompts):
            bench.send(AddRequest(f"b{case}", prompt, beam_sampling(case)))
        bench.run()
        reference = Beams(str(tmp_path))
        for case, prompt in enumerate(prompts):
            check(bench, reference, f"b{case}", prompt, beam_sampling(case))
    executor.close()


@pytest.mark.slow_cases
@pytest.mark.parametrize("adopts", [True, False], ids=["candidates of P", "other parameters at P"])
@pytest.mark.parametrize("mode", ["off", "on"])
def test_searches_that_are_taken_over_equal_transformers(
    executor: DeviceExecutor, connector: Connector, reference: Beams, mode: str, adopts: bool
) -> None:
    if executor.slabs.num_blocks(0) == 14:
        pytest.skip("leases and loads hold more blocks")
    # without a prefix cache, or it would find its own prefill cached
    bench = Bench(executor, connector, mode, prefix_caching=False, max_num_seqs=16)

    def take_over(message: TicketOpened) -> None:
        case = int(message.request_id[1:])
        bench.send(AddRequest(f"d{case}", PROMPTS[case], beam_sampling(case), Work.TAKE_OVER, message.ticket))

    bench.on_ticket = take_over
    for case in TAKEN:
        sampling = beam_sampling(case) if adopts else beam_sampling(case, width=5)
        bench.send(AddRequest(f"p{case}", PROMPTS[case], sampling, Work.PREFILL))
    with no_garbage():
        bench.run()
    for case in TAKEN:
        check(bench, reference, f"d{case}", PROMPTS[case], beam_sampling(case))
    assert bench.stats is not None
    assert bench.stats.counters["prefills_remote_total"] == len(TAKEN)
    assert bench.stats.counters["first_token_redraws_total|reason=sampling_mismatch"] == (0 if adopts else len(TAKEN))


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_client_that_leaves_leaves_nothing(executor: DeviceExecutor, connector: Connector, mode: str) -> None:
    """In the prompt, and with all beams under way."""
    for turn in (2, 9):
        bench = Bench(executor, connector, mode)
        bench.send(AddRequest("b", list(PROMPTS[0]), replace_ignoring_eos(beam_sampling(0))))
        turns = iter(range(10_000))

        def leave(bench: Bench = bench, turns: Iterator[int] = turns, turn: int = turn) -> None:
            if next(turns) == turn:
                bench.send(Abort("b"))

        with no_garbage():
            bench.run(leave)
        assert set(bench.reasons.values()) == {FinishReason.ABORT}


def replace_ignoring_eos(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=40, temperature=0.0, n=sampling.n, ignore_eos=True, beams=sampling.beams)


def test_logprobs_of_the_answers(executor: DeviceExecutor, connector: Connector, reference: Beams) -> None:
    """Each token has its own, whichever beam it came from: they sum to the score that ranks the answers."""
    sampling, bench = beam_sampling(1, logprobs=2), Bench(executor, connector, "off")
    bench.send(AddRequest("b", list(PROMPTS[1]), sampling))
    told: list[Any] = []
    bench.mailbox.send = lambda message: (told.append(message), bench.mailbox.outbox.append(message))[0]  # type: ignore[method-assign,func-returns-value]
    bench.run()
    check(bench, reference, "b", PROMPTS[1], sampling)
    [answers] = [message.sequences for message in told if getattr(message, "request_id", "") == "b"]
    scores = []
    for answer in answers:
        ids = torch.tensor([[*PROMPTS[1], *(token.token_id for token in answer.tokens)]])
        with torch.inference_mode():
            rows = reference.model(ids).logits[0].log_softmax(-1)[len(PROMPTS[1]) - 1 :]
        for token, row in zip(answer.tokens, rows, strict=False):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)
            assert [one.token_id for one in token.top] == row.topk(2).indices.tolist()
        scores.append(math.fsum(token.logprob for token in answer.tokens) / len(answer.tokens))
    assert scores == sorted(scores, reverse=True)


def test_more_beams_than_candidates_are_refused(executor: DeviceExecutor, connector: Connector) -> None:
    bench = Bench(executor, connector, "off")
    sampling = SamplingParams(max_tokens=2, n=6, stop_token_ids=tuple(range(10, 25)), beams=BeamParams(width=6))
    bench.send(AddRequest("b", list(PROMPTS[1]), sampling))
    bench.core.turn()
    [failure] = [message for message in bench.mailbox.outbox if isinstance(message, RequestFailed)]
    assert (failure.error, failure.param) == ("InvalidRequest", "n")
    assert "at most 4 beams" in failure.message
