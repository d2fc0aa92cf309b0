"""`python -m benchmarks structured`: answers of a running cluster under the schemas of JSONSchemaBench, each judged.

The data are public (github.com/guidance-ai/jsonschemabench, its MaskBench form: one file for each schema, with the keys
`schema` and `tests`) and are not in this repository. An answer is

    valid       ended by `stop`, and the package jsonschema accepts it
    cut         ended by `length`, and llguidance accepts what came
    refused     status 400 that names the field; it does not count as an answer
    failed      anything else; the run lists it and returns 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson
import uvloop

from benchmarks.flags import add_cluster_flags
from benchmarks.records import RESULTS, append_record
from pd_cluster.bench.load import Target, fetch, find_model, open_session
from pd_cluster.errors import StartupError
from pd_cluster.server.grammar.grammar_process import write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FIELD = "response_format"
ENDS = ('"', "]", "}")  # of strings, arrays and objects
GOAL = 0.9  # of the answers end by themselves


@dataclass(slots=True)
class Verdicts:
    """How many answers there were of each kind, and what was wrong with the others."""

    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by the first words of the library's sentence
    failures: list[str] = field(default_factory=list)

    @property
    def num_answers(self) -> int:
        return self.counts["valid"] + self.counts["cut"] + self.counts["failed"]

    def note(self, name: str, verdict: str, why: str = "") -> None:
        self.counts[verdict] += 1
        if verdict == "refused":
            self.refusals[" ".join(why.split()[:5])] += 1
        elif verdict == "failed":
            self.failures.append(f"{name}: {why}")


def judge_text(schema: dict[str, Any], text: str, finish_reason: str) -> tuple[str, str]:
    """The verdict on an answer, and what is wrong with it."""
    from jsonschema import ValidationError
    from jsonschema.validators import Draft202012Validator, validator_for

    if finish_reason == "length":
        return ("cut", "") if is_prefix(schema, text) else ("failed", f"cut after a wrong text: {text[-80:]!r}")
    if finish_reason != "stop":
        return "failed", f"finish_reason {finish_reason}"
    try:
        validator_for(schema, default=Draft202012Validator)(schema).validate(json.loads(text))
    except (ValidationError, ValueError) as error:
        return "failed", f"not valid: {str(error).splitlines()[0]}: {text[:80]!r}"
    except Exception as error:  # the package cannot read the schema, or a reference leads outside
        return "unjudged", str(error)
    return "valid", ""


def is_prefix(schema: dict[str, Any], text: str) -> bool:
    """Whether the grammar of the schema allows the text so far. A character that was cut is left out."""
    import llguidance

    grammar = write("json", json.dumps(schema), [], coerces_one_of=False)
    vocabulary = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0)
    return bool(matcher.consume_tokens(vocabulary.tokenize_str(text.rstrip("\ufffd"))))


def read_schemas(directory: Path, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and schemas without end, in an order drawn from the seed. Raises StartupError."""
    paths = sorted(directory.glob("*.json"))
    random.Random(seed).shuffle(paths)
    if not paths:
        raise StartupError(f"--schemas {directory} has no *.json")
    for path in cycle(paths):
        try:
            yield path.stem, json.loads(path.read_text())["schema"]
        except ValueError:  # a few files of the collection are no JSON
            continue


@dataclass(slots=True)
class Examiner:
    """Asks for answers until there are enough."""

    session: aiohttp.ClientSession
    target: Target
    max_tokens: int
    seed: int
    logit_bias: dict[str, float]
    schemas: Iterator[tuple[str, dict[str, Any]]]
    end_s: float  # of time.monotonic(): no question is asked after it
    verdicts: Verdicts = field(default_factory=Verdicts)
    prefilled_by: Counter[str] = field(default_factory=Counter)  # answers by the node that read the prompt
    num_asked: int = 0  # and not refused, as far as is known

    async def run(self, count: int) -> None:
        """Ask one after the other. A question that was refused does not count."""
        while self.num_asked < count and time.monotonic() < self.end_s:
            self.num_asked += 1
            name, schema = next(self.schemas)
            verdict, why = await self._ask(name, schema)
            self.num_asked -= verdict in ("refused", "unjudged")
            self.verdicts.note(name, verdict, why)

    async def _ask(self, name: str, schema: dict[str, Any]) -> tuple[str, str]:
        wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}
        body = {
            "model": self.target.model, "messages": [{"role": "user", "content": "Answer in JSON."}],
            "temperature": 1.0, "seed": self.seed + self.num_asked, "max_tokens": self.max_tokens, FIELD: wanted,
            "logit_bias": self.logit_bias, "cache_salt": name,  # so that the prompt is handed over
        }  # fmt: skip
        try:
            async with self.session.post(
                f"{self.target.url}/v1/chat/completions", data=orjson.dumps(body), headers=self.target.headers,
                timeout=aiohttp.ClientTimeout(total=self.target.timeout_s),
            ) as response:  # fmt: skip
                status, answer = response.status, await response.json()
        except (TimeoutError, aiohttp.ClientError) as error:
            return "failed", f"{type(error).__name__} {error}"
        if status != 200:
            refusal = answer.get("error", {})
            said = str(refusal.get("message", answer)).removeprefix(f"{FIELD}: ")
            is_named = status == 400 and refusal.get("param") == FIELD
            return ("refused", said) if is_named else ("failed", f"status {status}: {said}")
        self.prefilled_by[response.headers.get("x-pd-prefill", "")] += 1
        [choice] = answer["choices"]
        return judge_text(schema, choice["message"]["content"], choice["finish_reason"])


async def end_tokens(session: aiohttp.ClientSession, target: Target) -> list[int]:
    """The tokens of ENDS. Raises StartupError for a vocabulary in which one of them is no token."""
    found = []
    for text in ENDS:
        body = {"model": target.model, "prompt": text, "add_special_tokens": False}
        tokens = (await fetch(session, "POST", f"{target.url}/tokenize", target.headers, body))["tokens"]
        if len(tokens) != 1:
            raise StartupError(f"--bias: {text} is no token of {target.model}")
        found += tokens
    return found


async def examine(namespace: argparse.Namespace) -> Examiner:
    """Ask as many at a time as `--concurrency` says. Raises StartupError."""
    schemas = read_schemas(namespace.schemas, namespace.seed)
    async with open_session() as session:
        url = namespace.url.rstrip("/")
        model = await find_model(session, url, {})
        target = Target(url, model, route=namespace.route or "", timeout_s=namespace.timeout_s)
        bias = {str(token): namespace.bias for token in await end_tokens(session, target)} if namespace.bias else {}
        end_s = time.monotonic() + namespace.max_s
        examiner = Examiner(session, target, namespace.max_tokens, namespace.seed, bias, schemas, end_s)
        await asyncio.gather(*(examiner.run(namespace.count) for _ in range(namespace.concurrency)))
    return examiner


def main(arguments: Sequence[str]) -> int:
    """Returns 0 when no answer failed and enough of them ended by themselves, else 1. Raises StartupError."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks structured", allow_abbrev=False)
    add_cluster_flags(parser, RESULTS / "structured.jsonl")
    parser.add_argument("--schemas", type=Path, required=True, metavar="DIR", help="Files of JSONSchemaBench.")
    parser.add_argument("--route", choices=("p-first", "d-first"), help="Ask the router for this order.")
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="Answers (default: 1000).")
    parser.add_argument("--max-s", type=float, default=math.inf, metavar="X", help="Ask no more after so many seconds.")
    parser.add_argument("--max-tokens", type=int, default=1024, metavar="N", help="Of an answer (default: 1024).")
    parser.add_argument(
        "--bias", type=float, default=0.0, metavar="X",
        help="logit_bias of what ends strings, arrays and objects, for a model that does not end them (default: 0).",
    )  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=32, metavar="N", help="Requests at once (default: 32).")
    namespace = parser.parse_args(arguments)
    examiner = uvloop.run(examine(namespace))
    verdicts = examiner.verdicts
    fields = {
        "route": namespace.route, "max_tokens": namespace.max_tokens, "concurrency": namespace.concurrency,
        "seed": namespace.seed, "bias": namespace.bias, "note": namespace.note, "answers": dict(verdicts.counts),
        "prefilled_by": dict(examiner.prefilled_by),
        "refusals": dict(verdicts.refusals.most_common(10)), "failures": verdicts.failures,
    }  # fmt: skip
    append_record(namespace.json, "structured", fields)
    lines = [f"{name}: {count}" for name, count in (*verdicts.counts.items(), *verdicts.refusals.most_common(10))]
    sys.stdout.write("\n".join([*lines, *verdicts.failures]) + "\n")
    return int(bool(verdicts.failures) or verdicts.counts["valid"] < GOAL * verdicts.num_answers)
