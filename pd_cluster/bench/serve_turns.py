"""`pd-cluster bench serve --turns`: conversations in place of requests."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop

from pd_cluster.bench.load import Target, fetch, find_positions, open_session
from pd_cluster.bench.plot import check_plotting
from pd_cluster.bench.report import print_turns
from pd_cluster.bench.serve import prepare, target_of, undisturbed, write_report
from pd_cluster.bench.talk import ChatTalk, IdsTalk, Talk, draw_texts
from pd_cluster.bench.turn_load import run_turns
from pd_cluster.bench.turn_statistics import summarize_turns
from pd_cluster.bench.turns import CONVERSATIONS, NEW, OUTPUT, RATE, Conversation, TurnsPlan
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    import argparse

    from pd_cluster.bench.statistics import RequestRecord


def run_serve_turns(namespace: argparse.Namespace) -> int:
    """Returns 0 when every turn was answered, else 1. Raises StartupError."""
    if namespace.plot:
        check_plotting()
    plan = TurnsPlan(
        num_conversations=namespace.num_requests or CONVERSATIONS, num_turns=namespace.turns, history=namespace.history,
        new=namespace.input_len or NEW, output=namespace.output_len or OUTPUT, num_head=namespace.head_len,
        num_heads=namespace.num_heads, tool_s=namespace.tool_s, at_once=namespace.at_once, rate=namespace.rate or RATE,
    ).scaled(namespace.trace_scale)  # fmt: skip
    target = target_of(namespace, ignore_eos=not namespace.stop_at_eos)
    vocab_size, seed = namespace.vocab_size, namespace.seed
    target, records = uvloop.run(
        measure_turns(target, plan, vocab_size, seed, namespace.warmup, is_text=namespace.text)
    )
    targets_ms = {"ttft": namespace.later_ttft_ms, "longest_gap": namespace.longest_gap_ms}
    summary = summarize_turns(records, plan.turns_of(seed), plan.at_once, *targets_ms.values())
    print_turns(summary)
    load = f"{plan.at_once} conversations at once" if plan.at_once else f"{plan.rate:g} conversations/s"
    write_report(namespace, target, summary, replace(summary.whole, objectives_ms=targets_ms), records, load)
    return 1 if summary.errors else 0


async def measure_turns(
    target: Target, plan: TurnsPlan, vocab_size: int, seed: int, num_warmups: int, *, is_text: bool
) -> tuple[Target, list[RequestRecord]]:
    """Hold two turns of `num_warmups` others, then all conversations. Their prompts are made before, of ids below
    `vocab_size`, or, if that is 0, of ordinary text, from the server. No run finds texts of another in a cache.
    `is_text`: see ChatTalk; answers end by themselves then. Raises StartupError.
    """
    target = replace(target, cache_salt=secrets.token_hex(8), ignore_eos=target.ignore_eos and not is_text)
    conversations = plan.conversations(seed)
    others = [
        replace(one, index=-1 - one.index, head=-1 - one.head, at_s=0.0, turns=one.turns[:2])
        for one in conversations[:num_warmups]
    ]
    async with open_session() as session:
        target, vocabulary = await prepare(session, target, vocab_size)
        longest, positions = plan.history.high + plan.output.high, await find_positions(session, target)
        if positions is not None and longest > positions:
            raise StartupError(f"histories and answers of {longest} tokens: {target.model} has {positions} positions")

        async def text_of(ids: list[int]) -> str:
            body = {"model": target.model, "tokens": ids}
            return str((await fetch(session, "POST", f"{target.url}/detokenize", target.headers, body))["prompt"])

        async def talk_of(conversation: Conversation) -> tuple[Conversation, Talk]:
            head, *news = draw_texts(conversation, vocabulary, f"{plan.name}/{seed}")
            if is_text:
                return conversation, ChatTalk(await text_of(head), [await text_of(ids) for ids in news])
            return conversation, IdsTalk(head, news)

        warmups = [await talk_of(one) for one in others]
        talks = [await talk_of(one) for one in conversations]
    await run_turns(target, warmups, 0)
    with undisturbed(sum(plan.turns_of(seed))) as bar:
        return target, await run_turns(target, talks, plan.at_once, bar.advance)
