"""A rank's adapters: read from files on a thread, kept in host memory, copied from there into slots of the device."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from pd_cluster.adapters.adapter_bytes import read_adapter
from pd_cluster.adapters.adapter_spec import fit_adapter
from pd_cluster.adapters.part_matrices import clear, put_matrices
from pd_cluster.adapters.refused_modules import SERVED_KINDS
from pd_cluster.adapters.tensor_table import MAX_HEADER_BYTES
from pd_cluster.errors import BadAdapter, StartupError
from pd_cluster.models.decoder import Decoder
from pd_cluster.models.model_share import ModelShare
from pd_cluster.models.registry import build_model
from pd_cluster.models.shard import Shard
from pd_cluster.worker.host_pages import AdapterPages
from pd_kernels.backends import TORCH
from pd_kernels.lora import RANK_STEP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pd_cluster.adapters.adapter_bytes import AdapterBytes
    from pd_cluster.adapters.adapter_spec import AdapterSpec
    from pd_cluster.config import LoraConfig
    from pd_cluster.models.model import Model
    from pd_cluster.models.reduce import Reduce
    from pd_cluster.models.spec import ModelSpec

logger = logging.getLogger(__name__)


def slots_size(config: LoraConfig, spec: ModelSpec, tp: int) -> int:
    """Numbers in the slots of one rank, before there is a model. Raises StartupError."""
    if not config.lora_slots:
        return 0
    _check(spec)
    share = ModelShare(Shard(0, tp), cast("Reduce", object()) if tp > 1 else None)  # which nothing calls
    model = build_model(spec, TORCH, 1, torch.float32, torch.device("meta"), share)
    return AdapterStore(model, config).slots.memory.numel()


def _check(spec: ModelSpec) -> None:
    if spec.modules is not None:
        raise StartupError("--lora-slots: adapters are not served for a model that transformers' modules compute")


class AdapterStore:
    """The engine says what is read, dropped and copied, and when: each rank does the same."""

    def __init__(self, model: Model, config: LoraConfig, model_name: str = "") -> None:
        """Take memory for the slots on the model's device. Raises StartupError."""
        self._model_name = model_name
        _check(model.spec)
        assert isinstance(model, Decoder)
        parts = {name: part for name, part in model.parts.items() if part.kind in SERVED_KINDS}
        self._parts, self._max_rank = parts, config.max_lora_rank
        self._orders = {
            name: order.cpu() for name, part in parts.items() if (order := model.order_of(part)) is not None
        }
        self._max_bytes = MAX_HEADER_BYTES + 8 + 4 * self._max_rank * sum(sum(part.shape) for part in parts.values())
        self._held: dict[str, AdapterPages] = {}  # by digest
        # Of dropped ones: giving memory back may wait for the device, so the next one takes it, or gives it back
        self._spare: deque[AdapterPages] = deque()
        self.slots = model.make_adapters(parts, config.lora_slots, config.max_lora_rank)

    def begin(self, digest: str, path: str, told: Callable[[str, str, int], None]) -> None:
        """Read an adapter on a thread, which calls `told` at the end: see Executor.read_adapter."""
        threading.Thread(target=self._run, args=(digest, path, told), name="adapter-read", daemon=True).start()

    def drop(self, digest: str) -> None:
        """Forget an adapter in host memory. Unknown ones are ignored."""
        if (pages := self._held.pop(digest, None)) is not None:
            self._spare.append(pages)

    def fill(self, adapters: Iterable[tuple[int, str]]) -> None:
        """Copy each adapter into its slot."""
        for slot, digest in adapters:
            pages = self._held[digest]
            self.slots.fill(slot, pages.pieces())
            pages.note_copied()

    def close(self, unpin_s: float = inf) -> None:
        """Give host memory back, after the last step. Idempotent. unpin_s: for that, at the end of the process."""
        until_s = time.monotonic() + unpin_s
        for digest in tuple(self._held):
            self.drop(digest)
        with suppress(IndexError):  # there are none left: a read that goes on takes from them, too
            while time.monotonic() < until_s:
                self._spare.popleft().close(pause_s=0.0)

    def _run(self, digest: str, path: str, told: Callable[[str, str, int], None]) -> None:
        try:
            adapter = self._held[digest] = self._read(digest, path)
        except BadAdapter as error:
            told(digest, str(error), 0)
        except Exception as error:  # no memory, for instance: the engine goes on without this adapter
            told(digest, f"{path} cannot be read: {error!r}", 0)
        else:
            told(digest, "", adapter.numbers.nbytes)

    @torch.inference_mode()
    def _read(self, digest: str, path: str) -> AdapterPages:
        """The matrices of this rank, as a slot has them. Raises BadAdapter."""
        files = read_adapter(Path(path), self._max_bytes)
        if files.digest != digest:
            raise BadAdapter(f"{path} has other files: their digest is {files.digest}, not {digest}")
        spec = fit_adapter(files, self._parts, self._max_rank)
        if told := spec.base_warning(self._model_name):
            logger.warning("%s: %s", path, told)
        rank, slots = -(-spec.rank // RANK_STEP) * RANK_STEP, self.slots
        pages = self._take_pages(rank * slots.size)
        try:
            self._put(files, spec, rank, pages.numbers)
            pages.pin()
        except BaseException:
            pages.close()
            raise
        return pages

    def _put(self, files: AdapterBytes, spec: AdapterSpec, rank: int, memory: torch.Tensor) -> None:
        """Fill the memory of one adapter. Raises BadAdapter."""
        if len(spec.modules) < len(self._parts) or any(module.rank < rank for module in spec.modules):
            clear(memory)
        for module in spec.modules:
            a, b = self.slots.place(memory, rank, module.part)
            order = self._orders.get(module.name)
            put_matrices(files, module, a[: module.rank], b[:, : module.rank], order)

    def _take_pages(self, num_numbers: int) -> AdapterPages:
        """Those of a dropped adapter, if they are as many; else they are given back."""
        while self._spare:
            with suppress(IndexError):  # of another thread
                pages = self._spare.popleft()
                if len(pages.numbers) == num_numbers:
                    pages.wait()
                    return pages
                pages.close()
        return AdapterPages(num_numbers, self.slots.dtype, self.slots.memory.device)
