"""The client of conversations: each turn is sent when the answer before has ended and the tools have run."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pd_cluster.bench.load import Target, open_session, send
from pd_cluster.bench.statistics import RequestRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import aiohttp

    from pd_cluster.bench.talk import Talk
    from pd_cluster.bench.turns import Conversation


async def run_turns(
    target: Target,
    talks: Sequence[tuple[Conversation, Talk]],
    at_once: int,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Hold all conversations: `at_once`, one after the other, or, if that is 0, each at its time.

    A conversation ends with a request that failed. So has an answer of a wrong length or without its ids.
    Records are in the order of conversations, then of turns.
    """
    records: list[RequestRecord] = []
    start_s = time.perf_counter()
    async with open_session() as session, asyncio.TaskGroup() as group:

        async def hold_all(waiting: Iterator[tuple[Conversation, Talk]]) -> None:
            for conversation, talk in waiting:
                ended_s = time.perf_counter() - start_s if at_once else conversation.at_s
                for number, turn in enumerate(conversation.turns):
                    due_s = ended_s + (turn.pause_s if number or at_once else 0.0)
                    record = RequestRecord(len(records), due_s, due_s, 0, conversation=conversation.index, turn=number)
                    records.append(record)
                    await _ask(session, target, talk, record, turn.num_output, start_s)
                    on_done(record)
                    ended_s = record.end_s
                    if not record.ok:
                        break

        shared = iter(talks)
        for waiting in [shared] * at_once or [iter([one]) for one in talks]:
            group.create_task(hold_all(waiting))
    return sorted(records, key=lambda record: (record.conversation, record.turn))


async def _ask(
    session: aiohttp.ClientSession, target: Target, talk: Talk, record: RequestRecord, num_asked: int, start_s: float
) -> None:
    """The body is made while tools run."""
    fields = talk.ask(record.turn)
    record.num_input = num_sent = len(fields.get("prompt", ()))  # of a chat the server tells
    asked = talk.path, target.body_of(fields, num_asked)
    await asyncio.sleep(max(0.0, start_s + record.scheduled_s - time.perf_counter()))
    await send(session, target, asked, record, start_s, talk.hear)
    num_heard = len(fields.get("prompt", ())) - num_sent  # ids of the answer, which talk.hear appended
    is_whole = record.num_output == num_asked or (record.num_output < num_asked and not target.ignore_eos)
    if record.ok and not is_whole:
        record.error = f"an answer of a wrong length: {record.num_output} tokens, not {num_asked}"
    elif record.ok and "prompt" in fields and num_heard != record.num_output:
        record.error = f"{num_heard} ids for {record.num_output} tokens: does the server know return_token_ids?"
