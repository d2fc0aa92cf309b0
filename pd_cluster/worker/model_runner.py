"""Runs the steps of one device: packs inputs, plans attention, computes logits, samples."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

from pd_cluster.models.forward_inputs import ForwardInputs, Tail
from pd_cluster.worker.block_tables import table_width
from pd_cluster.worker.copy_streams import CopyStreams
from pd_cluster.worker.cuda_graphs.draw_graphs import DrawGraphs
from pd_cluster.worker.cuda_graphs.step_graphs import StepGraphs
from pd_cluster.worker.draw_places import DrawLayout
from pd_cluster.worker.host_buffer import HostBuffer
from pd_cluster.worker.input_batch import InputBatch
from pd_cluster.worker.logits_stages.order import make_stages
from pd_cluster.worker.logits_stages.penalties import Penalties, PenaltyTables
from pd_cluster.worker.logits_stages.stage import StageContext
from pd_cluster.worker.pending_step import DrawnPart, PendingStep
from pd_cluster.worker.prompt_outputs import PromptReader
from pd_cluster.worker.rank_sampler import RankSampler
from pd_cluster.worker.sampler import Sampled, WholeSampler
from pd_cluster.worker.sampling_state import SamplingInputs, SamplingState
from pd_connectors.protocol.layout import KVKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from pd_cluster.errors import PdError
    from pd_cluster.models.model import Model
    from pd_cluster.scheduling.batch import Batch, BlockCopies
    from pd_cluster.worker.adapter_store import AdapterStore
    from pd_cluster.worker.device_plan import DevicePlan
    from pd_cluster.worker.draw_places import CapturedDraw
    from pd_cluster.worker.input_batch import Staged
    from pd_cluster.worker.kv_cache import KVCache
    from pd_cluster.worker.prompt_outputs import LaunchedRead, ReadPlan
    from pd_cluster.worker.sampler import TokenSampler
    from pd_cluster.worker.step_inputs import Part, ReplayInputs, StepInputs
    from pd_kernels.values import StepSize


class Deferred(NamedTuple):
    """Late rows that wait to be drawn."""

    pending: PendingStep
    part: Part
    logits: torch.Tensor  # of their step
    graph: StepSize | None  # that was replayed and has left the logits; None: they were computed by launches


class ModelRunner:
    """Runs batches in the order of `launch`. Not thread-safe."""

    def __init__(
        self, plan: DevicePlan, model: Model, cache: KVCache, max_len: int, adapters: AdapterStore | None = None
    ) -> None:
        """There are no rows and graphs yet. `max_len`: tokens of a sequence, prompt and output."""
        self.adapters = adapters
        limits, spec, vocab_size = plan.config.scheduler, model.spec, model.spec.vocab_size
        kernels, device, place = plan.kernels, plan.device, plan.place
        self._model, self.cache, self.kernels, self._attentions = model, cache, kernels, plan.attentions
        self._side = CopyStreams(device)
        self._caches, self._last_group = cache.layer_caches, spec.group_windows.index(spec.windows[-1])
        block_sizes = [group.block_size for group in cache.layout.groups if group.kind is not KVKind.STATE]
        num_rows = limits.max_num_seqs
        layout = DrawLayout(num_rows * (2 if plan.most_drafts else 1), vocab_size, num_rows)
        # Up to 56 bytes a token and 8 for each further group, 270 a sequence, block tables of all sequences and of
        # those that sample, a draw's inputs, a mask for each sequence. Arrays that do not fit are copied one by one
        num_blocks = sum(table_width(max_len, size) for size in block_sizes)
        num_bytes = limits.max_num_batched_tokens * (56 + 8 * len(block_sizes)) + num_rows * (
            270 + 8 * num_blocks + vocab_size // 8
        )
        self.host_buffer = host_buffer = HostBuffer(device, num_bytes + 8 * layout.length + 1024)
        context = StageContext(
            num_rows, vocab_size, plan.model.eos_token_ids, device, host_buffer.move, plan.grammars, kernels,
            plan.grammars.mask_threads.ring,
        )  # fmt: skip
        sampler: TokenSampler = WholeSampler(vocab_size, kernels)
        if place is not None:
            sampler = RankSampler(place, vocab_size, kernels)
        if place is None or sampler.leads:
            stages = make_stages(context, plan.config.model.logits_stages, keeps_states=spec.state is not None)
        else:
            stages = place.reported.stages(num_rows)
        sampling = SamplingState(num_rows, vocab_size, stages, host_buffer)
        self.rows = rows = InputBatch(
            num_rows, max_len, block_sizes, sampling, host_buffer, vocab_size, device, self._last_group,
            mixes_dtypes=len({group.dtype for group in cache.layout.groups}) > 1,
            has_states=len(block_sizes) < len(cache.layout.groups),
        )  # fmt: skip

        def penalty_tables() -> PenaltyTables:
            return next(stage for stage in stages if isinstance(stage, Penalties)).tables()

        self._sampler = sampler
        self._deferred: Deferred | None = None
        self.draws = DrawGraphs(layout, rows.last_tokens, penalty_tables, kernels)
        # `launch` may name their sizes
        self.graphs = StepGraphs(model, cache, rows, host_buffer, sampler, plan.attentions)
        self._prompts = PromptReader(model, sampler, kernels, rows.padding_row, host_buffer.move)
        self.watcher: Callable[[torch.Tensor], None] | None = None  # is shown every step's logits [R, vocab_size]

    @torch.inference_mode()
    def launch(
        self, batch: Batch, graph: StepSize | None = None, announce: Callable[[Staged], None] | None = None
    ) -> PendingStep:
        """Apply the batch's changes and start its work. `graph`: the captured size to replay; None: no graph.

        `announce` is called with the starting sequences that have active stages, before any work of the device.
        """
        self._finish_late()
        assert self._deferred is None, "a step with late rows is drawn before the next one is launched"
        self.host_buffer.begin()
        self.rows.apply(batch)
        self._prompts.apply(batch)
        if announce is not None:
            announce(self.rows.staged(batch.starts))
        self._run_copies(batch.copies, batch.adapters)
        if not batch.chunks:
            return self._launched(self._begun(batch))
        pending = self._compute(batch) if graph is None else self._replay(batch, graph)
        self._side.issue()  # if late rows wait, the step's end may be far
        return pending

    def _run_copies(self, copies: BlockCopies, adapters: tuple[tuple[int, str], ...]) -> None:
        self._side.join()
        self.cache.run_copies(copies, self.kernels)
        if copies.save or copies.load or adapters:
            self._side.begin(lambda: self._load(copies, adapters), lambda: self.cache.save(copies.save, self.kernels))

    def _load(self, copies: BlockCopies, adapters: tuple[tuple[int, str], ...]) -> None:
        self.cache.load(copies.load, self.kernels)
        if self.adapters is not None:
            self.adapters.fill(adapters)

    def draw_late(self) -> float:
        """Draw the late rows of the newest step, if they wait, after the draw of its other rows. -> seconds waited.

        The steps before it must have been read. Sequences that are absent leave the step, so that nothing is noted of
        them.
        """
        return 0.0 if self._deferred is None else self._draw_deferred()  # every step asks, and the mode takes 3 us

    @torch.inference_mode()
    def _draw_deferred(self) -> float:
        assert self._deferred is not None
        (pending, late, logits, graph), self._deferred = self._deferred, None
        started_s = time.perf_counter()
        part = self.rows.drawing.without_absent(late)
        waited_s = time.perf_counter() - started_s
        pending.absent = frozenset(late.samples.seq_ids).difference(part.samples.seq_ids)
        self._sampler.tell_late(pending.absent)
        if len(part.samples):
            sampling = self.rows.drawing.plan(part, None if graph is None else self.draws.layout)
            if isinstance(sampling, SamplingInputs):
                part = self.rows.launched(part)
            self.host_buffer.flush()
            if isinstance(sampling, SamplingInputs):
                self._draw(pending, part, sampling, logits)
            else:
                assert graph is not None
                self._draw_captured(pending, part, sampling, graph, len(logits))
        self._launched(pending)
        return waited_s

    def _finish_late(self) -> None:
        """Draw late rows that nothing has asked for. Another rank than 0 waits until it is told to."""
        if self._sampler.leads:
            self.draw_late()

    def _begun(self, batch: Batch) -> PendingStep:
        return PendingStep(batch.step, self.rows.note_result, self._finish_late)

    def forget_sequences(self) -> None:
        """Remove all sequences and the step that waits to be drawn, for instance after a launch that failed."""
        self._deferred = None
        self.rows.clear()
        self._prompts.clear()

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        """Compute the logits [R, vocab_size] of the samples. The inputs must be on the device."""
        tail = None
        if inputs.tail is not None:
            tail = Tail(inputs.tail.rows, self._attentions[self._last_group].plan(inputs.tail.sequences))
        logits = self._model.forward(self._forward_inputs(inputs, tail), self._caches)
        return logits if inputs.samples.owners is None else logits[inputs.samples.owners]

    def _forward_and_read(self, inputs: StepInputs, plan: ReadPlan) -> tuple[torch.Tensor, LaunchedRead | None]:
        """`forward`, and what the step's chunks tell of their prompts."""
        hidden = self._model.hidden_states(self._forward_inputs(inputs, None), self._caches)
        logits = self._model.logits(hidden if inputs.tail is None else hidden[inputs.tail.rows])
        logits = logits if inputs.samples.owners is None else logits[inputs.samples.owners]
        return logits, self._prompts.read(plan, hidden)

    def _forward_inputs(self, inputs: StepInputs, tail: Tail | None) -> ForwardInputs:
        packed = inputs.sequences
        if self._model.adapters is not None:
            self._model.adapters.rows = inputs.adapters
        plans = [attention.plan(own) for attention, own in zip(self._attentions, packed, strict=True)]
        return ForwardInputs(
            inputs.token_ids, inputs.positions, inputs.slot_mappings, plans, tail, packed, inputs.states
        )

    def make_logits(self, num_rows: int) -> torch.Tensor:
        """Zeroed logits [num_rows, vocab_size] as the model computes them."""
        model = self._model
        return torch.zeros((num_rows, model.spec.vocab_size), dtype=model.dtype, device=model.device)

    def _compute(self, batch: Batch) -> PendingStep:
        rows, inputs = self.rows, self.rows.build(batch.chunks)
        plan = self._prompts.plan(batch.chunks)
        self.host_buffer.flush()
        rows.fill_late(inputs)
        self.cache.clear(inputs.fresh_blocks)
        pending = self._begun(batch)
        if plan is None:
            logits = self.forward(inputs)
        else:
            logits, pending.prompts = self._forward_and_read(inputs, plan)
        return self._sample(pending, inputs, logits)

    def _replay(self, batch: Batch, graph: StepSize) -> PendingStep:
        """Run the step by the graph of size `graph`.

        Kernels that can be captured use nothing past a sequence's length. But a later step, or another node, may read
        the rest of a block. So blocks are cleared if their old content may be NaN.
        """
        inputs = self.graphs.build(batch.chunks, graph, self.draws.layout)
        self.host_buffer.flush()
        if inputs.fresh_blocks is not None:
            self.cache.clear(inputs.fresh_blocks)
        outputs = self.graphs.replay(inputs, graph)
        pending, early = self._begun(batch), inputs.early
        if early is None or isinstance(inputs.sampling, SamplingInputs):
            return self._sample(pending, inputs, outputs.logits, graph)
        if self.watcher is not None:
            self.watcher(outputs.logits)
        if inputs.sampling is not None:
            self._draw_captured(pending, early, inputs.sampling, graph, len(outputs.logits))
        else:
            self._note_drawn(pending, early, Sampled(outputs.token_ids))
        return self._sample_late(pending, inputs.late, outputs.logits, graph)

    def _sample(
        self,
        pending: PendingStep,
        inputs: StepInputs | ReplayInputs,
        logits: torch.Tensor,
        graph: StepSize | None = None,
    ) -> PendingStep:
        """Draw a step's tokens from its logits [R, vocab_size] by launches. `graph`: as for `launch`."""
        if not len(inputs.samples):
            return self._launched(pending)
        if self.watcher is not None:
            self.watcher(logits)
        if (early := inputs.early) is not None:
            assert isinstance(inputs.sampling, SamplingInputs)
            self._draw(pending, early, inputs.sampling, logits)
        return self._sample_late(pending, inputs.late, logits, graph)

    def _sample_late(
        self, pending: PendingStep, late: Part | None, logits: torch.Tensor, graph: StepSize | None
    ) -> PendingStep:
        """Let the late rows of a step wait for `draw_late`, if it has any."""
        if late is None:
            return self._launched(pending)
        self._deferred = Deferred(pending, late, logits, graph)
        return pending

    def _draw(self, pending: PendingStep, part: Part, sampling: SamplingInputs, logits: torch.Tensor) -> None:
        sampled = self._sampler.sample(part.of(logits), sampling)
        _note_failures(pending, part, sampling.failures)
        self.rows.note_launched(part.samples, sampled.token_ids)
        pending.parts.append(DrawnPart(part.samples, sampled.to_host()))

    def _draw_captured(
        self, pending: PendingStep, part: Part, draw: CapturedDraw, graph: StepSize, num_rows: int
    ) -> None:
        """Draw by a graph, from the `num_rows` rows of logits that a replay of `graph` has left."""
        _note_failures(pending, part, draw.failures)
        self._note_drawn(pending, part, self.draws.replay(draw, graph, num_rows))

    def _note_drawn(self, pending: PendingStep, part: Part, sampled: Sampled) -> None:
        """Note what a graph has drawn for all rows of a step. It has written and counted the tokens, too."""
        self.rows.note_launched(part.samples, None)
        pending.parts.append(DrawnPart(part.samples, sampled.to_host(), part.places))

    def _launched(self, pending: PendingStep) -> PendingStep:
        """Note that all of the step's work is on its way to the device."""
        pending.retired = self._side.end()
        pending.is_launched = True
        return pending


def _note_failures(pending: PendingStep, part: Part, failures: dict[int, PdError]) -> None:
    """Note the rows of a part that cannot go on, by sequence."""
    if failures:
        by_row = dict(zip(part.samples.rows.tolist(), part.samples.seq_ids, strict=True))
        pending.failures |= {by_row[row]: why for row, why in failures.items()}
