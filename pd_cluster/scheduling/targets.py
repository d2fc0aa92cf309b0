"""What clients may wait for tokens, and how long a decode node's steps may be where no target says it.

A GPU reads all weights in each step, and multiplies some hundred tokens in that time: on an H200 32 decodes take 5.4 ms
alone and 7.1 in a step of 192 tokens (8B). So prompts hardly hold up the streams of a decode node while its steps take
at most `usual_gap_s`. On a CPU each token costs the same, whatever it shares a step with: a limit would gain nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pd_cluster.config import SchedulerConfig
    from pd_cluster.scheduling.step_model import StepModel

AIM = 0.95  # of a target: predictions are some percent off
USUAL_DECODES, USUAL_CONTEXT = 32, 1024  # streams of a decode node, and tokens before the next one of each
# Of what FLOPs say: 8,000 keys cost as much as a token for Qwen3-30B-A3B, 1,555 by FLOPs. One step at start that took
# twice its time made 650,000 of 10,000 for 8B
MOST_KEYS = 16
USUAL_SIZES = (128, 192, 256, 384, 512, 768, 1024)  # tokens of captured steps
# Of the decodes alone. 1.32 to 1.5 times lets 160 tokens of prompts join 32 decodes of 8B on an H200, with which a
# stream's 99th percentile between tokens is 1.5 times its median; from 1.44 on prompts beside 1 to 256 decodes have no
# fewer than with the 192 tokens in all that were measured ("One budget" in benchmarks/LOG.md)
PROLONGED = 1.44
# Where reading the other experts costs the most, larger steps cost little more: 32 decodes of Qwen3-30B-A3B take
# 13.5 ms alone, 16.7 with 224 tokens of prompts (15 us a token), 19.0 with 480 and 24.9 with 992 (11 us)
MOST_PROLONGED, NEARLY_CHEAPEST = 2.0, 1.25

# Of streams that a prefill node keeps without a target: a step of 512 tokens of a prompt after 40,000 reads each in 54
# us, as a whole step does, one of 256 in 68. Beside 1 to 4 streams as long it takes 32 to 34 ms (8B, H200)
KEPT_GAP_S = 0.038


@dataclass(frozen=True, slots=True)
class Targets:
    """What clients may wait, in seconds. inf: no target.

    `context`: tokens before each stream's next one that a step's time counts: where long streams fill a step, prompts
    would else get the least of it. 0: as many as there are.
    `keys`: what costs as much as a token of a prompt is from so many keys to MOST_KEYS times as many. 0: any number.
    """

    ttft_s: float = inf
    tpot_s: float = inf
    itl_s: float = inf
    context: int = 0
    keys: int = 0

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        itl_ms = config.slo_itl_ms or 3 * config.slo_tpot_ms
        ttft_s, tpot_s, itl_s = ((ms / 1e3 or inf) for ms in (config.slo_ttft_ms, config.slo_tpot_ms, itl_ms))
        return cls(ttft_s, tpot_s, itl_s)

    def on(self, role: str, device: str, model: StepModel, keys: int = 0) -> Targets:
        """Those of a node in this role on this device ("cpu", "cuda:0", ...).

        model: of its steps at start. keys: `ModelSpec.keys_per_token`, for times that no later step corrects.
        """
        has_none = device != "cpu" and self.tpot_s == self.itl_s == inf
        if role == "prefill":  # streams take what prompts leave of it
            return replace(self, itl_s=KEPT_GAP_S) if has_none else replace(self, tpot_s=inf)
        if role == "decode" and has_none:
            return replace(self, itl_s=usual_gap_s(model) / AIM, context=USUAL_CONTEXT, keys=keys)
        return self


def usual_gap_s(model: StepModel) -> float:
    """Seconds of a step that is PROLONGED times as long as the decodes alone of a usual node.

    More, up to MOST_PROLONGED times, if that makes a prompt's token cheaper: those of the smallest step with a price
    of a token that is nearly the cheapest.
    """
    alone_s = model.decode_s(USUAL_DECODES, USUAL_DECODES * USUAL_CONTEXT)
    sizes = [size - USUAL_DECODES for size in USUAL_SIZES]
    longer_s = {size: model.prolonged_s(USUAL_DECODES, size) for size in sizes}
    prices = {size: one_s / size for size, one_s in longer_s.items() if one_s <= (MOST_PROLONGED - 1) * alone_s}
    cheap = (longer_s[size] for size, price in prices.items() if price <= NEARLY_CHEAPEST * min(prices.values()))
    return alone_s + max((PROLONGED - 1) * alone_s, next(cheap, 0.0))
