"""Decides sizes of steps from the times of steps on this device.

A step reads the weights once, whatever it computes. How many tokens it computes in that time depends on the model: a
step of a mixture with 64 tokens or more reads all experts, and multiplies each token with few of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES_BESIDE = (128, 192, 256, 384, 512, 768, 1024)  # tokens of a step with decodes; sizes of captured steps
# 192 tokens for 8B on an H200, with which a stream's 99th percentile between tokens is 1.5 times its median: 32 decodes
# take 5.4 ms alone, 7.1 in a step of 192 tokens (1.32 times), 8.1 in one of 256 (1.5 times)
PROLONGED = 1.4
# Where reading the other experts costs the most, larger steps cost little more: 32 decodes of Qwen3-30B-A3B take
# 13.5 ms alone, 16.7 with 224 tokens of prompts (15 us a token), 19.0 with 480 and 24.9 with 992 (11 us)
MOST_PROLONGED, NEARLY_CHEAPEST = 2.0, 1.25
# Larger steps hold up the first token of short prompts, and the announcement of long ones, for this gain at least.
# Qwen3-30B-A3B read 66, 74 and 81 thousand tokens/s in steps of 2,048, 4,096 and 8,192; with a faster kernel for
# experts 75 and 77 in the first two
LEAST_GAIN = 1.07


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
    """The largest of `sizes` (ascending) that makes a step at most PROLONGED times as long as its decodes alone.

    A larger one, up to MOST_PROLONGED times, if it makes a prompt's token cheaper: the smallest with a price of a token
    that is nearly the cheapest. `measure`: seconds of a step of so many tokens, `num_decodes` of them decodes.
    """
    alone = measure(num_decodes)
    seconds, prices, chosen = {num_decodes: alone}, dict[int, float](), sizes[0]
    for size in sizes:
        seconds[size] = measure(size)
        if seconds[size] > MOST_PROLONGED * alone:
            break
        prices[size] = (seconds[size] - alone) / (size - num_decodes)
        if seconds[size] <= PROLONGED * alone:
            chosen = size
    cheap = (size for size, price in prices.items() if price <= NEARLY_CHEAPEST * min(prices.values()))
    return StepCost(max(chosen, next(cheap, chosen)), seconds)


def tokens_of_prompts(sizes: Sequence[int], measure: Callable[[int], float]) -> StepCost:
    """The size of `sizes` (ascending) after which the next size does not read prompts LEAST_GAIN times as fast.

    `measure`: seconds of a step of so many tokens of prompts. It is called with `sizes` up to the first without gain.
    """
    chosen, seconds = sizes[0], {sizes[0]: measure(sizes[0])}
    for size in sizes[1:]:
        seconds[size] = measure(size)
        if size / seconds[size] < LEAST_GAIN * chosen / seconds[chosen]:
            break
        chosen = size
    return StepCost(chosen, seconds)
