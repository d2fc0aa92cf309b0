"""Grammars: states that follow from output tokens alone, and the masks that they give to rows of logits."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.batch import Batch, SequenceChunk, SequenceStart
from pd_cluster.worker import grammars as grammars_module
from pd_cluster.worker import mask_threads
from pd_cluster.worker.cuda_graphs.graph_sizes import GraphSizes, decode_sizes
from pd_cluster.worker.grammars import NO_PACKAGE, NO_WAY_ON, Grammars, GrammarState
from pd_cluster.worker.host_buffer import _DTYPES as DTYPES
from pd_cluster.worker.logits_stages import grammar_masks
from pd_cluster.worker.logits_stages.grammar_masks import GrammarMasks
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.mask_threads import MaskThreads, Pace
from pd_cluster.worker.pending_step import PendingStep
from tests.patient_masks import be_patient
from tests.worker.driver import make_executor
from tests.worker.repeated_graphs import with_graphs
from tests.worker.tables import table
from tests.worker.test_step_graphs import cuda_executor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from pd_cluster.worker.device_executor import DeviceExecutor


pytest.importorskip("llguidance")

VOCAB_SIZE, EOS = 3072, 2
DIGITS = 'start: "1" /[23]{2,4}/ "4"'  # each digit is one token of the demo model
DEAD_END = "start: X\nX: /12+/ & /1+3/"


@pytest.fixture
def grammars(demo_directory: Path) -> Iterator[Grammars]:
    """Of one test: a mask or a compilation that ends late would wake the waiter of the next one."""
    grammars = Grammars(demo_directory, VOCAB_SIZE, frozenset({EOS}))
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def ids(demo_directory: Path) -> dict[str, int]:
    """The token of each single character."""
    vocab: dict[str, int] = json.loads((demo_directory / "tokenizer.json").read_text())["model"]["vocab"]
    return {piece: token_id for piece, token_id in vocab.items() if len(piece) == 1}


def moved(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """As on a CPU. A GPU's host buffer takes these types only."""
    assert array.dtype.type in DTYPES
    return torch.from_numpy(array)


@dataclass
class Rows:
    """One stage over the rows of a step, without a model."""

    stage: GrammarMasks
    grammars: Grammars

    def start(self, row: int, grammar: str, output: Sequence[int] = (), **params: Any) -> bool:
        sampling = SamplingParams(max_tokens=99, grammar=grammar, **params)
        if grammar:
            self.grammars.prepare(grammar)
        return self.stage.start(row, SequenceStart(row, (7, 8, *output), 2, (), sampling, 0))

    def allowed(self, *rows: int, length: int = 2) -> list[set[int]]:
        """The tokens that each row may draw. Logits that are left keep their values."""
        at = np.array(rows)
        assert not self.stage.absent(np.unique([row for row in rows if self.stage._rows[row] is not None]))
        inputs = self.stage.prepare(at, np.full(len(at), length))
        logits = torch.arange(VOCAB_SIZE, dtype=torch.float32).repeat(len(rows), 1)
        before = logits.clone()
        if inputs is not None:
            self.stage.apply(logits, inputs)
        kept = logits != -torch.inf
        assert torch.equal(logits[kept], before[kept])
        return [set(row.nonzero()[:, 0].tolist()) for row in kept]

    def note(self, row: int, token_id: int) -> None:
        """As when the row was drawn, so its mask is ready."""
        assert not self.stage.absent(np.array([row]))
        self.stage.note(np.array([row]), torch.tensor([token_id]))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


@pytest.fixture
def rows(grammars: Grammars) -> Rows:
    cpu = torch.device("cpu")
    context = StageContext(6, VOCAB_SIZE, frozenset({EOS}), cpu, moved, grammars)
    return Rows(GrammarMasks(context), grammars)


def test_a_mask_allows_what_the_grammar_allows(rows: Rows, ids: dict[str, int]) -> None:
    assert rows.start(0, DIGITS)
    assert not rows.start(1, "")
    assert rows.start(2, 'start: "7"')
    everything = set(range(VOCAB_SIZE))
    assert rows.allowed(0, 1, 2) == [{ids["1"]}, everything, {ids["7"]}]
    assert rows.allowed(2, 2, 1, 0) == [{ids["7"]}, {ids["7"]}, everything, {ids["1"]}], "several first tokens"
    for digit in "122":
        rows.note(0, ids[digit])
    assert rows.allowed(0) == [{ids["2"], ids["3"], ids["4"]}]
    rows.note(0, ids["4"])
    assert rows.allowed(0) == [{EOS}]
    rows.note(0, EOS)
    assert rows.allowed(0) == [{EOS}], "a row past its end"
    assert rows.stage.take_failures() == {}


def test_the_end_is_allowed_where_the_grammar_accepts(rows: Rows, ids: dict[str, int]) -> None:
    rows.start(0, "start: /1+/")
    assert EOS not in rows.allowed(0)[0]
    rows.note(0, ids["1"])
    assert rows.allowed(0) == [{EOS, ids["1"]}]


def test_min_tokens_ban_the_end_while_the_grammar_goes_on(rows: Rows, ids: dict[str, int]) -> None:
    rows.start(0, "start: /[12]{1,3}/", min_tokens=9, stop_token_ids=(ids["1"],), ignore_eos=True)
    for length in (2, 3, 4):
        assert rows.allowed(0, length=length) == [{ids["2"]}]
        rows.note(0, ids["2"])
    assert rows.allowed(0, length=5) == [{EOS}], "nothing else is left"
    rows.start(0, "start: /1+/", [ids["1"]] * 9, min_tokens=9)
    assert EOS in rows.allowed(0, length=11)[0], "enough of them"


def test_a_row_that_comes_back_goes_on_where_it_was(rows: Rows, ids: dict[str, int]) -> None:
    """After preemption, a failed load, or on another node: the state follows from the output alone."""
    schema = '%json {"type":"object","properties":{"n":{"type":"integer"},"s":{"type":"string"}},"required":["n"]}'
    grammar, generator, output = f"start: {schema}", random.Random(3), list[int]()
    rows.start(0, grammar)
    for _ in range(30):
        rows.start(1, grammar, output)
        going, restarted = rows.allowed(0, 1)
        assert going == restarted
        token_id = generator.choice(sorted(going))
        if token_id == EOS:
            break
        rows.note(0, token_id)
        output.append(token_id)
    assert len(output) > 5


def state_of(grammars: Grammars, grammar: str) -> GrammarState:
    compiled = grammars.prepare(grammar)
    compiled.exception()  # waits
    return grammars.state(compiled)


def test_states_and_their_copies_are_apart(grammars: Grammars, ids: dict[str, int]) -> None:
    one, other = state_of(grammars, DIGITS), state_of(grammars, DIGITS)
    filled = np.zeros(VOCAB_SIZE // 32, np.int32)
    word = [ids[digit] for digit in "1234"]

    def mask(state: Any) -> set[int]:
        state.fill(filled)
        return set(np.flatnonzero(np.unpackbits(filled.view(np.uint8), bitorder="little")).tolist())

    seen = []
    for token_id in [*word, EOS, EOS, 77]:  # 77: of a row past its end
        seen.append(mask(one))
        one.advance([token_id])
        assert not one.error
    assert one.is_accepting
    assert mask(other) == seen[0] == {ids["1"]}
    one, tried = other, other.copy()
    tried.advance(word[:2])
    assert mask(tried) == seen[2]
    wrong = tried.copy()
    wrong.advance([77])
    assert wrong.error
    assert mask(tried) == seen[2]
    assert (mask(one), one.error) == (seen[0], "")


@pytest.mark.parametrize(
    ("grammar", "output", "why"),
    [
        (DEAD_END, "", NO_WAY_ON),
        ('start: "12" X\nX: /1+/ & /2+/', "12", NO_WAY_ON),
        (DIGITS, "17", 'token "7" doesn\'t satisfy the grammar'),
        ("start: <no_such_token>", "", "unknown special token"),
        ("start: (", "", "Expected"),
    ],
)
def test_a_row_that_cannot_go_on_fails_alone(
    grammar: str, output: str, why: str, rows: Rows, ids: dict[str, int]
) -> None:
    rows.start(0, grammar, [ids[digit] for digit in output])
    rows.start(1, DIGITS)
    everything = set(range(VOCAB_SIZE))
    assert rows.allowed(0, 1) == [everything, {ids["1"]}]
    [(row, said)] = rows.stage.take_failures().items()
    assert row == 0
    assert (said.status, said.code) == (400, "grammar_failed")
    assert why in str(said)
    assert "\n" not in str(said)
    rows.note(0, 5)
    assert rows.allowed(1, 0) == [{ids["1"]}, everything]
    assert rows.stage.take_failures() == {}, "said once"
    rows.start(0, DIGITS)
    assert rows.allowed(0) == [{ids["1"]}], "the next sequence of the row"


def test_a_lexer_that_gave_up_is_not_used_for_the_next_request(rows: Rows, ids: dict[str, int]) -> None:
    """Copies of a compiled grammar share a lexer. A mask of this one, within the word, exceeds its limit of work."""
    pattern = r"/(?s:.{1,5000})/ & /(\S+\s+){0,99}\S+/"
    grammar = f'start: "1" X\nX: {pattern}'
    rows.start(0, grammar)
    assert rows.allowed(0) == [{ids["1"]}]
    rows.note(0, ids["1"])
    rows.allowed(0)
    rows.note(0, ids["b"])
    rows.allowed(0)
    [said] = rows.stage.take_failures().values()
    assert "lexer error" in str(said)
    rows.start(1, grammar)
    assert rows.allowed(1) == [{ids["1"]}]
    rows.note(1, ids["1"])
    assert len(rows.allowed(1)[0]) > 1
    assert rows.stage.take_failures() == {}


def test_a_grammar_may_name_the_end(rows: Rows, ids: dict[str, int]) -> None:
    rows.start(0, 'start: "1" <|im_end|>')
    assert rows.allowed(0) == [{ids["1"]}]
    rows.note(0, ids["1"])
    assert rows.allowed(0) == [{EOS}]
    assert rows.stage.take_failures() == {}


def test_a_tokenizer_may_have_tokens_that_the_model_cannot_draw(
    tmp_path: Path, demo_directory: Path, ids: dict[str, int]
) -> None:
    told = json.loads((demo_directory / "tokenizer.json").read_text())
    told["added_tokens"].append(told["added_tokens"][0] | {"id": VOCAB_SIZE, "content": "<image>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    grammars = Grammars(tmp_path, VOCAB_SIZE, frozenset({EOS}))
    context = StageContext(1, VOCAB_SIZE, frozenset({EOS}), torch.device("cpu"), moved, grammars)
    rows = Rows(GrammarMasks(context), grammars)
    rows.start(0, DIGITS)
    assert rows.allowed(0) == [{ids["1"]}]
    grammars.close()


def test_a_compilation_that_fails_ends_its_own_request(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows.grammars, "_compile", never)
    rows.start(0, 'start: "never"')
    rows.allowed(0)
    [said] = rows.stage.take_failures().values()
    assert "cannot be compiled: never" in str(said)


@dataclass
class Gate:
    """Holds the masks of one grammar, or its compilation, until it is opened."""

    is_open: Event
    fill: Any = GrammarState.fill

    def slow_fill(self, state: GrammarState, mask: npt.NDArray[np.int32]) -> None:
        self.fill(state, mask)
        if np.unpackbits(mask.view(np.uint8)).sum() == 1:  # the test's slow grammars allow one token only
            assert self.is_open.wait(60)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Masks of one token are not computed while the gate is closed."""
    gate = Gate(Event())
    monkeypatch.setattr(GrammarState, "fill", lambda state, mask: gate.slow_fill(state, mask))
    yield gate
    gate.is_open.set()


def settle(rows: Rows, *of: int) -> None:
    """Wait until the masks of these rows are ready."""
    constraints = [rows.stage._constraint(row) for row in of]
    rows.grammars.mask_threads.wait(lambda: all(one.is_ready for one in constraints), 60.0)
    assert all(one.is_ready for one in constraints)


def test_a_row_without_its_mask_sits_out_and_holds_no_other(
    rows: Rows, ids: dict[str, int], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.start(0, 'start: "7" /[12]/')
    rows.start(1, "start: /[12]+/")
    rows.start(2, "")
    settle(rows, 1)
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.0)
    for _ in range(3):
        assert rows.stage.absent(np.array([0, 1])) == {0}
    assert rows.stage.take_failures() == {}
    assert rows.allowed(1, 2) == [{ids["1"], ids["2"]}, set(range(VOCAB_SIZE))]
    rows.note(1, ids["1"])
    settle(rows, 1)
    assert rows.allowed(1) == [{EOS, ids["1"], ids["2"]}], "the others go on"
    gate.is_open.set()
    settle(rows, 0)
    assert rows.allowed(0, 1) == [{ids["7"]}, {EOS, ids["1"], ids["2"]}]


def test_a_step_waits_once_for_a_mask_and_never_after_a_slow_one(
    rows: Rows, ids: dict[str, int], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows.start(0, 'start: "7" /[12]/ "8"')
    rows.start(1, "start: /[12]+/")
    settle(rows, 1)
    waits = list[float]()
    with monkeypatch.context() as patch:
        patch.setattr(rows.grammars.mask_threads, "wait", lambda are_done, deadline_s: waits.append(deadline_s))
        for _ in range(10):
            assert rows.stage.absent(np.array([0, 1])) == {0}
    assert len(waits) == 1
    gate.is_open.set()
    settle(rows, 0)
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)  # every mask is slow from now on
    rows.note(0, ids["7"])
    settle(rows, 0)
    gate.is_open.clear()
    rows.note(0, ids["1"])
    monkeypatch.setattr(rows.grammars.mask_threads, "wait", lambda *_: pytest.fail("a step waits after a slow mask"))
    assert rows.stage.absent(np.array([0, 1])) == {0}


def test_steps_leave_a_row_out_that_has_missed_two_draws(
    rows: Rows, ids: dict[str, int], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first late mask is expected with the next draw."""
    rows.start(0, 'start: "7" "8"')
    rows.start(1, "start: /[12]+/")
    settle(rows, 1)
    rows.stage._constraint(0).compiled.result(60)
    monkeypatch.setattr(grammar_masks, "MASK_WAIT_S", 0.0)
    monkeypatch.setattr(grammar_masks, "LEAST_WAIT_S", 0.0)
    for has_missed in (False, False, True):
        assert rows.stage.is_unready(0) is has_missed
        assert not rows.stage.is_unready(1)
        assert rows.stage.absent(np.array([0, 1])) == {0}
    rung = Event()
    rows.grammars.mask_threads.wake_once(rung.set)
    gate.is_open.set()
    assert rung.wait(60), "the step loop hears of the mask"
    assert not rows.stage.is_unready(0)
    gate.is_open.clear()
    assert not rows.stage.absent(np.array([0]))
    rows.stage.note(np.array([0]), torch.tensor([ids["7"]]))
    assert not rows.stage.is_unready(0), "counted for each mask"


def test_steps_leave_a_row_out_while_its_grammar_is_compiled(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, compile_it = Event(), Grammars._compile

    def slow(grammars: Grammars, grammar: str) -> Any:
        assert may_end.wait(60)
        return compile_it(grammars, grammar)

    monkeypatch.setattr(Grammars, "_compile", slow)
    rung = Event()
    rows.grammars.mask_threads.wake_once(rung.set)
    rows.start(0, 'start: "9"')
    assert rows.stage.is_unready(0)
    assert rows.grammars.is_compiling('start: "9"')
    assert not rows.grammars.is_compiling("of a request. It was dropped, and the row compiles it again")
    assert not rung.is_set()
    may_end.set()
    assert rung.wait(60), "the step loop hears of the end"
    settle(rows, 0)
    assert not rows.stage.is_unready(0)
    assert not rows.grammars.is_compiling('start: "9"')


@dataclass(eq=False)
class Task:
    """A mask that is computed once `may_end` is set."""

    may_end: Event
    pace: Pace = Pace.QUICK
    is_ready: bool = False
    cost_s: float = 0.0
    num_calm: int = 0
    is_lone: bool = False


def wait_for_all(tasks: Sequence[Task]) -> Sequence[Task]:
    for task in tasks:
        task.may_end.wait(60)
    return tasks


def run_all(threads: MaskThreads, tasks: Sequence[Task]) -> None:
    for task in tasks:
        task.is_ready = False
    threads.begin(tasks, wait_for_all)
    threads.wait(lambda: all(task.is_ready for task in tasks), 60.0)
    assert all(task.is_ready for task in tasks)


def test_the_slowest_rows_come_last() -> None:
    """Many rows of the slowest masks hold up no row with a shorter mask: each of theirs may take 0.1 s."""
    threads, now, begun, order = MaskThreads(), Event(), Event(), list[float]()
    held = Task(now, Pace.SLOW, cost_s=9.0)
    slow = [Task(now, Pace.SLOW, cost_s=0.1) for _ in range(60)]
    less = [Task(now, Pace.SLOW, cost_s=cost_s) for cost_s in (0.02, 0.005)]

    def compute(tasks: Sequence[Task]) -> Sequence[Task]:
        order.extend(task.cost_s for task in tasks)
        begun.set()
        return wait_for_all(tasks)

    threads.begin([held], compute)
    assert begun.wait(60.0), "the thread has it"
    threads.begin([*slow, *less], compute)
    now.set()
    threads.wait(lambda: all(task.is_ready for task in slow), 60.0)
    threads.close()
    assert order == [9.0, 0.005, 0.02, *[0.1] * 60]


def test_slow_masks_do_not_hold_those_of_others() -> None:
    """Those that are known to be slow have a thread of their own."""
    threads, may_end, now = MaskThreads(), Event(), Event()
    now.set()
    slow, quick = [Task(may_end, Pace.SLOW) for _ in range(5)], [Task(now) for _ in range(40)]
    threads.begin([*slow, *quick], wait_for_all)
    threads.wait(lambda: all(task.is_ready for task in quick), 60.0)
    assert all(task.is_ready for task in quick)
    assert not any(task.is_ready for task in slow)
    may_end.set()
    threads.close()


def test_a_slow_call_is_narrowed_down_to_the_slow_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows, then eight of them, then each alone; a row that is slow alone has to be quick for a while."""
    threads, now = MaskThreads(), Event()
    now.set()
    tasks = [Task(now) for _ in range(20)]
    monkeypatch.setattr(mask_threads, "SLOW_GROUP_S", -1.0)  # every call is slow
    run_all(threads, tasks)
    assert {(task.pace, task.is_lone) for task in tasks} == {(Pace.SUSPECT, False)}
    run_all(threads, tasks)
    assert {(task.pace, task.is_lone) for task in tasks} == {(Pace.SUSPECT, True)}
    monkeypatch.setattr(mask_threads, "SLOW_S", -1.0)
    run_all(threads, tasks[:4])
    assert {task.pace for task in tasks[:4]} == {Pace.SLOW}
    monkeypatch.setattr(mask_threads, "SLOW_S", 60.0)
    run_all(threads, tasks)
    assert [task.pace for task in tasks] == [Pace.SLOW] * 4 + [Pace.QUICK] * 16
    for _ in range(mask_threads.CALM - 1):
        assert {task.pace for task in tasks[:4]} == {Pace.SLOW}
        run_all(threads, tasks[:4])
    assert {task.pace for task in tasks} == {Pace.QUICK}
    monkeypatch.setattr(mask_threads, "SLOW_GROUP_S", 60.0)
    run_all(threads, tasks)
    assert {task.pace for task in tasks} == {Pace.QUICK}
    threads.close()


def refuse(_: Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("pace", Pace)
def test_rows_wait_while_the_system_refuses_threads(
    pace: Pace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The step loop, which begins their masks, goes on. Said once."""
    threads, now = MaskThreads(), Event()
    now.set()
    tasks = [Task(now, pace) for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        for task in tasks[:2]:
            threads.begin([task], wait_for_all)
    [said] = [record.getMessage() for record in caplog.records]
    assert said.endswith("can't start new thread")
    assert not any(task.is_ready for task in tasks)
    threads.begin(tasks[2:], wait_for_all)
    threads.wait(lambda: all(task.is_ready for task in tasks), 60.0)
    assert all(task.is_ready for task in tasks)
    threads.close()


def test_a_grammar_that_gets_no_thread_fails_its_request(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone. The next one with the same grammar is compiled again."""
    rows.start(0, DIGITS)
    settle(rows, 0)
    rows.grammars._threads.shutdown()
    monkeypatch.setattr(rows.grammars, "_threads", ThreadPoolExecutor(1))
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", refuse)
        rows.start(1, "start: /[12]+/")
        settle(rows, 1)
    assert rows.allowed(0, 1) == [{ids["1"]}, set(range(VOCAB_SIZE))]
    [(row, said)] = rows.stage.take_failures().items()
    assert row == 1
    assert str(said).endswith("cannot be compiled: can't start new thread")
    rows.start(1, "start: /[12]+/")
    assert rows.allowed(0, 1) == [{ids["1"]}, {ids["1"], ids["2"]}]


def test_a_grammar_of_a_waiting_row_is_not_dropped(
    rows: Rows, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 1)
    for row in range(5):
        rows.start(row, f'start: "{row}"')
    assert rows.allowed(0, 1, 2, 3, 4) == [{ids[f"{row}"]} for row in range(5)]


def test_eos_tokens_outside_of_the_vocabulary_are_left_out(demo_directory: Path, ids: dict[str, int]) -> None:
    """A config may name them: the model starts, and its grammars end with the others."""
    grammars = Grammars(demo_directory, VOCAB_SIZE, frozenset({EOS, 5000}))
    context = StageContext(1, VOCAB_SIZE, frozenset({EOS, 5000}), torch.device("cpu"), moved, grammars)
    rows = Rows(GrammarMasks(context), grammars)
    rows.start(0, 'start: "1"', min_tokens=5)
    assert rows.allowed(0) == [{ids["1"]}]
    rows.note(0, ids["1"])
    assert rows.allowed(0) == [{EOS}]
    grammars.close()


def never(grammar: str) -> None:
    raise RuntimeError("never")


def test_a_node_that_serves_no_grammar_says_why(
    tmp_path: Path, demo_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        Grammars(tmp_path, VOCAB_SIZE, frozenset()).prepare(DIGITS)
    for none in (frozenset[int](), frozenset({5000})):
        with pytest.raises(InvalidRequest, match="EOS token"):
            Grammars(demo_directory, VOCAB_SIZE, none).prepare(DIGITS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest) as caught:
        Grammars(demo_directory, VOCAB_SIZE, frozenset()).prepare(DIGITS)
    assert str(caught.value) == NO_PACKAGE


def test_compiled_grammars_are_kept_and_bounded(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 3)
    for number in range(4):
        grammars.prepare(f'start: "{number}"')
    kept = grammars._compiled['start: "1"']
    grammars.prepare('start: "1"')
    assert grammars._compiled['start: "1"'] is kept
    while len(grammars._compiled) > 3:
        grammars._compiled.popitem(last=False)
    grammars.prepare('start: "5"')
    assert list(grammars._compiled) == ['start: "3"', 'start: "1"', 'start: "5"']
    assert not state_of(grammars, 'start: "0"').error, "made again"


def serve(executor: DeviceExecutor, depth: int, *, is_alone: bool = False, **more: Any) -> list[tuple[int, ...]]:
    """A constrained sequence and a free one, twelve steps, of which `depth` are under way: the tokens of each step.

    `is_alone`: without the free one. `more`: settings of all.
    """
    samplings = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=1, grammar=grammar, **more)
        for grammar in ("start: /[0-9]{2}[a-z]{3}/ /[0-9]{9}/", "")
    ][: 2 - is_alone]
    rows = range(len(samplings))
    executor.check(samplings[0])
    starts = tuple(SequenceStart(i, (5, 6, 7), 3, table((i,)), sampling, i) for i, sampling in enumerate(samplings))
    flights, tokens = list[PendingStep](), list[tuple[int, ...]]()
    for step in range(12):
        parts = [(i, 2 + step, 1) for i in rows] if step else [(i, 0, 3) for i in rows]
        chunks = tuple(SequenceChunk(*part, num_samples=1) for part in parts)
        flights.append(executor.launch(Batch(step, () if step else starts, chunks)))
        while flights and (len(flights) == depth or step == 11):
            result = flights.pop(0).result()
            assert result.failures == {}
            tokens.append(tuple(result.samples[i][0].token_id for i in rows))
    executor.launch(Batch(12, departures=tuple(rows))).result()
    return tokens


def check_depths(executor: DeviceExecutor, directory: Path) -> None:
    one, two = serve(executor, 1), serve(executor, 2)
    assert one == two
    text = AutoTokenizer.from_pretrained(directory).decode([constrained for constrained, _ in one])
    assert re.fullmatch("[0-9]{2}[a-z]{3}[0-9]{0,9}", text), text


def test_two_steps_under_way_draw_as_one(demo_directory: Path) -> None:
    executor = make_executor(demo_directory)
    check_depths(executor, demo_directory)
    executor.close()


@pytest.mark.parametrize("more", [{}, {"top_k": 40, "logprobs": 1, "frequency_penalty": 0.4}])
def test_constrained_rows_are_drawn_by_graphs(demo_directory: Path, more: dict[str, Any]) -> None:
    """Beside a free row, and alone."""
    executor = make_executor(demo_directory)
    for is_alone in (False, True):
        launched = serve(executor, 1, is_alone=is_alone, **more)
        drawn = with_graphs(executor, decode_sizes(2)).drawn
        assert serve(executor, 2, is_alone=is_alone, **more) == launched
        assert len(drawn) == 11 * (1 + (bool(more) and not is_alone)), "all steps but the prompts"
        executor._graph_sizes = GraphSizes(())
    executor.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_two_steps_under_way_draw_as_one(demo_directory: Path) -> None:
    """The constrained row is drawn from what a graph computed."""
    executor = cuda_executor(demo_directory, 64)
    check_depths(executor, demo_directory)
    executor.close()


@pytest.mark.long
def test_masks_of_128_000_tokens(tmp_path: Path) -> None:
    """More rows of the embedding than tokens, and no multiple of 32."""
    vocab_size, num_tokens, num_rows = 128_019, 128_000, 8
    vocab = write_tokenizer(tmp_path, num_tokens)
    grammars = Grammars(tmp_path, vocab_size, frozenset({EOS}))
    grammar = 'start: %json {"type":"object","properties":{"name":{"type":"string"}},"required":["name"],'
    grammar += '"x-guidance":{"whitespace_flexible":false}}'
    grammars.prepare(grammar)
    context = StageContext(num_rows, vocab_size, frozenset({EOS}), torch.device("cpu"), moved, grammars)
    stage = GrammarMasks(context)
    text = '{"name":"'
    for row in range(num_rows):
        output = tuple(vocab[letter] for letter in text[: row + 2])
        sampling = SamplingParams(max_tokens=9, grammar=grammar)
        stage.start(row, SequenceStart(row, (5, *output), 1, (), sampling, 0))
    assert not stage.absent(np.arange(num_rows))
    inputs = stage.prepare(np.arange(num_rows), np.full(num_rows, 5))
    assert inputs is not None
    logits = torch.zeros(num_rows, vocab_size)
    stage.apply(logits, inputs)
    kept = logits == 0
    assert stage.take_failures() == {}
    assert not kept[:, num_tokens:].any(), "rows without a token"
    rows = kept.tolist()
    for row in range(1, num_rows - 1):
        rest = text[row + 2 :]
        pieces = {piece for piece, token_id in vocab.items() if rows[row][token_id]}
        assert rest[0] in pieces
        assert all(piece.startswith(rest) or rest.startswith(piece) for piece in pieces)
    inside = {piece for piece, token_id in vocab.items() if rows[num_rows - 1][token_id]}
    assert len(inside) > 50_000, "inside of a string"
    grammars.close()


def write_tokenizer(directory: Path, num_tokens: int) -> dict[str, int]:
    """A byte-level tokenizer of random pieces. -> token id by piece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    generator = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789" + '{}":,[]._-'
    vocab = {
        piece: at for at, piece in enumerate(("<s>", "<unk>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())))
    }
    while len(vocab) < num_tokens:
        vocab.setdefault("".join(generator.choices(letters, k=generator.randint(2, 9))), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<unk>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    return vocab
