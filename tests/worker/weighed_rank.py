"""A rank's process that also says how much memory its tensors hold: the phase "resident"."""

from __future__ import annotations

import gc
import os

import torch

from pd_cluster.worker.rank import RankProcess, main


def resident_bytes() -> int:
    """Bytes of the storages of all tensors that live in this process, but for those that are frozen."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages: dict[object, int] = {}
    for tensor in tensors:
        if tensor.is_mkldnn:  # packed for products on a CPU: it has no storage that torch shows
            storages["mkldnn", id(tensor)] = tensor.nbytes
        else:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


class WeighedRank(RankProcess):
    def _phase_resident(self) -> int:
        gc.unfreeze()  # a rank has frozen what it has made; what a process of tests has frozen is older than the test
        return resident_bytes()


if __name__ == "__main__":
    os._exit(main(WeighedRank))
