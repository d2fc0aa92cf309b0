"""What requests learn of their prompts from an engine with the real worker, beside transformers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import (
    Abort,
    AddRequest,
    EngineStats,
    PromptLogprobs,
    PromptRead,
    RequestFailed,
    TokensOut,
    Work,
)
from pd_cluster.protocol.prompt_outputs import PromptOutputs
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.kv_memory import KvMemory
from pd_cluster.worker import prompt_outputs
from pd_cluster.worker.device_executor import DeviceExecutor
from tests.engine.test_core_pipeline import CONFIG, Bench, make_connector

if TYPE_CHECKING:
    from collections import abc
    from collections.abc import Callable, Iterator

    from pd_cluster.protocol.prompt_outputs import PromptToken
    from pd_cluster.scheduling.kv_memory import Copies
    from pd_cluster.scheduling.sequence import Sequence
    from pd_connectors.base import Connector

pytestmark = pytest.mark.long
GREEDY = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
ROOMY = replace(CONFIG, cache=replace(CONFIG.cache, num_blocks=64))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(5, 3000, length).tolist()
    return ids


@dataclass
class Told:
    """What one request was told."""

    entries: list[PromptToken] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_parts: int = 0
    end: PromptRead | TokensOut | None = None


class ReadingBench(Bench):
    """Keeps what requests are told about their prompts."""

    def __init__(self, executor: DeviceExecutor, connector: Connector, mode: str = "on") -> None:
        super().__init__(executor, connector, mode)
        self.told: dict[str, Told] = {}

    def add(self, name: str, prompt: abc.Sequence[int], outputs: PromptOutputs | None, **settings: object) -> None:
        settings = {"sampling": GREEDY, **settings}
        self.told[name] = Told()
        self.send(AddRequest(name, list(prompt), outputs=outputs, **settings))  # type: ignore[arg-type]

    def _collect(self) -> None:
        for message in self.mailbox.outbox:
            match message:
                case PromptLogprobs(name, start, entries):
                    told = self.told[name]
                    assert not told.tokens
                    assert told.end is None
                    assert start == len(told.entries) + 1, "every position once, in order"
                    told.entries += entries
                    told.num_parts += 1
                case TokensOut(name, sequences, finished):
                    told = self.told[name]
                    told.tokens += [token.token_id for part in sequences for token in part.tokens]
                    if finished:
                        self._end(name, message)
                case PromptRead(name):
                    self._end(name, message)
                case RequestFailed():
                    raise InvalidRequest(message.message, message.param)
                case EngineStats():
                    self.stats = message
        self.mailbox.outbox.clear()

    def _end(self, name: str, message: PromptRead | TokensOut) -> None:
        assert self.told[name].end is None
        self.told[name].end = message
        self.open.remove(name)


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor.started(ROOMY, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def tight_executor() -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor.started(CONFIG, lambda text: None)
    yield executor
    executor.close()


@pytest.fixture
def bench(executor: DeviceExecutor) -> Iterator[ReadingBench]:
    for connector in make_connector(executor):
        yield ReadingBench(executor, connector)


@pytest.fixture(scope="module")
def reference() -> Callable[[list[int]], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of a prompt: log-softmax [T, V], last hidden state after the norm [hidden], last logits [V]."""
    model = AutoModelForCausalLM.from_pretrained(CONFIG.model.model, dtype=torch.float32)

    @cache
    def compute(prompt: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            found = model(torch.tensor([prompt]), output_hidden_states=True)
            return found.logits[0].log_softmax(-1), found.hidden_states[-1][0, -1], found.logits[0, -1]

    return lambda prompt: compute(tuple(prompt))


def check_entries(told: Told, prompt: list[int], expected: torch.Tensor, k: int) -> None:
    """`expected`: transformers' log-softmax [T, V]."""
    assert [entry.token_id for entry in told.entries] == prompt[1:]
    for position, entry in enumerate(told.entries, 1):
        row = expected[position - 1]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert abs(entry.rank - 1 - int((row > row[entry.token_id]).sum())) <= 1  # equal ones may change places
        assert [one.logprob for one in entry.top] == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)
        assert all(one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4) for one in entry.top)


@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("work", [Work.GENERATE, Work.READ])
def test_logprobs_of_chunked_prompts(
    executor: DeviceExecutor, reference: Callable[[list[int]], tuple[torch.Tensor, ...]], mode: str, work: Work
) -> None:
    """Chunks of at most 48 tokens, some of one token; other prompts and decodes in the same steps."""
    for connector in make_connector(executor):
        bench = ReadingBench(executor, connector, mode)
        prompts = {f"r{length}": prompt_of(length, length) for length in (1, 2, 49, 97, 130)}
        bench.add("decodes", prompt_of(20, 99), None, sampling=LONG)
        for index, (name, prompt) in enumerate(prompts.items()):
            bench.add(name, prompt, PromptOutputs(logprobs=index), work=work)
        bench.run()
        for index, (name, prompt) in enumerate(prompts.items()):
            check_entries(bench.told[name], prompt, reference(prompt)[0], index)
            if work is Work.GENERATE:
                assert bench.told[name].tokens == [int(reference(prompt)[2].argmax())]
            else:
                assert isinstance(bench.told[name].end, PromptRead)
        assert bench.told["r130"].num_parts >= 3
        assert len(bench.told["decodes"].tokens) == 60


def test_a_warm_cache_is_filled_and_not_used(
    bench: ReadingBench, reference: Callable[[list[int]], tuple[torch.Tensor, ...]]
) -> None:
    prompt = prompt_of(70, 7)
    for name in ("cold", "warm"):
        bench.add(name, prompt, PromptOutputs(logprobs=1))
        bench.run()
        check_entries(bench.told[name], prompt, reference(prompt)[0], 1)
        end = bench.told[name].end
        assert isinstance(end, TokensOut)
        assert end.num_cached_tokens == 0
    bench.add("plain", prompt, None)
    bench.run()
    end = bench.told["plain"].end
    assert isinstance(end, TokensOut)
    assert end.num_cached_tokens == 64


def test_the_last_token_of_a_read(
    bench: ReadingBench, reference: Callable[[list[int]], tuple[torch.Tensor, ...]]
) -> None:
    """Reads of several lengths in the same steps, each with its own questions; the second time from the cache."""
    prompts = [prompt_of(length, length) for length in (1, 16, 17, 65, 96)]
    asked = [
        PromptOutputs(pooled=True), PromptOutputs(logits_of=(7, 3)), PromptOutputs(pooled=True, logits_of=(9,)),
        PromptOutputs(pooled=True, logprobs=2), PromptOutputs(logits_of=(1, 2, 3), pooled=True),
    ]  # fmt: skip
    for time in ("first", "second"):
        for index, (prompt, outputs) in enumerate(zip(prompts, asked, strict=True)):
            bench.add(f"{time}{index}", prompt, outputs, work=Work.READ)
        bench.run()
        for index, (prompt, outputs) in enumerate(zip(prompts, asked, strict=True)):
            told, (logprobs, hidden, logits) = bench.told[f"{time}{index}"], reference(prompt)
            assert isinstance(told.end, PromptRead)
            assert told.tokens == []
            if outputs.pooled:
                assert np.frombuffer(told.end.pooled, "<f4") == pytest.approx(hidden.numpy(), abs=1e-4)
            else:
                assert told.end.pooled == b""
            assert told.end.logits == pytest.approx([float(logits[i]) for i in outputs.logits_of], abs=1e-4)
            reused = 0 if outputs.logprobs is not None or time == "first" else (len(prompt) - 1) // 16 * 16
            assert told.end.num_cached_tokens == reused
            assert told.end.timeline is not None
            if outputs.logprobs is not None:
                check_entries(told, prompt, logprobs, outputs.logprobs)


@pytest.mark.parametrize(
    ("work", "kind", "mode"),
    [
        pytest.param(work, kind, mode, marks=[pytest.mark.slow] if (at + index + is_read) % 2 else [])
        for is_read, work in enumerate((Work.GENERATE, Work.READ))
        for at, kind in enumerate(("recompute", "swap"))
        for index, mode in enumerate(("off", "on"))
    ],
)
def test_preemption_while_a_prompt_is_read(
    tight_executor: DeviceExecutor,
    reference: Callable[[list[int]], tuple[torch.Tensor, ...]],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    kind: str,
    work: Work,
) -> None:
    """Two decodes of better rank need blocks in the third step of a prompt that has the rest of them.

    Each two of work, kind and mode meet; the other halves of the pairs are for before a release.
    """
    if kind == "recompute":
        monkeypatch.setattr(BlockManager, "can_swap_out", lambda *_: False)
    unread: list[int] = []
    preempt = KvMemory.preempt

    def note(memory: KvMemory, seq: Sequence) -> Copies:
        unread.append(seq.num_unread_tokens)
        return preempt(memory, seq)

    monkeypatch.setattr(KvMemory, "preempt", note)
    for connector in make_connector(tight_executor):
        bench = ReadingBench(tight_executor, connector, mode)
        for index in range(2):
            bench.add(f"decodes{index}", prompt_of(30 - (mode == "on"), index), None, sampling=LONG, priority=-1)
        while len(bench.told["decodes1"].tokens) < 1:
            bench.core.turn()
            bench._collect()
        prompt = prompt_of(136, 50)
        bench.add("r", prompt, PromptOutputs(logprobs=1), work=work, sampling=tokens_of(3))
        bench.run()
        check_entries(bench.told["r"], prompt, reference(prompt)[0], 1)
        assert bench.stats is not None
        assert bench.stats.counters[f"preemptions_{kind}_total"] > 0
        assert any(0 < number < 135 for number in unread), "the prompt was meant to be preempted between two chunks"


def tokens_of(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def test_a_read_without_a_question_fills_the_cache(bench: ReadingBench) -> None:
    for outputs in (None, PromptOutputs()):
        bench.add("r", prompt_of(40, 77), outputs, work=Work.READ)
        bench.run()
        end = bench.told["r"].end
        assert isinstance(end, PromptRead)
        assert (end.pooled, end.logits, end.num_cached_tokens) == (b"", (), 0 if outputs is None else 32)


def test_several_answers_share_one_reading(
    bench: ReadingBench, reference: Callable[[list[int]], tuple[torch.Tensor, ...]]
) -> None:
    prompt = prompt_of(60, 3)
    sampling = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=4, ignore_eos=True)
    bench.add("r", prompt, PromptOutputs(logprobs=0), sampling=sampling)
    bench.run()
    check_entries(bench.told["r"], prompt, reference(prompt)[0], 0)
    assert len(bench.told["r"].tokens) == 12


def test_aborts(bench: ReadingBench) -> None:
    """At every turn of its life. No block stays behind: `run` waits for all of them."""
    prompt = prompt_of(130, 11)
    for turn in range(7):
        name, turns = f"r{turn}", count()
        work = Work.READ if turn % 2 else Work.GENERATE
        bench.add(name, prompt, PromptOutputs(logprobs=1, pooled=work is Work.READ), work=work, sampling=LONG)
        bench.run(partial(_abort_at, bench, name, turn, turns))
        assert bench.told[name].end is not None


def _abort_at(bench: ReadingBench, name: str, turn: int, turns: count[int]) -> None:
    if next(turns) == turn:
        bench.send(Abort(name))


def test_slices_bound_the_logits(
    bench: ReadingBench,
    reference: Callable[[list[int]], tuple[torch.Tensor, ...]],
    executor: DeviceExecutor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six sequences may sample twelve rows in the largest step that is measured at start: no slice has more."""
    rows: list[int] = []
    logits = executor._weights.model.logits

    def note_rows(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(executor._weights.model, "logits", note_rows)
    assert prompt_outputs.MOST_ROWS == 256
    prompt = prompt_of(90, 8)
    bench.add("r", prompt, PromptOutputs(logprobs=1), work=Work.READ)
    bench.run()
    check_entries(bench.told["r"], prompt, reference(prompt)[0], 1)
    assert max(rows) == 12
    assert sum(rows) == 89


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"outputs": PromptOutputs(logprobs=1), "work": Work.TAKE_OVER}, "outputs"),
        ({"outputs": PromptOutputs(logprobs=1), "work": Work.PREFILL}, "outputs"),
        ({"outputs": PromptOutputs(pooled=True)}, "outputs"),
        ({"outputs": PromptOutputs(logprobs=21)}, "prompt_logprobs"),
        ({"outputs": PromptOutputs(logits_of=(3072,)), "work": Work.READ}, "logits_of"),
        ({"outputs": PromptOutputs(pooled=True), "work": Work.READ, "sampling": tokens_of(5), "n": 2}, "n"),
        ({"outputs": PromptOutputs(logprobs=1), "known": ((5,),), "sampling": LONG}, "outputs"),
    ],
)
def test_refusals(bench: ReadingBench, settings: dict[str, object], field: str) -> None:
    if settings.pop("n", None):
        settings["sampling"] = SamplingParams(max_tokens=1, n=2)
    bench.add("r", prompt_of(9), **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        bench.run()
    assert caught.value.param == field
