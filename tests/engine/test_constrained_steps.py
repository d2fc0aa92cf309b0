"""Grammars through the step loop and the real worker: answers that follow them, beside requests without any."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import msgspec
import pytest
from transformers import AutoTokenizer

from pd_cluster.errors import InvalidRequest
from pd_cluster.protocol.messages import AddRequest, FinishReason, ReleaseLease, RequestFailed, TicketOpened, Work
from pd_cluster.protocol.sampling_params import SamplingParams
from pd_cluster.scheduling.kv_memory import PREEMPTIONS
from pd_cluster.worker.device_executor import DeviceExecutor
from pd_cluster.worker.logits_stages.grammar_masks import GrammarMasks
from tests.engine.test_core_pipeline import CONFIG, PROMPTS, Bench, make_connector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pd_connectors.base import Connector, PublishSpec
    from pd_kernels.values import Ints

llguidance = pytest.importorskip("llguidance")

EOS = 2
WORD = {"type": "string", "maxLength": 6}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def an_object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def a_list(items: Any, least: int = 0, most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


PERSON = an_object(name=WORD, age=COUNT)
NODE = an_object(["v"], v=COUNT, next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
SCHEMAS: list[dict[str, Any]] = [
    WORD,
    COUNT,
    {"type": "boolean"},
    {"type": "null"},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5},
    {"type": "integer", "minimum": 1000, "maximum": 1010},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 4},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "one", None, True, [1], {"a": 1}]},
    {"const": {"a": [1, 2, "x"]}},
    {"const": "a \"quoted\" \\ text"},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[a-f]{3}-[0-9]{2}$"},
    {"type": "string", "pattern": "^(yes|no)$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "time"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "enum": ["ä", "日本", "🙂"]},
    a_list(COUNT),
    a_list(WORD, 1, 2),
    a_list({"type": "boolean"}, 3, 3),
    a_list(a_list(COUNT, 1, 2), 1, 2),
    a_list(PERSON, 1, 2),
    {"type": "array", "prefixItems": [COUNT, WORD], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"const": "a"}], "items": COUNT, "minItems": 1, "maxItems": 3},
    {"type": "array", "maxItems": 0},
    PERSON,
    an_object(),
    an_object(a={"type": "null"}),
    an_object([], a=COUNT, b=COUNT, c=COUNT),
    an_object(["b"], a=COUNT, b=COUNT),
    an_object(["a"], a=COUNT, b=COUNT),
    an_object(None, **{"with space": COUNT, "q\"uote": WORD, "ümlaut": COUNT}),
    an_object(a=an_object(b=an_object(c=an_object(d=COUNT)))),
    an_object(kind={"enum": ["cat", "dog"]}, lives={"type": "integer", "minimum": 1, "maximum": 9}),
    an_object(people=a_list(PERSON, 1, 2), total=COUNT),
    an_object(date={"type": "string", "format": "date"}, ok={"type": "boolean"}),
    an_object(code={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    {"anyOf": [COUNT, {"type": "boolean"}]},
    {"anyOf": [PERSON, an_object(error=WORD)]},
    {"anyOf": [{"const": 1}, {"const": 2}, {"const": "three"}]},
    an_object(value={"anyOf": [WORD, COUNT, {"type": "null"}]}),
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"allOf": [{"type": "object", "properties": {"a": COUNT}, "required": ["a"]},
               {"type": "object", "properties": {"a": {"minimum": 50}}, "additionalProperties": False}]},
    {"$ref": "#/$defs/p", "$defs": {"p": PERSON}},
    an_object(one={"$ref": "#/$defs/c"}, two={"$ref": "#/$defs/c"}) | {"$defs": {"c": COUNT}},
    NODE,
    an_object(["v"], v=COUNT, kids=a_list({"$ref": "#"}, 0, 2)),
    {"type": "object", "additionalProperties": COUNT, "maxProperties": 2, "minProperties": 1},
    {"type": "object", "properties": {"a": COUNT}, "required": ["a"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^x[0-9]$": COUNT}, "additionalProperties": False, "maxProperties": 3},
    an_object(point={"type": "array", "prefixItems": [COUNT, COUNT], "items": False, "minItems": 2}),
    an_object(title=WORD, tags=a_list({"enum": ["a", "b", "c"]}, 0, 2), score={"type": "number", "minimum": 0,
                                                                             "maximum": 10}),
    {"type": "object", "title": "T", "description": "D", "properties": {"a": COUNT | {"default": 3}},
     "required": ["a"], "additionalProperties": False},
    an_object(call={"const": "get_weather"}, arguments=an_object(city=WORD, unit={"enum": ["C", "F"]})),
]  # fmt: skip


def json_grammar(schema: dict[str, Any]) -> str:
    options: Any = {"whitespace_flexible": False}
    return str(llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CONFIG.model.model)


def text_of(token_ids: list[int]) -> str:
    return str(tokenizer().decode(token_ids, skip_special_tokens=True))


@pytest.fixture(scope="module")
def executor() -> Iterator[DeviceExecutor]:
    limits = replace(CONFIG.scheduler, max_num_seqs=24)
    executor = DeviceExecutor.started(
        replace(CONFIG, scheduler=limits, cache=replace(CONFIG.cache, num_blocks=160)), lambda _: None
    )
    yield executor
    executor.close()


@pytest.fixture
def connector(executor: DeviceExecutor) -> Iterator[Connector]:
    yield from make_connector(executor)


@cache
def grammar_tokenizer() -> Any:
    path = Path(CONFIG.model.model) / "tokenizer.json"
    return llguidance.LLTokenizer(path.read_text(), n_vocab=3072, eos_token=[EOS])


def follows(grammar: str, token_ids: list[int]) -> bool:
    """Whether the grammar allows the output, whole or cut."""
    return bool(llguidance.LLMatcher(grammar_tokenizer(), grammar).consume_tokens(token_ids))


def test_answers_follow_their_schemas(executor: DeviceExecutor, connector: Connector) -> None:
    """All at once, at temperature 1, two sequences each. Some are cut after 40 tokens."""
    assert len(SCHEMAS) == 60
    bench = Bench(executor, connector, "on", max_num_seqs=24)
    for at, schema in enumerate(SCHEMAS):
        sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=at, n=2, grammar=json_grammar(schema))
        bench.send(AddRequest(f"{at}", PROMPTS[1], sampling))
    bench.run()
    num_whole = 0
    for at, schema in enumerate(SCHEMAS):
        validator = jsonschema.Draft202012Validator(schema)
        for index in (0, 1):
            output = bench.tokens[f"{at}", index]
            if bench.reasons[f"{at}", index] is FinishReason.STOP:
                assert output[-1] == EOS
                validator.validate(json.loads(text_of(output)))
                num_whole += 1
            else:
                assert len(output) == 40
                assert follows(json_grammar(schema), output), text_of(output)
    assert num_whole > 100


def requests(grammar: str, other: str) -> dict[str, SamplingParams]:
    """Constrained requests and free ones of many kinds."""
    free: dict[str, Any] = {"temperature": 1.1, "max_tokens": 24, "ignore_eos": True}
    return {
        "json": SamplingParams(max_tokens=48, temperature=1.0, seed=1, grammar=grammar),
        "greedy": SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        "other": SamplingParams(max_tokens=48, temperature=0.0, grammar=other, ignore_eos=True, min_tokens=9),
        "seeded": SamplingParams(seed=3, **free),
        "several": SamplingParams(max_tokens=48, temperature=1.3, seed=4, n=3, grammar=grammar, logprobs=1),
        "penalized": SamplingParams(seed=5, frequency_penalty=0.6, logit_bias={9: 3.0}, top_k=50, **free),
    }


def serve(bench: Bench, wanted: dict[str, SamplingParams]) -> dict[tuple[str, int], list[int]]:
    for at, (name, sampling) in enumerate(wanted.items()):
        bench.send(AddRequest(name, PROMPTS[at % len(PROMPTS)], sampling))
    bench.run()
    found, bench.tokens = bench.tokens, {}
    bench.reasons.clear()
    return found


@pytest.mark.parametrize("mode", ["off", "on"])
def test_requests_in_one_batch_do_not_disturb_each_other(
    mode: str, executor: DeviceExecutor, connector: Connector
) -> None:
    wanted = requests(json_grammar(PERSON), 'start: /[0-9]{4}/ ("a" | "b")+ "."')
    bench = Bench(executor, connector, mode, max_num_seqs=24)
    together = serve(bench, wanted)
    for name, sampling in wanted.items():
        at = list(wanted).index(name)
        bench.send(AddRequest(name, PROMPTS[at], sampling))
        bench.run()
    assert bench.tokens == together
    other = text_of(together["other", 0])
    assert other[:4].isdigit()
    for index in range(3):
        jsonschema.validate(json.loads(text_of(together["several", index])), PERSON)


class FailingBench(Bench):
    """Keeps the requests that failed."""

    def _collect(self) -> None:
        self.failed: dict[str, RequestFailed] = getattr(self, "failed", {})
        for message in [message for message in self.mailbox.outbox if isinstance(message, RequestFailed)]:
            self.mailbox.outbox.remove(message)
            self.open.remove(message.request_id)
            self.failed[message.request_id] = message
        super()._collect()


@contextmanager
def small(mode: str, max_num_seqs: int = 6) -> Iterator[Bench]:
    """An engine with a cache that is too small for its requests, so that sequences are preempted or swapped."""
    executor = DeviceExecutor.started(CONFIG, lambda _: None)
    for connector in make_connector(executor):
        yield Bench(executor, connector, mode, max_num_seqs=max_num_seqs)
    executor.close()


def test_preemption_changes_no_answer(executor: DeviceExecutor, connector: Connector) -> None:
    grammar = json_grammar(a_list(PERSON, 3, 8))
    wanted = {f"{at}": SamplingParams(max_tokens=50, temperature=1.0, seed=at, grammar=grammar) for at in range(6)}
    roomy = serve(Bench(executor, connector, "on", max_num_seqs=24), wanted)
    with small("on") as bench:
        assert serve(bench, wanted) == roomy
        assert bench.stats is not None
        assert sum(bench.stats.counters[name] for name in PREEMPTIONS) > 0
    assert all(follows(grammar, output) for output in roomy.values())


def sit_out(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let constrained rows sit out this share of their draws, as if their masks were late."""
    rng, absent = random.Random(share), GrammarMasks.absent

    def some(stage: GrammarMasks, rows: Ints) -> set[int]:
        return absent(stage, rows) | {row for row in rows.tolist() if rng.random() < share}

    monkeypatch.setattr(GrammarMasks, "absent", some)


@pytest.mark.parametrize(("mode", "is_roomy"), [("off", True), ("on", False)])
def test_rows_that_sit_out_change_no_answer(
    mode: str, is_roomy: bool, executor: DeviceExecutor, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In captured steps' order of draws, beside free rows, with several first tokens, logprobs and preemption."""
    wanted = requests(json_grammar(a_list(PERSON, 1, 4)), 'start: /[0-9]{4}/ ("a" | "b")+ "."')
    wanted["penalized json"] = SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=8,
        grammar=json_grammar(PERSON),
        frequency_penalty=1.0,
        presence_penalty=0.5,
    )
    plain = serve(Bench(executor, connector, mode, max_num_seqs=24), wanted)
    sit_out(0.3, monkeypatch)
    if is_roomy:
        bench = Bench(executor, connector, mode, max_num_seqs=24)
        assert serve(bench, wanted) == plain
    else:
        with small(mode) as bench:
            assert serve(bench, wanted) == plain
    assert bench.stats is not None
    assert bench.stats.counters["draws_sat_out_total"] > 50
    assert is_roomy or sum(bench.stats.counters[name] for name in PREEMPTIONS) > 0


def test_a_prompt_with_a_first_draw_that_is_sat_out_is_announced_once(
    executor: DeviceExecutor, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last block is announced with the first token, not with the step that drew none."""
    draws = iter([True, True, False])
    absent = GrammarMasks.absent
    monkeypatch.setattr(
        GrammarMasks, "absent", lambda stage, rows: set(rows.tolist()) if next(draws) else absent(stage, rows)
    )
    sent = list[tuple[int, bool]]()
    send_after = connector.send_after

    def note(publishes: Sequence[PublishSpec]) -> None:
        sent.extend((publish.num_tokens, bool(publish.first_tokens)) for publish in publishes)
        send_after(publishes)

    monkeypatch.setattr(connector, "send_after", note)
    bench = Bench(executor, connector, "on")
    leases = list[str]()
    bench.on_ticket = lambda message: leases.append(message.ticket.lease.lease_id)
    bench.send(
        AddRequest("p", PROMPTS[0], SamplingParams(max_tokens=9, seed=1, grammar=json_grammar(PERSON)), Work.PREFILL)
    )

    def release() -> None:
        while bench.reasons and leases:
            bench.send(ReleaseLease(leases.pop()))

    bench.run(release)
    assert [each for each in sent if each[0] == len(PROMPTS[0])] == [(len(PROMPTS[0]), True)]


@pytest.mark.parametrize("mode", ["off", "on"])
def test_handovers_redraws_and_prefills_on_d_change_no_answer(
    mode: str, executor: DeviceExecutor, connector: Connector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each three: one takes P's tokens, one draws them again, one computes the prompt itself. Draws are sat out."""
    wanted = {
        f"{at}": SamplingParams(max_tokens=40, temperature=1.0, seed=at, n=1 + at % 2, grammar=json_grammar(PERSON))
        for at in range(6)
    }
    plain = serve(Bench(executor, connector, mode, max_num_seqs=24), wanted)
    sit_out(0.3, monkeypatch)
    bench = Bench(executor, connector, mode, prefix_caching=False, max_num_seqs=24)

    def take_over(message: TicketOpened) -> None:
        name, ticket = message.request_id[1:], message.ticket
        if int(name) % 3 == 1:
            ticket = msgspec.structs.replace(ticket, sampling_digest=b"")
        if int(name) % 3 == 2:
            bench.send(ReleaseLease(ticket.lease.lease_id))
        bench.send(AddRequest(f"d{name}", PROMPTS[int(name)], wanted[name], Work.TAKE_OVER, ticket))

    bench.on_ticket = take_over
    for at, (name, sampling) in enumerate(wanted.items()):
        bench.send(AddRequest(f"p{name}", PROMPTS[at], sampling, Work.PREFILL))
    bench.run()
    assert {key: bench.tokens[f"d{key[0]}", key[1]] for key in plain} == plain
    assert bench.stats is not None
    counters = bench.stats.counters
    assert counters["prefills_remote_total"] == 4
    assert counters["first_token_redraws_total|reason=no_digest"] == counters["prefills_local_total"] == 2
    assert counters["draws_sat_out_total"] > 20


def test_an_answer_goes_on_after_known_tokens(executor: DeviceExecutor, connector: Connector) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=1.0, seed=11, grammar=json_grammar(PERSON))
    bench = Bench(executor, connector, "on")
    whole = serve(bench, {"whole": sampling})["whole", 0]
    cuts = range(1, len(whole), 2)
    for cut in cuts:
        bench.send(AddRequest(f"{cut}", PROMPTS[0], sampling, known=(tuple(whole[:cut]),)))
    bench.run()
    for cut in cuts:
        assert whole[:cut] + bench.tokens[f"{cut}", 0] == whole


@pytest.mark.parametrize("mode", ["off", "on"])
def test_a_grammar_without_a_way_on_ends_its_request_alone(
    mode: str, executor: DeviceExecutor, connector: Connector
) -> None:
    wanted = requests(json_grammar(PERSON), 'start: "12" /[ab]+/')
    bench = FailingBench(executor, connector, mode, max_num_seqs=24)
    plain = serve(bench, wanted)
    dead = SamplingParams(max_tokens=9, temperature=1.0, grammar='start: "12" X\nX: /1+/ & /2+/', n=2)
    for at, (name, sampling) in enumerate(wanted.items()):
        bench.send(AddRequest(name, PROMPTS[at], sampling))
    bench.send(AddRequest("dead", PROMPTS[5], dead))
    bench.send(
        AddRequest(
            "dead prefill",
            PROMPTS[5],
            msgspec.structs.replace(dead, grammar="start: <nothing>", n=1),
            work=Work.PREFILL,
        )
    )
    bench.run()
    assert bench.failed.keys() == {"dead", "dead prefill"}
    for message in bench.failed.values():
        assert (message.error, message.code) == (InvalidRequest.__name__, "grammar_failed")
    assert {key: output for key, output in bench.tokens.items() if key[0] != "dead"} == plain


def test_a_stage_that_bans_all_allowed_tokens_does_not_break_the_grammar() -> None:
    """The stage is of the operator. One token is allowed, and it is the last one, which no later step would check."""
    stages = ("tests.ban_token:BanToken",)
    executor = DeviceExecutor.started(
        replace(CONFIG, model=replace(CONFIG.model, logits_stages=stages)), lambda _: None
    )
    [one] = tokenizer().encode("1", add_special_tokens=False)
    for connector in make_connector(executor):
        bench = Bench(executor, connector, "on")
        for temperature in (0.0, 0.01, 1.0):
            sampling = SamplingParams(
                max_tokens=1, temperature=temperature, seed=1, grammar='start: "1"', logits_args={"ban": one}
            )
            bench.send(AddRequest(f"{temperature}", PROMPTS[1], sampling))
        bench.run()
    executor.close()
    assert set(map(tuple, bench.tokens.values())) == {(one,)}
