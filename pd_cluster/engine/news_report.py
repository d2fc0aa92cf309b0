"""Tells the API process of this engine's load and cached blocks, while routers read the node's feed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pd_cluster.protocol.messages import EngineNews

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.engine.pipeline import Pipeline
    from pd_cluster.protocol.messages import ReportNews
    from pd_cluster.scheduling.adapter_places import AdapterPlaces
    from pd_cluster.scheduling.block_manager import BlockManager
    from pd_cluster.scheduling.scheduler import Scheduler
    from pd_cluster.scheduling.step_budget import StepBudget
    from pd_cluster.scheduling.step_model import StepModel
    from pd_cluster.scheduling.stream_room import StreamRoom
    from pd_connectors.protocol.feed import NodeLoad

NEWS_S = 0.005  # between two reports
# Between two looks at the share of prompts in steps. A stream gains 5 ms of slack in as many, and 256 take 0.1 ms to
# look at
SHARE_S = 0.02
HIT_TOKENS = 8192  # of a prompt that goes on in host memory: for longer ones, tables that are loaded count for less
NO_SHARE = 64  # of the time, prompts that took less than half of one part of so many took none


class NewsReport:
    """Sends EngineNews when something has changed. Off at first: then a turn costs one look at a flag.

    A turn calls `send` before each wait, and `until` bounds the wait by the next report that is due.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockManager,
        pipeline: Pipeline,
        model: StepModel,
        room: StreamRoom,
        budget: StepBudget,
        mailbox: Mailbox,
        clock: Callable[[], float],
        adapters: AdapterPlaces,
    ) -> None:
        self._scheduler = scheduler
        self._news, self._host, self._copies = blocks.news, blocks.host, blocks.copies
        # Of a hit's token, on all ranks: windows need their last blocks alone
        self._token_bytes = sum(pool.group.block_bytes / pool.block_size for pool in blocks.pools if pool.is_tree)
        self._pipeline = pipeline
        self._model = model
        self._room = room
        self._budget = budget
        self._mailbox = mailbox
        self._clock, self._adapters = clock, adapters
        self.num_taken = 0  # AddRequests
        self._sent: tuple[int, NodeLoad, int, int] | None = None
        self._step_tokens = self._share = 0
        self._looked_at_s = 0.0
        self._sent_at_s = 0.0
        self._is_due = False
        self._serial = 0

    def switch(self, message: ReportNews) -> None:
        self._serial = message.serial
        self._news.switch(is_on=message.is_wanted)
        self._sent, self._is_due = None, False

    def until(self, wait_s: float) -> float:
        """The seconds to wait at most, of `wait_s`."""
        return min(wait_s, NEWS_S) if self._is_due else wait_s

    def send(self) -> None:
        """Report what has changed, unless the last report is less than NEWS_S old: then it is due."""
        if not self._news.is_on:
            return
        now_s = self._clock()
        if now_s - self._looked_at_s >= SHARE_S:
            self._looked_at_s, self._step_tokens = now_s, self._scheduler.step_tokens
            self._share = round(NO_SHARE * self._room.share)
        # Twice and half of a share is news: an idle node would else tell for ever how busy it was
        shares = self._step_tokens.bit_length(), self._share.bit_length()
        reported = self.num_taken, self._scheduler.load, *shares
        is_new = reported != self._sent or bool(self._news)
        self._is_due = is_new and now_s - self._sent_at_s < NEWS_S
        if is_new and not self._is_due:
            self._sent, self._sent_at_s = reported, now_s
            evicted, stored, moved = self._news.take()
            load = self._timed(reported[1])
            self._mailbox.send(EngineNews(self.num_taken, load, evicted, stored, self._serial, moved))

    def _timed(self, load: NodeLoad) -> NodeLoad:
        """The load with the times of steps, as far as they are measured, and contexts. That these change is no news.

        The share of prompts is the present one: a stream that has just begun leaves prompts less than it will soon.
        """
        model = self._model
        token_s, key_s = (model.token_s, model.key_s) if model.knows_prompts else (0.0, 0.0)
        step_s, share = self._pipeline.decode_s, self._step_tokens
        num_streams, num_context, num_promised = self._scheduler.streams
        load = msgspec.structs.replace(
            load, step_s=step_s, token_s=token_s, key_s=key_s, step_tokens=share,
            step_keys=self._budget.step_keys(load.num_running, share) if share else 0,
            num_context=num_context, context_s=model.context_s if model.is_fitted else 0.0,
            host_token_s=self._host_token_s(has_streams=share > 0),
            prompts_share=self._room.share, adapter_s=self._adapters.read_s,
        )  # fmt: skip
        return self._room.filled_in(load, num_streams, num_promised)

    def _host_token_s(self, *, has_streams: bool) -> float:
        """Seconds of a token of a prompt of HIT_TOKENS, beside the loads that are queued."""
        if not self._host.is_cache:
            return 0.0
        return self._copies.load_s(HIT_TOKENS * self._token_bytes, has_streams=has_streams) / HIT_TOKENS
