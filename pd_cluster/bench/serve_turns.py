"""`pd-cluster bench serve --turns`: conversations in place of requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import uvloop

from pd_cluster.bench.load import Target, fetch, open_session
from pd_cluster.bench.plot import check_plotting, plot_serve
from pd_cluster.bench.report import print_turns, serve_record, write_json
from pd_cluster.bench.serve import config_of, prepare, target_of, undisturbed
from pd_cluster.bench.statistics import samples_of
from pd_cluster.bench.talk import ChatTalk, IdsTalk, Talk, draw_texts
from pd_cluster.bench.turn_load import run_turns
from pd_cluster.bench.turn_statistics import TurnRecord, sent_within, summarize_turns
from pd_cluster.bench.turns import CONVERSATIONS, NEW, OUTPUT, RATE, Conversation, TurnsPlan
from pd_cluster.errors import StartupError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence


def run_serve_turns(namespace: argparse.Namespace) -> int:
    """Returns 0 when every turn was answered, else 1. Raises StartupError."""
    if namespace.plot:
        check_plotting()
    if namespace.trace or namespace.workload != "random" or namespace.goodput or namespace.slo:
        raise StartupError("--turns goes with none of --trace, --workload, --goodput and --slo")
    plan = TurnsPlan(
        num_conversations=namespace.num_requests or CONVERSATIONS, num_turns=namespace.turns,
        history=namespace.history, new=namespace.input_len or NEW, output=namespace.output_len or OUTPUT,
        num_head=namespace.head_len, num_heads=namespace.num_heads, tool_s=namespace.tool_s,
        at_once=namespace.at_once, rate=namespace.rate or RATE,
    ).scaled(namespace.trace_scale)  # fmt: skip
    conversations = plan.conversations(namespace.seed)
    target, records = uvloop.run(
        measure_turns(
            target_of(namespace, ignore_eos=not namespace.stop_at_eos), conversations, plan.at_once,
            namespace.vocab_size, namespace.seed, is_text=namespace.text, num_warmups=namespace.warmup,
        )
    )  # fmt: skip
    limits_ms = namespace.later_ttft_ms, namespace.longest_gap_ms
    summary = summarize_turns(records, num_turns(conversations), plan.at_once, *limits_ms)
    print_turns(summary)
    try:
        if namespace.json:
            write_json(namespace.json, serve_record(config_of(namespace, target), summary, records))
        if namespace.plot:
            loop = f"{plan.at_once} at once" if plan.at_once else f"{plan.rate:g} conversations/s"
            title = f"{target.model}: {len(records)} turns, {loop}, {summary.whole.output_rate:.0f} output tokens/s"
            first, later = ([one for one in part if one.ok] for part in sent_within(records, summary.window_s))
            (firsts,), (laters,) = samples_of(first, "ttft"), samples_of(later, "ttft")
            gaps, tpots = samples_of(first + later, "longest_gap", "tpot")
            samples = {"later turns": laters, "first turns": firsts}, {"longest gap": gaps, "TPOT": tpots}
            plot_serve(namespace.plot, samples, limits_ms, records, title, summary.window_s)
    except OSError as error:
        raise StartupError(f"the report cannot be written: {error}") from error
    return 1 if summary.errors else 0


def num_turns(conversations: Sequence[Conversation]) -> int:
    return sum(len(one.turns) for one in conversations)


async def measure_turns(
    target: Target,
    conversations: Sequence[Conversation],
    at_once: int,
    vocab_size: int,
    seed: int,
    *,
    is_text: bool,
    num_warmups: int,
) -> tuple[Target, list[TurnRecord]]:
    """Hold two turns of `num_warmups` others, then all conversations. Their prompts are made before, of ids below
    `vocab_size`, or, if that is 0, of ordinary text, from the server. `is_text`: see ChatTalk. Raises StartupError.
    """
    others = [
        replace(one, index=-1 - one.index, head=-1 - one.index, at_s=0.0, turns=one.turns[:2])
        for one in conversations[:num_warmups]
    ]
    async with open_session() as session:
        target, vocabulary = await prepare(session, target, vocab_size)

        async def text_of(ids: list[int]) -> str:
            body = {"model": target.model, "tokens": ids}
            return str((await fetch(session, "POST", f"{target.url}/detokenize", target.headers, body))["prompt"])

        async def talk_of(conversation: Conversation) -> tuple[Conversation, Talk]:
            head, *news = draw_texts(conversation, vocabulary, seed)
            if is_text:
                return conversation, ChatTalk(await text_of(head), [await text_of(ids) for ids in news])
            return conversation, IdsTalk(head, news)

        warmups = [await talk_of(one) for one in others]
        talks = [await talk_of(one) for one in conversations]
    await run_turns(target, warmups, 0)
    with undisturbed(num_turns(conversations)) as bar:
        return target, await run_turns(target, talks, at_once, bar.advance)
