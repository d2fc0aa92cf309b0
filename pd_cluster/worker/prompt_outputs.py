"""What chunks of prompts tell beside their KV: log-probabilities of the prompt's tokens, the last hidden state, logits.

They need the last hidden states of all rows of a chunk. So a step with such a chunk is launched without a graph, and
its last layer computes every row. The head's product goes over slices of rows: of 4,096 rows and 128,256 tokens the
logits would take 2 GB in fp32, those of a slice take less than what the largest step samples from
(`memory_measurement`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.protocol.prompt_outputs import PromptPart, PromptToken
from pd_cluster.worker.capacity import SAMPLES_PER_SEQ
from pd_cluster.worker.sampler import most_logprobs, to_host
from pd_connectors.protocol.messages import TopLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from pd_cluster.models.model import Model
    from pd_cluster.protocol.prompt_outputs import PromptOutputs
    from pd_cluster.scheduling.batch import Batch, SequenceChunk
    from pd_cluster.worker.sampler import TokenSampler
    from pd_kernels.backends import Kernels

MOST_ROWS = 256  # of logits at once
_NO_ENTRIES = (torch.empty(0), torch.empty(0), torch.empty(0, 0), torch.empty(0, 0))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a live sequence wants to know of its prompt."""

    outputs: PromptOutputs
    prompt: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Span:
    """One chunk's part of a step's results."""

    seq_id: int
    start: int  # the position of its first entry
    num_entries: int
    num_top: int
    is_last: bool  # the prompt ends in the chunk, and something after its last token is wanted
    is_pooled: bool
    num_logits: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The rows of a step's hidden states [T, hidden_size] of which something is wanted."""

    spans: tuple[_Span, ...]
    rows: torch.Tensor  # int64 [N], of entries, in the order of the spans
    targets: torch.Tensor  # int64 [N]: the tokens after them
    last_rows: torch.Tensor  # int64 [M]: of the last tokens of the prompts that end, by span
    logit_rows: torch.Tensor  # int64 [L] into M
    logit_ids: torch.Tensor  # int64 [L]: the tokens of the wanted logits


@dataclass(frozen=True, slots=True)
class LaunchedRead:
    """The results of a ReadPlan, in host memory once the step has retired."""

    spans: tuple[_Span, ...]
    targets: torch.Tensor  # int64 [N]
    logprobs: torch.Tensor  # float32 [N]
    ranks: torch.Tensor  # int64 [N]
    top_ids: torch.Tensor  # int64 [N, k]
    top_logprobs: torch.Tensor  # float32 [N, k]
    pooled: torch.Tensor  # float32 [M, hidden_size]
    logits: torch.Tensor  # float32 [L]

    def read(self) -> dict[int, PromptPart]:
        """The parts by sequence, from values on the host."""
        tops = zip(self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True)
        rows = zip(self.targets.tolist(), self.logprobs.tolist(), self.ranks.tolist(), tops, strict=True)
        pooled, logits = iter(self.pooled.numpy()), iter(self.logits.tolist())
        found = {}
        for span in self.spans:
            entries = tuple(
                PromptToken(token_id, logprob, rank, tuple(map(TopLogprob, ids[: span.num_top], values)))
                for token_id, logprob, rank, (ids, values) in islice(rows, span.num_entries)
            )
            vector = next(pooled).astype("<f4").tobytes() if span.is_last else b""
            wanted = tuple(islice(logits, span.num_logits))
            found[span.seq_id] = PromptPart(span.start, entries, vector if span.is_pooled else b"", wanted)
        return found


class PromptReader:
    """Knows which live sequences ask about their prompts, and computes their answers."""

    def __init__(
        self,
        model: Model,
        sampler: TokenSampler,
        kernels: Kernels,
        num_rows: int,
        move: Callable[[npt.NDArray[np.generic]], torch.Tensor],
    ) -> None:
        """`num_rows`: of live sequences. `move`: see HostBuffer."""
        self._model, self._sampler, self._kernels, self._move = model, sampler, kernels, move
        self._slice_rows = min(MOST_ROWS, SAMPLES_PER_SEQ * num_rows)
        self._asked: dict[int, _Asked] = {}

    def apply(self, batch: Batch) -> None:
        """Note the sequences that leave and enter."""
        if self._asked:
            for seq_id in batch.departures:
                self._asked.pop(seq_id, None)
        for start in batch.starts:
            if start.outputs is not None:
                prompt = np.array(start.token_ids[: start.num_prompt_tokens])
                self._asked[start.seq_id] = _Asked(start.outputs, prompt)

    def clear(self) -> None:
        """Forget all sequences."""
        self._asked.clear()

    def plan(self, chunks: Sequence[SequenceChunk]) -> ReadPlan | None:
        """What the step of these chunks has to find out; None: nothing. Call it before the host buffer's flush."""
        if not self._asked or not any(chunk.reads for chunk in chunks):
            return None
        spans: list[_Span] = []
        rows, targets = [], []
        last_rows: list[int] = []
        logit_rows: list[int] = []
        logit_ids: list[int] = []
        first_row = 0
        for chunk in chunks:
            if chunk.reads:
                asked = self._asked[chunk.seq_id]
                outputs, last = asked.outputs, len(asked.prompt) - 1
                end = chunk.start + chunk.num_tokens
                num_entries = 0 if outputs.logprobs is None else max(0, min(end, last) - chunk.start)
                rows.append(np.arange(first_row, first_row + num_entries))
                targets.append(asked.prompt[chunk.start + 1 : chunk.start + 1 + num_entries])
                ends = outputs.of_last_token and end > last
                if ends:
                    logit_rows += [len(last_rows)] * len(outputs.logits_of)
                    logit_ids += outputs.logits_of
                    last_rows.append(first_row + last - chunk.start)
                num_logits = len(outputs.logits_of) if ends else 0
                first, num_top = chunk.start + 1, outputs.logprobs or 0
                spans.append(_Span(chunk.seq_id, first, num_entries, num_top, ends, outputs.pooled, num_logits))
            first_row += chunk.num_tokens
        return ReadPlan(
            tuple(spans),
            self._move(np.concatenate(rows)),
            self._move(np.concatenate(targets)),
            *(self._move(np.array(values, np.int64)) for values in (last_rows, logit_rows, logit_ids)),
        )

    def read(self, plan: ReadPlan, hidden: torch.Tensor) -> LaunchedRead | None:
        """Compute what `plan` wants of `hidden` [T, hidden_size]. None: another rank tells it."""
        num_rows, size = len(plan.rows), self._slice_rows
        slices = [slice(first, first + size) for first in range(0, num_rows, size)]
        found = [self._entries(hidden[plan.rows[one]], plan.targets[one]) for one in slices]
        last = hidden[plan.last_rows]
        logits = self._logits_of(plan, last)
        if not self._sampler.leads:
            return None
        k = max(span.num_top for span in plan.spans)
        columns = [torch.cat(parts) for parts in zip(*found, strict=True)] or _NO_ENTRIES
        chosen, ranks, top_ids, top_logprobs = columns
        return LaunchedRead(
            plan.spans,
            to_host(plan.targets),
            to_host(chosen),
            to_host(ranks),
            to_host(top_ids[:, :k]),
            to_host(top_logprobs[:, :k]),
            to_host(last.float()),
            to_host(logits),
        )

    def _entries(self, hidden: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Log-probability and rank of `targets` (int64 [N]) after `hidden` [N, hidden_size], and the best tokens."""
        logits = self._sampler.whole(self._model.logits(hidden))
        if not self._sampler.leads:
            return ()
        ranks = 1 + (logits > logits.gather(1, targets[:, None])).sum(1)
        chosen, top_ids, top_logprobs = self._kernels.logprobs(logits, targets, most_logprobs(logits))
        return chosen, ranks, top_ids, top_logprobs

    def _logits_of(self, plan: ReadPlan, last: torch.Tensor) -> torch.Tensor:
        """The wanted logits (float32 [L]) after `last` [M, hidden_size]."""
        if not len(plan.logit_ids):
            return torch.empty(0)
        return self._sampler.whole(self._model.logits(last))[plan.logit_rows, plan.logit_ids].float()
