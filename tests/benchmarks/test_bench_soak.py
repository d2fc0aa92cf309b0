"""A short soak of the demo model on the CPU, and proof that each kind of breach is seen."""

from __future__ import annotations

import re
from math import inf
from random import Random

import pytest
import torch

from benchmarks.soak import LogitWatch, Options, main, soak
from benchmarks.soak_memory import ROW, Footprint, MemoryCurve, MemorySample, Trend
from benchmarks.soak_traffic import Breach, Traffic, TrafficLedger
from pd_cluster.protocol.messages import FinishReason, RequestFailed, SequenceTokens, TokensOut
from pd_connectors.protocol.messages import SampledToken

GREEDY_EOS = 2


@pytest.mark.timeout(400)
def test_a_short_soak_holds() -> None:
    """Steps overlap, as they do on a GPU."""
    lines: list[str] = []
    options = Options(
        seconds=1, round_s=0.5, seed=1, device="cpu", num_blocks=24, max_num_seqs=8, swap_gb=0.001,
        async_scheduling="on",
    )  # fmt: skip
    soak(options, lines.append)
    found = re.search(r"(\d+) requests, (\d+) tokens, .* (\d+) swaps, (\d+) recomputations", lines[-2])
    assert found is not None
    assert all(int(number) > 0 for number in found.groups())


def test_requests_are_as_random_as_their_seed() -> None:
    first, second = (Traffic(Random(4), 1000, 600, 90) for _ in range(2))
    requests = [first.request() for _ in range(300)]
    assert requests == [second.request() for _ in range(300)]
    for request in requests:
        request.sampling.validate(1000)
        assert 1 <= len(request.prompt_token_ids) <= 300
        assert request.sampling.max_tokens <= 90
    assert {request.sampling.n for request in requests} == {1, 2, 3, 4}
    assert any(request.sampling.greedy for request in requests)


def ledger_with(*, max_tokens: int = 3) -> tuple[TrafficLedger, str]:
    ledger, traffic = TrafficLedger(10, frozenset({GREEDY_EOS})), Traffic(Random(0), 10, 60, 9)
    request = traffic.request()
    while request.sampling.n > 1 or request.sampling.max_tokens != max_tokens or request.sampling.logprobs is not None:
        request = traffic.request()
    return ledger, ledger.add(request).request_id


def tokens(request_id: str, *ids: int, reason: FinishReason | None = None, finished: bool = False) -> TokensOut:
    part = SequenceTokens(0, tuple(map(SampledToken, ids)), reason)
    return TokensOut(request_id=request_id, sequences=(part,), finished=finished)


def test_a_request_that_goes_as_it_should() -> None:
    ledger, name = ledger_with()
    ledger.take(tokens(name, 4))
    ledger.take(tokens(name, 5, 6, reason=FinishReason.LENGTH, finished=True))
    assert (ledger.open, ledger.num_ended, ledger.num_tokens) == ({}, 1, 3)


def test_what_is_no_outcome_of_a_request() -> None:
    ledger, name = ledger_with()
    with pytest.raises(Breach, match="no open request"):
        ledger.take(tokens("other", 1))
    with pytest.raises(Breach, match="no open request"):
        ledger.take(RequestFailed(name, "Overloaded", "no"))
    with pytest.raises(Breach, match="not in the vocabulary"):
        ledger.take(tokens(name, 10))
    for reason, count in ((FinishReason.LENGTH, 2), (FinishReason.STOP, 3), (FinishReason.ABORT, 1)):
        ledger, name = ledger_with()
        with pytest.raises(Breach, match=f"ended with {count} tokens"):
            ledger.take(tokens(name, *[3] * count, reason=reason, finished=True))


def test_ends_that_come_twice_or_not_at_all() -> None:
    ledger, name = ledger_with()
    with pytest.raises(Breach, match="finished is True"):
        ledger.take(tokens(name, 1, finished=True))
    ledger, name = ledger_with()
    with pytest.raises(Breach, match="finished is False"):
        ledger.take(tokens(name, 1, 1, 1, reason=FinishReason.LENGTH))
    with pytest.raises(Breach, match="after its end"):
        ledger.take(tokens(name, 1, finished=True))


def test_an_aborted_request_may_end_early() -> None:
    ledger, name = ledger_with()
    assert ledger.abort(Random(0)).request_id == name
    ledger.take(tokens(name, 1, reason=FinishReason.ABORT, finished=True))
    assert ledger.num_ended == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_logit_that_is_not_finite_is_seen(bad: float) -> None:
    watch = LogitWatch(torch.zeros((), dtype=torch.int64))
    logits = torch.zeros(3, 8, dtype=torch.bfloat16)
    watch(logits)
    watch.check()
    logits[1, 7] = bad
    watch(logits)
    with pytest.raises(Breach, match="1 of 2 steps"):
        watch.check()


def test_memory_that_grows_is_seen() -> None:
    before = Footprint(1 << 30, 1 << 30)
    before.check_growth_to(Footprint((1 << 30) + 1000, 1 << 30))
    with pytest.raises(Breach, match="GPU memory grew"):
        before.check_growth_to(Footprint((1 << 30) + (5 << 20), 1 << 30))
    with pytest.raises(Breach, match="host memory grew"):
        before.check_growth_to(Footprint(1 << 30, 3 << 30))


def test_a_breach_is_the_exit_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def breach(options: Options, hear: object) -> None:
        raise Breach(f"at seed {options.seed}")

    monkeypatch.setattr("benchmarks.soak.soak", breach)
    assert main(["--seconds", "1", "--seed", "7"]) == 1
    assert capsys.readouterr().out == "BREACH: at seed 7\n"


def samples_of(*resident_mb: float, num_blocks: int = 5) -> list[MemorySample]:
    return [
        MemorySample(60.0 * (at + 1), Footprint(0, 0, round(size * 1e6), num_blocks), 10 * at)
        for at, size in enumerate(resident_mb)
    ]


def test_what_grows_after_warm_up_is_told() -> None:
    """A line of 2 MB a minute, with noise of 1 MB, after four minutes that say nothing."""
    curve = MemoryCurve(240.0)
    curve.samples = samples_of(1, 400, 90, 7, *(100 + 2 * at + (-1) ** at for at in range(20)))
    resident, blocks = curve.trends().values()
    assert resident.num_samples == blocks.num_samples == 20
    assert abs(resident.a_second * 60 - 2e6) < resident.bound * 60 < 0.2e6
    assert (blocks.a_second, blocks.bound) == (0.0, 0.0)
    assert "resident 119.0 MB in the mean of 20 samples, +119." in curve.text()
    assert len(curve.fields["samples"]) == 24


def test_a_trend_of_few_samples_has_no_bound() -> None:
    assert Trend.of([(at, 3.0) for at in range(7)]).bound == inf
    curve = MemoryCurve(1e9)
    assert curve.fields["trends"]["resident_bytes"]["bound"] is None
    assert "in the mean of 0 samples" in curve.text()


def test_a_sample_has_its_columns() -> None:
    sample = MemorySample(60.4, Footprint(0, 0, 3_000_000, 7, 2_000_000), 5, 4, 3, 2)
    assert dict(zip(ROW, sample.row, strict=True)) == {
        "s": 60, "requests": 5, "resident MB": 3.0, "heap MB": 2.0, "Python's blocks": 7, "cached": 4, "saved": 3,
        "loaded": 2,
    }  # fmt: skip
    assert Footprint.now().heap_bytes > 1 << 20
