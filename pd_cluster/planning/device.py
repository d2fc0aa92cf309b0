"""How long a node's steps take, and what its memory holds, as far as the simulation needs it."""

from __future__ import annotations

from math import exp
from typing import NamedTuple, Protocol

from pd_cluster.scheduling.step_model import StepWork, keys_of

USUAL_BLOCKS, USUAL_BLOCK_SIZE = 14_000, 64  # of 8B's cache on an H200
USUAL_SEQS, USUAL_STEP_TOKENS = 256, 2048  # as `capacity` decides them for it
# A device forgets its heat in this time (two steps of 2,048 tokens take 86 ms from cool and 97 back to back, 8B, H200)
HEAT_S, HEAVY_TOKENS = 0.15, 1024


class DeviceHeat(NamedTuple):
    """0: the device is cool, 1: it has had full steps of prompts for long."""

    begun_s: float = 0.0  # of the last step
    share: float = 0.0  # of its tokens, that make a device hot
    value: float = 0.0

    def at(self, now_s: float, num_tokens: int) -> DeviceHeat:
        """When a step of so many tokens of prompts begins."""
        stays = exp((self.begun_s - now_s) / HEAT_S)
        return DeviceHeat(now_s, min(1.0, num_tokens / HEAVY_TOKENS), stays * self.value + (1 - stays) * self.share)


class Device(Protocol):
    """Steps of one model on the GPUs of one node."""

    num_blocks: int = USUAL_BLOCKS
    block_size: int = USUAL_BLOCK_SIZE
    max_seqs: int = USUAL_SEQS
    step_tokens: int = USUAL_STEP_TOKENS
    heat: float = 0.0  # by so much of its time a step is longer while heavy ones follow each other

    def seconds(self, work: StepWork) -> float:
        """A step from cool, padded to a captured size."""


class ScaledDevice(Device):
    """Steps that take `factor` times as long."""

    def __init__(self, device: Device, factor: float) -> None:
        self._device, self._factor = device, factor
        self.num_blocks, self.block_size, self.heat = device.num_blocks, device.block_size, device.heat
        self.max_seqs, self.step_tokens = device.max_seqs, device.step_tokens

    def seconds(self, work: StepWork) -> float:
        return self._factor * self._device.seconds(work)


def steps_at_start(device: Device) -> list[tuple[StepWork, float]]:
    """What `measure_for_model` measures."""
    works = [StepWork(num, 1024 * num) for num in (1, 4, 12, 32, 64, 128)] + [StepWork(32, 32 * 4096)]
    works += [StepWork(32, 32 * 1024, size - 32, keys_of(size - 32, 0)) for size in (128, 256, 512, 1024)]
    works.append(StepWork(32, 32 * 1024, 96, keys_of(96, 4096)))
    return [(work, device.seconds(work)) for work in works]
