"""Greedy decoding gives transformers' tokens on every path, whatever the cache, the scheduler and memory do meanwhile.

Every test sends all its prompts at once. Figures are logged: `pytest -o log_cli=true --log-cli-level=INFO`.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from tests.deadlines import wait_until
from tests.integration.gate import Gate
from tests.integration.reference import LENGTHS, NUM_NEW_TOKENS, TIE, DemoModel, Reference
from tests.integration.system import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    POLL_S,
    SHALLOW_BLOCK_BYTES,
    Answer,
    Path,
    System,
    running_system,
)
from tests.shallow_model import as_demo_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
logger = logging.getLogger(__name__)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LOGPROB_TOLERANCE = 1e-4
MOST_TIES = 0.02  # of the prompts of one run may leave the reference at a tie
CHUNK_TOKENS = 48
IN_FLIGHT, MOST_ORDERS = "pd_requests_in_flight", 8
CONVERSATIONS = (
    "Mira 4831. Oskar 2210. Lena 7745. Oskar?", "Hello!", "Who are you?", "Tell me a short story about a fox.",
    "Mira is 4831. Oskar is 2210. What is the number of Mira?", "What is the capital of France?",
)  # fmt: skip


@dataclass
class Tally:
    """What a run has compared."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_ties: int = 0
    worst_logprob: float = 0.0


@pytest.fixture
def system(system_with_mixed: System) -> System:
    return system_with_mixed


@pytest.fixture(scope="module")
def roomy_system() -> Iterator[System]:
    """With room for all prompts of `references` at once, beside their outputs."""
    with running_system("--kv-cache-gb=0.75", "--load-deadline-s=200", own_mixed=True) as system:
        yield system


@pytest.mark.slow
@pytest.mark.parametrize("path", Path)
def test_cold_then_warm(
    path: Path, roomy_system: System, whole_references: list[Reference], whole_model: DemoModel
) -> None:
    """The whole model: in `make test` searches of beams have it (test_beam_searches.py)."""
    assert len(whole_references) >= 200
    check_cold_then_warm(path, roomy_system, whole_references, whole_model, BLOCK_BYTES)


@pytest.mark.parametrize("path", Path)
def test_cold_then_warm_at_every_length(
    path: Path, system: System, some_references: list[Reference], demo_model: DemoModel
) -> None:
    """The two longest prompts P-first only: they take as long as all others. D waits for chunks in `test_chunking`."""
    *_, limit, _ = sorted(length for length, _ in LENGTHS)
    assert {len(one.prompt) for one in some_references} == {length for length, _ in LENGTHS}
    chosen = [one for one in some_references if path is Path.P_FIRST or len(one.prompt) < limit]
    check_cold_then_warm(path, system, chosen, demo_model, SHALLOW_BLOCK_BYTES)


def check_cold_then_warm(
    path: Path, system: System, references: Sequence[Reference], model: DemoModel, block_bytes: int
) -> None:
    """Parity of both runs, and what the second one finds of the first: on D, and on P where D asks P."""
    node, size = system.node_of(path), BLOCK_SIZE
    lengths = [len(reference.prompt) for reference in references]
    salt = f"warm {path} {len(lengths)}"

    before = system.settled_metrics(node)
    answers = run(system, path, references, model, salt=salt)
    assert [answer.num_cached_tokens for answer in answers] == [0] * len(answers)
    assert {answer.headers["x-pd-prefill"] for answer in answers} == {system.prefiller_of(path)}
    assert {answer.headers["x-pd-decode"] for answer in answers} == {node}
    cold = system.settled_metrics(node)
    num_blocks = 0 if path is Path.MIXED else sum(-(-length // size) for length in lengths)
    assert _grown(before, cold, "pd_kv_transfer_bytes_total") == num_blocks * block_bytes

    answers = run(system, path, references, model, salt=salt)
    whole = [length // size * size if path is not Path.MIXED else (length - 1) // size * size for length in lengths]
    warm = system.settled_metrics(node)
    if path is Path.D_FIRST:  # with nothing missing D does not ask: it computes the last block's last token again
        local = [length % size == 0 for length in lengths]
        nodes = [node if alone else "prefill" for alone in local]
        assert [answer.headers["x-pd-prefill"] for answer in answers] == nodes
        whole = [length - size if alone else hit for length, alone, hit in zip(lengths, local, whole, strict=True)]
    assert [answer.num_cached_tokens for answer in answers] == whole
    num_blocks = 0 if path is Path.MIXED else sum(length % size != 0 for length in lengths)
    assert _grown(cold, warm, "pd_kv_transfer_bytes_total") == num_blocks * block_bytes
    assert _grown(before, warm, "pd_preemptions_recompute_total") == 0


@pytest.fixture(scope="module")
def conversations(demo_model: DemoModel) -> list[Reference]:
    """What transformers answers to CONVERSATIONS."""
    return demo_model.generate([demo_model.chat_prompt(_messages(text)) for text in CONVERSATIONS])


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("path", Path)
def test_chat(path: Path, system: System, conversations: list[Reference], demo_model: DemoModel) -> None:
    bodies = [
        {"messages": _messages(text), "max_tokens": NUM_NEW_TOKENS, "temperature": 0, "logprobs": True}
        for text in CONVERSATIONS
    ]
    answers = system.ask_all(path, [(CHAT, body) for body in bodies])
    tally = Tally()
    for answer, reference in zip(answers, conversations, strict=True):
        choice = answer.choices[0]
        entries = choice["logprobs"]["content"]
        logprobs = {
            "tokens": [bytes(entry["bytes"]).decode() for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
        }
        plain = choice | {"text": choice["message"]["content"], "logprobs": logprobs}
        compare(Answer(answer.body | {"choices": [plain]}, answer.headers), _expected(reference, demo_model, 0),
                demo_model, tally)  # fmt: skip
    assert tally.num_ties <= 1


@pytest.mark.parametrize(
    ("path", "stream", "longest"),
    [
        (Path.P_FIRST, True, 300), (Path.D_FIRST, False, 512),
        pytest.param(Path.P_FIRST, False, 3500, marks=pytest.mark.slow),
        pytest.param(Path.D_FIRST, True, 3500, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_log_probabilities_of_prompts(
    path: Path, stream: bool, longest: int, system: System, some_references: list[Reference]
) -> None:
    """D computes them in the pass that answers, whatever order is asked for: the answers of one node, cold and warm."""
    of_length = {len(reference.prompt): reference.prompt for reference in some_references}
    prompts = [prompt for length, prompt in of_length.items() if length <= longest]
    more = {"prompt_logprobs": 2, "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0, "ignore_eos": True,
            "stream": stream, "stream_options": {"include_usage": True} if stream else None}  # fmt: skip
    requests = [(COMPLETIONS, more | {"prompt": list(prompt), "cache_salt": f"{path} {stream}"}) for prompt in prompts]
    expected = system.ask_all(Path.MIXED, requests)
    num_tokens = sum(map(len, prompts))
    for _ in ("cold", "warm"):
        before = system.settled_metrics("decode")
        for answer, alone in zip(system.ask_all(path, requests), expected, strict=True):
            check_same_scores(answer, alone)
            assert answer.headers["x-pd-decode"] == "decode"
            assert answer.headers["x-pd-route"] == "direct; reason=prompt-logprobs"
        grown = _all_grown(before, system.settled_metrics("decode"))
        # the tokens with which `settled_metrics` made D tell `before` and this
        assert grown['pd_prompt_tokens_total{work="generate"}'] - num_tokens in range(3)


def check_same_scores(found: Answer, expected: Answer) -> None:
    """Equal answers; numbers up to what the order of additions changes."""
    (choice,), (wanted,) = found.choices, expected.choices
    scores, wanted_scores = choice["logprobs"], wanted["logprobs"]
    assert (choice["text"], scores["tokens"]) == (wanted["text"], wanted_scores["tokens"])
    assert scores["text_offset"] == wanted_scores["text_offset"]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is choice["prompt_logprobs"][0] is None
    near = partial(pytest.approx, abs=LOGPROB_TOLERANCE)
    assert scores["token_logprobs"][1:] == near(wanted_scores["token_logprobs"][1:])
    for ours, theirs in zip(scores["top_logprobs"][1:], wanted_scores["top_logprobs"][1:], strict=True):
        assert sorted(ours.values()) == near(sorted(theirs.values()))
    for ours, theirs in zip(choice["prompt_logprobs"][1:], wanted["prompt_logprobs"][1:], strict=True):
        assert next(iter(ours)) == next(iter(theirs))
        values = [sorted(one["logprob"] for one in entry.values()) for entry in (ours, theirs)]
        assert values[0] == near(values[1])
    assert found.body["usage"] == expected.body["usage"]


CHUNKING = ("--max-num-seqs=16", f"--max-num-batched-tokens={CHUNK_TOKENS}", "--load-deadline-s=200")
SHORT_OF_MEMORY = ("--num-blocks=22",)  # for a handful of the prompts that P has promised


@pytest.fixture(scope="module")
def chunking_system() -> Iterator[System]:
    """Steps so small that nearly every prompt takes several."""
    with running_system(*CHUNKING, *as_demo_model(), "--kv-cache-gb=0.15") as system:
        yield system


@pytest.fixture(scope="module")
def small_chunking_system() -> Iterator[System]:
    """P's memory is soon full. It has room for more sequences than for their blocks."""
    roles = {"prefill": [f"--max-num-seqs={CHUNK_TOKENS}", *SHORT_OF_MEMORY], "decode": ["--kv-cache-gb=0.04"]}
    with running_system(*CHUNKING, *as_demo_model(), role_flags=roles) as system:
        yield system


@pytest.mark.parametrize("path", Path)
def test_chunking(
    path: Path, small_chunking_system: System, short_references: list[Reference], demo_model: DemoModel
) -> None:
    """P computes each prompt as the blocks of earlier ones are released."""
    before = small_chunking_system.settled_metrics("prefill")
    check_chunking(path, small_chunking_system, short_references, demo_model)
    if path is not Path.MIXED:
        check_short_of_memory(small_chunking_system, short_references, before)


@pytest.mark.slow
@pytest.mark.parametrize("path", Path)
def test_chunking_all(path: Path, chunking_system: System, references: list[Reference], demo_model: DemoModel) -> None:
    check_chunking(path, chunking_system, references, demo_model)


def check_chunking(path: Path, system: System, references: Sequence[Reference], model: DemoModel) -> None:
    """Parity, and that the prompts went through in many small steps."""
    prefiller = "decode" if path is Path.MIXED else "prefill"
    before = system.settled_metrics(prefiller)
    answers = run(system, path, references, model, salt=f"chunks {path} {len(references)}")
    assert {answer.headers["x-pd-prefill"] for answer in answers} == {prefiller}
    after = system.settled_metrics(prefiller)
    num_prompt_tokens = sum(len(reference.prompt) for reference in references)
    num_steps = _grown(before, after, "pd_engine_steps_total")
    assert num_steps >= num_prompt_tokens / CHUNK_TOKENS
    assert _grown(before, after, "pd_engine_step_tokens_total") / num_steps <= CHUNK_TOKENS
    assert num_steps > len(references) / 2


def d_short_of_memory(kind: str, num_blocks: int, swap_gb: float, gate: Gate) -> AbstractContextManager[System]:
    """D's cache cannot hold the sequences that run there; P's holds everything."""
    decode = [f"--num-blocks={num_blocks}", *([f"--swap-gb={swap_gb}"] if kind == "swap" else [])]
    roles = {"decode": decode, "prefill": ["--kv-cache-gb=0.25"]}
    return running_system(*as_demo_model(), "--load-deadline-s=400", role_flags=roles, gate=gate)


@pytest.fixture(scope="module")
def swapping_system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with d_short_of_memory("swap", 24, 0.02, Gate(tmp_path_factory.mktemp("gate"), "decode")) as system:
        yield system


@pytest.fixture(scope="module")
def short_of_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """D's cache cannot hold the sequences that run there; P's holds everything."""
    flags = (*as_demo_model(), "--load-deadline-s=400", "--max-num-seqs=10")
    gate = Gate(tmp_path_factory.mktemp("gate"), "decode")
    with running_system(*flags, role_flags={"decode": ["--num-blocks=24"]}, gate=gate) as system:
        yield system


@pytest.mark.parametrize("path", Path)
def test_preemption(
    path: Path, short_of_memory: System, short_references: list[Reference], demo_model: DemoModel
) -> None:
    check_preemption(path, short_of_memory, "recompute", short_references, demo_model)


@pytest.mark.slow
@pytest.mark.parametrize("path", Path)
def test_preemption_by_swap(
    path: Path, swapping_system: System, short_references: list[Reference], demo_model: DemoModel
) -> None:
    check_preemption(path, swapping_system, "swap", short_references, demo_model)


@pytest.fixture(scope="module", params=["recompute", "swap"])
def barely_enough_memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, System]]:
    """The same for the longest prompts: one of them nearly fills the cache."""
    gate = Gate(tmp_path_factory.mktemp("gate"), "decode")
    with d_short_of_memory(request.param, 225, 0.04, gate) as system:
        yield request.param, system


@pytest.mark.slow
@pytest.mark.parametrize("path", Path)
def test_preemption_all(
    path: Path, barely_enough_memory: tuple[str, System], references: list[Reference], demo_model: DemoModel
) -> None:
    kind, system = barely_enough_memory
    check_preemption(path, system, kind, references, demo_model)


def check_preemption(path: Path, system: System, kind: str, references: Sequence[Reference], model: DemoModel) -> None:
    """Parity, and that sequences were preempted on the node that generates: D goes on once it has all of them.

    The machine decides in which order prompts come. In a few orders they fit one after the other: all are sent again.
    """
    before, name = system.settled_metrics("decode"), f"pd_preemptions_{kind}_total"
    for attempt in range(MOST_ORDERS):
        with ThreadPoolExecutor() as pool:
            with system.decode_held(answer=4):
                running = pool.submit(run, system, path, references, model, salt=f"{kind} {path} {attempt}")
                wait_until(
                    lambda: system.metric("decode", IN_FLIGHT) == len(references) or running.done(),  # noqa: B023
                    poll_s=POLL_S,
                )
                assert not running.done()
            answers = running.result()
        assert {answer.headers["x-pd-prefill"] for answer in answers} == {system.prefiller_of(path)}
        if preemptions := _grown(before, system.settled_metrics("decode"), name):
            break
    logger.info("%s: %d preemptions by %s", path, preemptions, kind)
    assert preemptions > 0


@pytest.fixture(scope="module")
def p_short_of_memory() -> Iterator[System]:
    """Its steps take whole prompts."""
    with running_system(*as_demo_model(), "--load-deadline-s=400", role_flags={"prefill": SHORT_OF_MEMORY}) as system:
        yield system


@pytest.mark.slow
@pytest.mark.parametrize("path", [Path.P_FIRST, Path.D_FIRST])
def test_leases_that_wait_for_memory(
    path: Path, p_short_of_memory: System, short_references: list[Reference], demo_model: DemoModel
) -> None:
    before = p_short_of_memory.settled_metrics("prefill")
    answers = run(p_short_of_memory, path, short_references, demo_model, salt=path)
    assert {answer.headers["x-pd-prefill"] for answer in answers} == {"prefill"}
    check_short_of_memory(p_short_of_memory, short_references, before)


def check_short_of_memory(system: System, references: Sequence[Reference], before: dict[str, float]) -> None:
    """The prompts do not fit P's memory, and it has taken blocks of earlier ones since `before`."""
    num_blocks = sum(-(-len(reference.prompt) // BLOCK_SIZE) for reference in references)
    after = system.settled_metrics("prefill")
    assert num_blocks > 3 * after["pd_kv_num_blocks"]
    assert _grown(before, after, "pd_prefix_cache_evicted_blocks_total") > 0


# a run


def run(system: System, path: Path, references: Sequence[Reference], model: DemoModel, *, salt: str) -> list[Answer]:
    """Send every prompt at once and compare the answers. Every second one may end with the turn."""
    expected = [_expected(reference, model, index) for index, reference in enumerate(references)]
    requests = [(COMPLETIONS, _body(one, ignore_eos=len(one.tokens) == NUM_NEW_TOKENS, salt=salt)) for one in expected]
    answers = system.ask_all(path, requests)
    tally = Tally()
    for answer, one in zip(answers, expected, strict=True):
        compare(answer, one, model, tally)
    logger.info("%s, %s: %s", path, salt, tally)
    assert tally.num_prompts == len(references)
    assert tally.num_ties <= max(1, MOST_TIES * len(references))
    system.settle()
    return answers


def _expected(reference: Reference, model: DemoModel, index: int) -> Reference:
    """Every second prompt stops where its turn ends, unless that is at once: then no KV would have to be moved."""
    eos = model.eos_token_id
    return reference if index % 2 or reference.tokens[0] == eos else reference.until(eos)


def _body(expected: Reference, *, ignore_eos: bool, salt: str) -> dict[str, Any]:
    return {
        "prompt": list(expected.prompt),
        "max_tokens": NUM_NEW_TOKENS,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": ignore_eos,
        "cache_salt": salt,
    }


def compare(answer: Answer, expected: Reference, model: DemoModel, tally: Tally) -> None:
    """Token by token, until the reference itself could have gone either way."""
    choice = answer.choices[0]
    tokens = model.token_ids(choice["logprobs"]["tokens"])
    logprobs = choice["logprobs"]["token_logprobs"]
    assert len(tokens) == len(logprobs) == answer.body["usage"]["completion_tokens"]
    tally.num_prompts += 1
    pairs = zip(tokens, expected.tokens, expected.gaps, logprobs, expected.logprobs, strict=False)
    for position, (token, wanted, gap, logprob, wanted_logprob) in enumerate(pairs):
        if token != wanted:
            where = f"token {position} after {len(expected.prompt)} prompt tokens"
            assert gap < TIE, f"{where} is {token}, not {wanted}; the two best logits are {gap} apart"
            tally.num_ties += 1
            return
        assert logprob == pytest.approx(wanted_logprob, abs=LOGPROB_TOLERANCE)
        tally.worst_logprob = max(tally.worst_logprob, abs(logprob - wanted_logprob))
        tally.num_tokens += 1
    assert len(tokens) == len(expected.tokens)
    ended = len(tokens) < NUM_NEW_TOKENS or (tokens[-1] == model.eos_token_id and choice["finish_reason"] == "stop")
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert choice["text"] == model.text(tokens)
    assert answer.body["usage"]["prompt_tokens"] == len(expected.prompt)


def _all_grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _grown(before: dict[str, float], after: dict[str, float], name: str) -> float:
    return after[name] - before[name]
