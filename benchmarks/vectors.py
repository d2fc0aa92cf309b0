"""`python -m benchmarks vectors`: a chat's first token while texts are embedded, on a running cluster.

Chats arrive at a fixed rate, first alone and then while the inputs are embedded in requests of several. Chat and
vectors may be of two models behind one router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

GOAL = 1.5  # times the 99th percentile of the first token without embeddings
WORDS = ("time", "there", "was", "a", "small", "town", "by", "the", "sea", "and", "it", "had", "no", "name")


@dataclass
class Chats:
    """Seconds to the first token of each chat, and how many failed."""

    seconds: list[float] = field(default_factory=list)
    num_failed: int = 0

    def percentile(self, share: float) -> float:
        return float(np.percentile(self.seconds, share)) if self.seconds else float("nan")


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


async def chat(session: aiohttp.ClientSession, flags: argparse.Namespace, prompt: str, chats: Chats) -> None:
    body = {"model": flags.chat_model, "prompt": prompt, "max_tokens": 16, "stream": True, "ignore_eos": True}
    began_s = time.perf_counter()
    async with session.post(f"{flags.url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            chats.num_failed += 1
            return
        await answer.content.readany()
        chats.seconds.append(time.perf_counter() - began_s)
        await answer.read()


async def chat_for(session: aiohttp.ClientSession, flags: argparse.Namespace, until: asyncio.Future[None]) -> Chats:
    """At least `num_chats`, and until the future is done."""
    chats, rng = Chats(), random.Random(flags.seed)
    async with asyncio.TaskGroup() as group:
        count = 0
        while count < flags.num_chats or not until.done():
            group.create_task(chat(session, flags, text(rng, flags.chat_words), chats))
            count += 1
            await asyncio.sleep(rng.expovariate(flags.rate))
    return chats


async def embed(session: aiohttp.ClientSession, flags: argparse.Namespace) -> float:
    """Inputs in a second."""
    rng = random.Random(flags.seed + 1)
    batches = [
        [text(rng, rng.randint(1, 2 * flags.input_words)) for _ in range(flags.batch)]
        for _ in range(-(-flags.num_inputs // flags.batch))
    ]
    began_s = time.perf_counter()

    async def work() -> None:
        while batches:
            body = {"model": flags.embedding_model, "input": batches.pop(), "encoding_format": "base64"}
            async with session.post(f"{flags.url}/v1/embeddings", json=body) as answer:
                data = await answer.json()
                assert answer.status == 200, data
                assert len(data["data"]) == len(body["input"])

    async with asyncio.TaskGroup() as group:
        for _ in range(flags.concurrency):
            group.create_task(work())
    return float(flags.num_inputs / (time.perf_counter() - began_s))


async def measure(flags: argparse.Namespace) -> int:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        loop = asyncio.get_running_loop()
        nothing: asyncio.Future[None] = loop.create_future()
        nothing.set_result(None)
        await chat_for(session, argparse.Namespace(**vars(flags) | {"num_chats": 5}), nothing)  # warm
        alone = await chat_for(session, flags, nothing)
        is_over: asyncio.Future[None] = loop.create_future()
        embedding = asyncio.create_task(embed(session, flags))
        embedding.add_done_callback(lambda _: is_over.set_result(None))
        beside = await chat_for(session, flags, is_over)
        inputs_per_s = await embedding
    ratio = beside.percentile(99) / alone.percentile(99)
    report = {
        "inputs": flags.num_inputs, "inputs_per_s": round(inputs_per_s, 1), "p99_ratio": round(ratio, 2),
        **{
            name: {
                "chats": len(chats.seconds), "failed": chats.num_failed,
                "ttft_p50_ms": round(chats.percentile(50) * 1e3, 1),
                "ttft_p99_ms": round(chats.percentile(99) * 1e3, 1),
            } for name, chats in (("alone", alone), ("beside", beside))
        },
    }  # fmt: skip
    sys.stdout.write(json.dumps(report, indent=1) + "\n")
    return int(ratio > GOAL or alone.num_failed + beside.num_failed > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if the 99th percentile rose to more than GOAL times, or a chat failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks vectors", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="The router (default: %(default)s).")
    parser.add_argument("--chat-model", required=True, metavar="NAME", help="Of the chats.")
    parser.add_argument("--embedding-model", required=True, metavar="NAME", help="Of the vectors.")
    parser.add_argument("--num-inputs", type=int, default=10_000, metavar="N", help="Texts (default: 10000).")
    parser.add_argument("--input-words", type=int, default=64, metavar="N", help="Of a text, in the mean (64).")
    parser.add_argument("--batch", type=int, default=512, metavar="N", help="Inputs of a request (default: 512).")
    parser.add_argument("--concurrency", type=int, default=4, metavar="N", help="Requests at once (default: 4).")
    parser.add_argument("--rate", type=float, default=4.0, metavar="X", help="Chats in a second (default: 4).")
    parser.add_argument("--num-chats", type=int, default=200, metavar="N", help="The least number (default: 200).")
    parser.add_argument("--chat-words", type=int, default=256, metavar="N", help="Of a chat's prompt (default: 256).")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Seeds texts and arrivals.")
    return asyncio.run(measure(parser.parse_args(arguments)))
