"""Small steps of any kind as CUDA graphs of everything but attention.

A prompt of a thousand tokens keeps a GPU busy for less time than the host takes to launch a small model's kernels one
by one. What lies between two attentions depends on nothing but the number of tokens: it is captured, per bucket of
tokens, as one *piece*; attention, whose launches depend on the sequences, runs between the pieces.

    piece 0                       embedding ........................... norm, QKV, rotation and cache write of layer 0
    piece i, 0 < i < num_layers   output product and MLP of layer i-1,  the same of layer i

The rest of the last layer concerns the rows that sample alone, and is launched as usual.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from pd_cluster.models.llama import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pd_cluster.models.llama import ForwardInputs, Llama
    from pd_cluster.worker.kv_cache import KVCache
    from pd_cluster.worker.recorder import Recorder
    from pd_cluster.worker.staging import Staging

_NUM_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Pieces:
    """One bucket's."""

    replays: tuple[Callable[[], None], ...]
    stream: Stream  # what the last one leaves


class PieceGraphs:
    """The buckets' pieces."""

    def __init__(self, model: Llama, cache: KVCache, staging: Staging) -> None:
        self._model = model
        self._views = list(cache.layer_views)
        self._staging = staging
        self.padding_slot = cache.padding_block * cache.geometry.block_size
        self._sizes: list[int] = []
        self._pieces: dict[int, Pieces] = {}
        self._query = self._attended = torch.empty(0)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], recorder: Recorder, progress: Callable[[str], None]) -> None:
        """Capture every size, or as many of the largest as there is memory for."""
        started_s, free, spec = time.perf_counter(), recorder.free_bytes, self._model.spec
        shape = (max(sizes), spec.num_heads, spec.head_dim)
        self._query = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        self._attended = torch.zeros_like(self._query)
        for size in sorted(sizes, reverse=True):
            if not recorder.has_room():
                progress(f"no memory for graphs of steps of fewer than {min(self._sizes, default=0)} tokens")
                break
            self._pieces[size] = self._record(size, recorder)
            self._sizes.insert(0, size)
        if self._sizes:
            progress(
                f"graphs of {len(self._sizes)} step sizes up to {self._sizes[-1]} tokens in "
                f"{time.perf_counter() - started_s:.1f} s and {(free - recorder.free_bytes) / 1e9:.2f} GB"
            )

    def bucket_for(self, num_tokens: int) -> int:
        """The bucket that serves a step of as many tokens; 0 when none does."""
        return next((size for size in self._sizes if size >= num_tokens), 0)

    def run(self, inputs: ForwardInputs, num_tokens: int) -> torch.Tensor:
        """See Llama.forward; `inputs` were built for a bucket, and padding follows the `num_tokens`."""
        pieces, real = self._pieces[inputs.slot_mapping.shape[0]], slice(num_tokens)
        query, attended = self._query[real], self._attended[real]
        pieces.replays[0]()
        for index, replay in enumerate(pieces.replays[1:]):
            self._model.attend(index, query, inputs.plans, *self._views[index], out=attended)
            replay()
        return self._model.finish(pieces.stream.of_rows(real), query, inputs, *self._views[-1])

    def _record(self, size: int, recorder: Recorder) -> Pieces:
        """Each piece goes on with the stream that the one before it left."""
        fields = np.zeros((_NUM_FIELDS, size), np.int64)
        fields[2] = self.padding_slot
        self._staging.begin()
        token_ids, positions, slots = self._staging.move_first(fields)
        self._staging.flush()
        replays, stream = [], Stream(None, torch.empty(0), (torch.empty(0), torch.empty(0)))
        for index in range(len(self._views)):

            def piece(index: int = index, stream: Stream = stream) -> Stream:
                model = self._model
                if index:
                    stream = replace(stream)  # which the model changes
                    model.after_attention(index - 1, stream, self._attended[:size])
                else:
                    stream = model.enter(token_ids, positions)
                model.before_attention(index, stream, slots, *self._views[index], out=self._query[:size])
                return stream

            replay, stream = recorder(piece)
            replays.append(replay)
        return Pieces(tuple(replays), stream)


def token_buckets(limit: int) -> list[int]:
    """Every 64th up to 512, every 128th up to 1024, every 256th from there, `limit` itself."""
    sizes = [16, 32, *range(64, 512, 64), *range(512, 1024, 128), *range(1024, limit, 256), limit]
    return sorted({size for size in sizes if size <= limit})
