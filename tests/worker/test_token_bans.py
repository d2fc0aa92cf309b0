"""`allowed_token_ids` and `bad_words` in the real worker: alone, at once, preempted, and after known tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pd_cluster.protocol.messages import AddRequest
from pd_cluster.protocol.sampling_params import MAX_BAD_WORD_TOKENS, SamplingParams
from pd_cluster.scheduling.batch import SequenceStart
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.logits_stages.bad_words import BadWords
from pd_cluster.worker.logits_stages.stage import StageContext
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, Bench, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_connectors.base import Connector

EOS = 2


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    executor = DeviceExecutor.started(CONFIG, lambda _: None)  # 14 blocks: the requests preempt each other
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


@pytest.fixture(params=["off", "on"])
def bench(request: pytest.FixtureRequest, executor: DeviceExecutor, connector: Connector) -> Bench:
    """With steps that do not overlap, and with steps that do."""
    return Bench(executor, connector, request.param)


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, **settings)


def tokens_of(bench: Bench, *all_params: SamplingParams, known: Sequence[int] = ()) -> list[list[int]]:
    """The first choice of each, all at once."""
    for at, params in enumerate(all_params):
        bench.send(AddRequest(f"r{at}", list(PROMPTS[at % 3]), params, known=(tuple(known),) if known else ()))
    bench.run()
    bench.reasons.clear()
    found = [bench.tokens.pop((f"r{at}", 0)) for at in range(len(all_params))]
    bench.tokens.clear()
    return found


def contains(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(tuple(tokens[i : i + len(word)]) == tuple(word) for i in range(len(tokens)))


def test_words_are_not_completed_and_other_rows_do_not_change(bench: Bench) -> None:
    plain = tokens_of(bench, greedy(), greedy(), greedy())
    pair, triple = tuple(plain[0][3:5]), tuple(plain[2][6:9])
    single = (plain[1][0],)
    banned = tokens_of(bench, greedy(bad_words=(pair, (5,))), greedy(), greedy(bad_words=(triple,)))
    assert banned[1] == plain[1]
    assert banned[0][:4] == plain[0][:4], "the word's beginning is allowed"
    assert not contains(banned[0], pair)
    assert banned[2][:8] == plain[2][:8]
    assert not contains(banned[2], triple)
    assert not contains(tokens_of(bench, greedy(), greedy(bad_words=(single,)))[1], single)
    # a continuation knows the word's beginning
    rest = tokens_of(bench, greedy(bad_words=(pair,)), known=banned[0][:4])[0]
    assert rest == banned[0][4:]


def test_a_word_of_the_prompt_does_not_count(bench: Bench) -> None:
    plain = tokens_of(bench, greedy())[0]
    word = (PROMPTS[0][-1], plain[0])
    assert tokens_of(bench, greedy(bad_words=(word,)))[0][0] == plain[0]


def test_n_sequences_each_follow_their_own_output(bench: Bench) -> None:
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=3, n=3, ignore_eos=True)
    bench.send(AddRequest("r", list(PROMPTS[1]), params))
    bench.run()
    pairs = tuple(tuple(bench.tokens["r", i][2:4]) for i in range(3))
    bench.reasons.clear()
    bench.tokens.clear()
    allowed = tuple(range(60, 90))
    bench.send(AddRequest("r", list(PROMPTS[1]), SamplingParams(max_tokens=24, seed=3, n=3, bad_words=pairs)))
    bench.send(AddRequest("s", list(PROMPTS[1]), SamplingParams(max_tokens=24, seed=3, n=2, allowed_token_ids=allowed)))
    bench.run()
    for index in range(3):
        assert not any(contains(bench.tokens["r", index], pair) for pair in pairs)
    for index in range(2):
        assert len(bench.tokens["s", index]) == 24, "the end is not in the list"
        assert set(bench.tokens["s", index]) <= set(allowed)


def test_bans_of_all_that_is_allowed_leave_it(bench: Bench) -> None:
    """The end is banned by min_tokens, token 70 as a word: one of the two is drawn, and nothing else."""
    params = SamplingParams(
        max_tokens=6,
        temperature=1.0,
        min_tokens=4,
        allowed_token_ids=(EOS, 70),
        bad_words=((70,),),
        logit_bias={71: 100},
    )
    assert set(tokens_of(bench, params)[0]) <= {EOS, 70}
    assert tokens_of(bench, greedy(allowed_token_ids=(EOS, 70), logit_bias={70: 50}))[0] == [70] * 24


def test_words_against_a_plain_search() -> None:
    """Random words and outputs over a small vocabulary, several rows in a step."""
    random, vocab_size, num_rows = np.random.default_rng(5), 5, 4
    context = StageContext(num_rows, vocab_size, frozenset({EOS}), torch.device("cpu"), torch.from_numpy)
    stage = BadWords(context)
    for _ in range(40):
        words, outputs = [], []
        for row in range(num_rows):
            lengths = random.integers(1, 5, random.integers(0, 6)).tolist()
            words.append(tuple(tuple(random.integers(0, vocab_size, length).tolist()) for length in lengths))
            outputs.append(random.integers(0, vocab_size, random.integers(0, 40)).tolist())
            params = SamplingParams(max_tokens=1, bad_words=words[row])
            start = SequenceStart(row, (1, 1, *outputs[row]), 2, (), params, 0)
            assert stage.start(row, start) == bool(words[row])
        for _ in range(3):
            rows = random.permutation(num_rows)
            logits = torch.zeros(num_rows, vocab_size)
            if any(words):
                inputs = stage.prepare(rows, rows)
                assert inputs is not None
                stage.apply(logits, inputs)
            for at, row in enumerate(rows.tolist()):
                for token in range(vocab_size):
                    after = [*outputs[row], token]
                    is_banned = any(after[-len(word) :] == list(word) for word in words[row])
                    assert (logits[at, token] == -torch.inf) == is_banned, (words[row], after)
            drawn = random.integers(0, vocab_size, num_rows)
            if any(words):
                stage.note(rows, torch.from_numpy(drawn))
            for at, row in enumerate(rows.tolist()):
                outputs[row].append(int(drawn[at]))


def test_the_longest_word_is_found() -> None:
    context = StageContext(1, 9, frozenset({EOS}), torch.device("cpu"), torch.from_numpy)
    stage, word = BadWords(context), tuple(i % 9 for i in range(MAX_BAD_WORD_TOKENS))
    params = SamplingParams(max_tokens=1, bad_words=(word,))
    for output, is_banned in (
        (word[:-1], True),
        ((5, *word[:-1]), True),
        (word[1:-1], False),
        ((5, *word[1:-1]), False),
    ):
        stage.start(0, SequenceStart(0, (1, *output), 1, (), params, 0))
        logits = torch.zeros(1, 9)
        inputs = stage.prepare(np.array([0]), np.array([40]))
        assert inputs is not None
        stage.apply(logits, inputs)
        assert (logits[0, word[-1]] == -torch.inf) == is_banned
