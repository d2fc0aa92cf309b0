"""The engine's step loop: messages in, one step, tokens out.

One turn does the following, in this order, so that each decision uses the latest state:

    messages from the API process  ->  connector events  ->  reserve blocks for loads
    ->  schedule and launch a step, or retire the oldest  ->  update  ->  tokens, finished leases, statistics out
    ->  learn from the step how long steps take

On a GPU the step that is launched is the one after the step that is retired (`pipeline`), so that all of the above runs
while the device computes. A sequence that ends is then in one more step, and its token there is dropped. The loop plans
the next step just before the running one ends, and waits for messages and events until then (`step_timing`).
After a step with drafts the device waits for the next launch, so tokens and statistics of it go out after that.
Everything here runs on one thread. With nothing to do it sleeps on the mailbox; messages and events wake it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pd_cluster.engine.adapter_orders import AdapterOrders
from pd_cluster.engine.admission import Admission, refusal
from pd_cluster.engine.disk_tier import DiskTier
from pd_cluster.engine.kv_transfers import KvTransfers
from pd_cluster.engine.live_requests import LiveRequests
from pd_cluster.engine.news_report import NewsReport
from pd_cluster.engine.pipeline import Pipeline
from pd_cluster.engine.replies import Replies
from pd_cluster.engine.role_targets import RoleTargets
from pd_cluster.engine.speculating import make_speculation
from pd_cluster.engine.stats_report import StatsReport
from pd_cluster.engine.step_timing import StepForecast
from pd_cluster.errors import Overloaded, PdError, StartupError
from pd_cluster.protocol.messages import (
    HEARTBEAT_S,
    Abort,
    AddRequest,
    PrefillLocally,
    ReleaseLease,
    ReportNews,
    SilenceAllowed,
    ToEngine,
    UseTicket,
    Work,
)
from pd_cluster.protocol.orders import LoadAdapter, ResetCache, SetRole, StartProfile, StopProfile, UnloadAdapter
from pd_cluster.scheduling.adapter_places import AdapterPlaces
from pd_cluster.scheduling.block_manager import BlockManager
from pd_cluster.scheduling.queue_order import Fifo, Shortest
from pd_cluster.scheduling.scheduler import Scheduler
from pd_cluster.scheduling.step_budget import StepBudget
from pd_cluster.scheduling.step_model import StepModel
from pd_cluster.scheduling.stream_room import StreamRoom
from pd_cluster.scheduling.targets import Targets
from pd_cluster.scheduling.unready import UNREADY_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.config import NodeConfig
    from pd_cluster.engine.mailbox import Mailbox
    from pd_cluster.scheduling.batch import Batch
    from pd_cluster.scheduling.drafts import Drafter
    from pd_cluster.worker.disk_cache.disk_cache import DiskCache
    from pd_cluster.worker.executor import Executor
    from pd_connectors.base import Connector

logger = logging.getLogger("pd_cluster.engine")

IDLE_WAIT_S = HEARTBEAT_S  # upper bound of one sleep; wake-ups make it shorter
HASHING_S = 0.001  # at a time while no step runs, so that messages and events do not wait for many long prompts
PAUSE_S = 120.0  # to write a record: ten seconds have some million events
LATE_MASK = f"the mask of the grammar was not computed within {UNREADY_DEADLINE_S:g} s; try again later"


class EngineCore:
    """Owns the scheduler and the loop's parts; drives the executor and the connector. The caller closes these two."""

    def __init__(
        self,
        config: NodeConfig,
        executor: Executor,
        connector: Connector,
        mailbox: Mailbox,
        clock: Callable[[], float] = time.monotonic,
        drafter: Drafter | None = None,
        disk: DiskCache | None = None,
    ) -> None:
        """`config`: with what the worker has decided.

        disk: the tier after host memory, which the caller closes, too.
        drafter: in place of the config's. Either is used if the model and the logits stages allow it.
        """
        self._executor = executor
        self._connector = connector
        self._mailbox = mailbox
        self._clock = clock
        self._blocks = self._make_blocks(config)
        self._step_model = StepModel(executor.model.step_times)
        targets = Targets.of(config.scheduler)
        self._step_budget = StepBudget(targets, self._step_model, clock, lambda: self._pipeline.busy_s)
        self._room = StreamRoom(targets.tpot_s, config.scheduler.max_num_seqs, self._step_model, clock)
        self._role = RoleTargets(targets, self._step_budget, self._room, self._step_model, executor.model)
        self._role.take(config.server.role)
        self._places = AdapterPlaces(config.lora.lora_slots)
        self._scheduler = self._make_scheduler(config, drafter)
        self._admission = Admission(
            self._blocks,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=executor.model.max_model_len,
            vocab_size=executor.model.vocab_size,
            eos_token_ids=executor.model.eos_token_ids,
            check_sampling=executor.check,
        )
        self._disk = None
        if disk is not None:
            self._disk = DiskTier(
                disk, self._blocks, self._scheduler, executor.host_block, self._step_model.prefill_s, clock
            )
        self._replies = replies = Replies(mailbox, lambda request: self._live.forget(request))
        self._transfers = KvTransfers(
            connector, self._scheduler, mailbox.send, replies.report, connector.pool, config.model.logits_stages,
            self._disk, keeps_states=self._blocks.states is not None,
            may_give_up=config.handoff.on_load_failure in ("any", "local"),
        )  # fmt: skip
        self._live = LiveRequests(self._scheduler, self._transfers, replies, mailbox)
        self._adapters = AdapterOrders(config.lora, self._places, executor, mailbox, self._live.fail_all, clock)
        self._pipeline = self._make_pipeline(config)
        self._news = NewsReport(
            self._scheduler, self._blocks, self._pipeline, self._step_model, self._room, self._step_budget,
            mailbox, clock, self._places,
        )  # fmt: skip
        self._stopping = False
        parts = self._scheduler, self._blocks, self._pipeline, self._transfers
        self._stats = StatsReport(*parts, connector, self._disk, mailbox, clock, self._places)
        connector.set_waker(mailbox.wake)

    def _make_blocks(self, config: NodeConfig) -> BlockManager:
        executor = self._executor
        blocks = BlockManager(
            executor.layout.groups,
            executor.slabs,
            num_host_blocks=executor.num_host_blocks,
            host_cache=config.cache.host_cache_gb > 0,
            prefix_caching=config.cache.prefix_caching,
        )
        if blocks.states is not None and self._connector.pool is not None:
            raise StartupError(f"--connector {config.handoff.connector}: a pool takes no states, which the model keeps")
        blocks.host.set_link(executor.host_gb_s, executor.layout.tp_size)
        return blocks

    def _make_pipeline(self, config: NodeConfig) -> Pipeline:
        model = self._executor.model
        forecast = StepForecast(keys_per_token=model.spec.keys_per_token, is_compiled_lazily=model.device != "cpu")
        depth = config.scheduler.depth_on(model.device)
        return Pipeline(
            self._executor, self._connector, depth, self._clock, forecast, self._step_model, self._room,
            self._allow_silence,
        )  # fmt: skip

    def _make_scheduler(self, config: NodeConfig, drafter: Drafter | None) -> Scheduler:
        model = self._executor.model
        return Scheduler(
            config.scheduler,
            self._blocks,
            step_budget=self._step_budget,
            order=Shortest(self._step_model, self._blocks) if config.scheduler.queue == "shortest" else Fifo(),
            max_model_len=model.max_model_len,
            eos_token_ids=model.eos_token_ids,
            retract=self._connector.retract,
            clock=self._clock,
            speculation=make_speculation(config, drafter, self._executor, self._step_model, lambda: self._pipeline),
            adapters=self._places,
        )

    def stop(self) -> None:
        """End `run` after the current step. May be called from a signal handler or another thread."""
        self._stopping = True
        self._mailbox.wake()

    def run(self) -> None:
        """Turn until `stop`. An exception from here is a bug or a broken device."""
        try:
            self._run()
        finally:
            self._replies.tell()  # of the step before a launch that has failed

    def _run(self) -> None:
        is_settled = False
        while not self._stopping:
            if self.turn():
                is_settled = False  # even if the next wait times out: this turn may have left something to check
                continue
            self._stats.send()
            if self._mailbox.wait(self._news.until(min(IDLE_WAIT_S, max(0.0, self._stats.rest_s)))):
                is_settled = False
            elif not is_settled:
                self.settle()  # after a wait only: it takes milliseconds, and a client often asks again at once
                is_settled = True
        while len(self._pipeline):
            self._retire()
        self._replies.tell()
        self.settle()
        self._mailbox.flush()  # closing may take seconds
        logger.info("stopping with %d requests", len(self._live))

    def turn(self) -> bool:
        """Make one turn. Returns False if there was nothing to compute: then wait for a message or an event."""
        scheduler, pipeline = self._scheduler, self._pipeline
        for message in self._mailbox.receive():
            self._replies.tell()  # first: it may be about what has ended
            self._take(message)
        self._adapters.turn()
        self._transfers.take_events()
        if self._disk is not None:
            self._disk.turn(pipeline.num_retired + len(pipeline), pipeline.num_retired)
        self._transfers.reserve()
        if not self._replies.untold:
            self._news.send()
            self._mailbox.flush()
        if spare_s := pipeline.spare_s(prompts_wait=scheduler.prompts_wait):
            self._wait(spare_s)  # a request that arrives meanwhile is in the next step
        elif pipeline.is_full or not scheduler.has_work or not pipeline.launch(self._plan):
            if not len(pipeline):
                pipeline.rest()
                self._replies.tell()
                pipeline.learn()
                return scheduler.hash_ahead(self._clock() + HASHING_S)
            self._await_step()
            if pipeline.is_dry:
                return True  # the next turn launches first
        self._replies.tell()
        if self._stats.is_due:
            self._stats.send()
        self._mailbox.flush()
        pipeline.learn()
        self._news.send()
        self._mailbox.flush()
        return True

    def _plan(self) -> Batch:
        scheduler = self._scheduler
        self._blocks.host.grow(self._executor.num_host_blocks)
        scheduler.sit_out(self._pipeline.absent)
        if unready := scheduler.unready.wanted:
            ready = self._executor.ready(unready, self._mailbox.wake)
            for seq_id in scheduler.unready.note_ready(ready, self._clock()):
                self._live.fail(seq_id, Overloaded(LATE_MASK))
        batch = scheduler.schedule()
        self._adapters.read_wanted()
        return batch

    def _allow_silence(self, allowed_s: float) -> None:
        """Announce to the API process and to reading nodes that the step loop may not turn for `allowed_s`."""
        self._connector.allow_silence(allowed_s)
        self._mailbox.send(SilenceAllowed(allowed_s))
        self._mailbox.flush()

    def _pause_for(self, work: Callable[[], None]) -> None:
        """Do something that may keep the step loop from turning for PAUSE_S, without being taken for frozen."""
        while len(self._pipeline):
            self._retire()  # a step that waits for this loop to draw its late rows would miss its deadline
        self._replies.tell()
        self._pipeline.learn()  # now: prompts that ended two minutes ago would count as new
        self._allow_silence(PAUSE_S)
        work()
        self._allow_silence(self._pipeline.allowed_s)

    def _await_step(self) -> None:
        """Wait for messages and events until the oldest step may have ended, then wait for its end and retire it."""
        if rest_s := self._pipeline.rest_s:
            self._wait(rest_s)
        else:
            self._retire()

    def _wait(self, seconds: float) -> None:
        """Hash what will be needed, then wait for messages and events, for so long in all."""
        until_s = self._clock() + seconds
        self._scheduler.hash_ahead(until_s)
        self._mailbox.wait(self._news.until(max(0.0, until_s - self._clock())))

    def _retire(self) -> None:
        """Take the oldest step's result; announce it to readers, and store new blocks in the pool. The reply waits.

        The next plan may free what is announced, and write what is stored: neither waits for a launch.
        """
        batch, result = self._pipeline.retire()
        self._stats.note(batch)
        for seq_id, error in result.failures.items():
            self._live.fail(seq_id, error)
        publishes = self._scheduler.publishes(batch, result)
        updates = self._scheduler.update(batch, result)
        prefilled = [update for update in updates if update.request.work is Work.PREFILL and update.prompt is None]
        if publishes or prefilled:
            self._connector.send_after(self._transfers.announce(publishes, prefilled))
        self._replies.untold += updates
        news = self._scheduler.take_news()
        if news and self._connector.pool is not None:
            self._connector.pool.store(news)

    # messages

    def _take(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case UseTicket():
                self._transfers.use_ticket(message.request_id, message.ticket, message.load_deadline_s)
            case PrefillLocally():
                self._transfers.prefill_locally(message.request_id)
            case Abort():
                self._live.abort(message)
            case ReleaseLease():
                self._transfers.release(message.lease_id)
            case ReportNews():
                self._news.switch(message)
            case ResetCache():
                self._blocks.forget_unused()
            case SetRole():
                self._role.take(message.role)
            case LoadAdapter() | UnloadAdapter():
                self._adapters.take(message)
            case StartProfile():
                self._pause_for(self._executor.start_profile)
            case StopProfile():
                self._pause_for(lambda: self._executor.stop_profile(message.directory))

    def _add(self, message: AddRequest) -> None:
        self._news.num_taken += 1
        try:
            self._adapters.check(message)
            self._live.add(self._admission.request(message))
        except PdError as error:
            self._mailbox.send(refusal(message, error))

    def settle(self) -> None:
        """Check that no block is lost, and send statistics. Called when the engine has nothing to do."""
        if self._scheduler.idle and not self._live:
            self._scheduler.check()
        self._stats.send()
        self._mailbox.flush()
