"""Decides sizes of steps from the times of steps on this device.

A step reads the weights once, whatever it computes. How many tokens it computes in that time depends on the model: a
step of a mixture with 64 tokens or more reads all experts, and each token is multiplied with few of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES_BESIDE = (128, 192, 256, 384, 512, 768, 1024)  # tokens of a step with decodes; sizes of captured steps
# 192 tokens for 8B on an H200, with which a stream's 99th percentile between tokens is 1.5 times its median: 30 decodes
# take 5.5 ms alone, 7.4 in a step of 192 tokens (1.35 times), 8.9 in one of 256 (1.62 times)
MOST_PROLONGED = 1.5
# Larger steps hold up the first token of short prompts, and the announcement of long ones, for this gain at least
LEAST_GAIN = 1.1


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decided size of steps, in tokens, and the measured seconds of the steps that decided it, by their tokens."""

    tokens: int
    seconds: dict[int, float]

    @property
    def text(self) -> str:
        """The measured times, for a log."""
        return ", ".join(f"{tokens:,}: {seconds * 1e3:.1f} ms" for tokens, seconds in self.seconds.items())


def tokens_beside_decodes(num_decodes: int, sizes: Sequence[int], measure: Callable[[int], float]) -> StepCost:
    """The largest of `sizes` (ascending) that makes a step at most MOST_PROLONGED times as long as its decodes alone.

    It is at least the smallest. `measure`: seconds of a step of so many tokens, `num_decodes` of them decodes. It is
    called with `num_decodes` first, then with `sizes` up to the first that takes longer.
    """
    seconds = {num_decodes: measure(num_decodes)}
    chosen = sizes[0]
    for size in sizes:
        seconds[size] = measure(size)
        if seconds[size] > MOST_PROLONGED * seconds[num_decodes]:
            break
        chosen = size
    return StepCost(chosen, seconds)


def tokens_of_prompts(sizes: Sequence[int], measure: Callable[[int], float]) -> StepCost:
    """The size of `sizes` (ascending) behind which the next size does not read prompts LEAST_GAIN times as fast.

    `measure`: seconds of a step of so many tokens of prompts. It is called with `sizes` up to the first without gain.
    """
    chosen, seconds = sizes[0], {sizes[0]: measure(sizes[0])}
    for size in sizes[1:]:
        seconds[size] = measure(size)
        if size / seconds[size] < LEAST_GAIN * chosen / seconds[chosen]:
            break
        chosen = size
    return StepCost(chosen, seconds)
