"""How long a step takes on one H200, or on two that share the model (benchmarks/LOG.md): by shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.planning.device import USUAL_STEP_TOKENS, Device
from pd_cluster.planning.step_table import at, padded
from pd_cluster.scheduling.captured_sizes import bucket_sizes, token_buckets

if TYPE_CHECKING:
    from pd_cluster.scheduling.step_model import StepWork

SIZES = token_buckets(USUAL_STEP_TOKENS)
DECODE_SIZES = bucket_sizes(256)
# ms of a step with 32 decodes more than of the decodes alone, by the tokens of the step
PROMPT_MS = (
    (32, 0.0),
    (128, 0.8),
    (192, 1.7),
    (256, 2.7),
    (384, 5.7),
    (512, 8.3),
    (768, 13.7),
    (1024, 18.4),
    (2048, 40),
)
NUM_EXPERTS, CHOSEN_SHARE = 128, 8 / 128  # of a layer, and the share that a token chooses
BESIDE_TOKENS = 1024
# ms of decodes alone without their contexts, by captured size: 1, 32, 128 and 256 of `python -m benchmarks gpu`; 8, 16,
# 40, 48 and 64 of 5, 13, 33, 41 and 64 decodes in traces of served workloads; 2 and 4 by the time between tokens of
# 4096 in, 128 out; 24 lies on the curve of experts
MIXTURE_MS = (
    (1, 2.17), (2, 2.82), (4, 3.9), (8, 4.68), (16, 6.79), (24, 7.72), (32, 8.3), (40, 8.92), (48, 9.43), (64, 10.19),
    (128, 10.2), (256, 11.33),
)  # fmt: skip
# A key of a prompt's token. Few tokens are cut into tiles that are shared. From 372 on tiles are large, and as many
# run at once as make WAVE_TOKENS: behind 40,000 tokens steps of 64 / 128 / 256 / 384 / 512 / 768 / 1,024 / 2,046 take
# 8.6, 11.8, 17.4, 24.2, 27.8, 46.5, 53.2 and 109 ms (H200)
KEY_S, WAVE_TOKENS = 0.745e-9, 528
NEAR_KEYS_S = ((0, 1.5e-9), (64, 1.4e-9), (128, 1.3e-9), (256, 1.05e-9), (372, 1.0e-9))


@dataclass(frozen=True, slots=True)
class DenseDevice(Device):
    """The 8B shape: seconds of a step without tokens, of one more decode and of a token of its context; shares of one
    GPU's time."""

    step_s: float = 4.1e-3
    decode_s: float = 6e-6
    context_s: float = 33e-9
    prompt_share: float = 1.0
    key_share: float = 1.0

    def seconds(self, work: StepWork) -> float:
        decodes_s = self.step_s + (self.decode_s * work.num_decodes + self.context_s * work.context)
        if not work.num_tokens:
            return decodes_s
        total = _padded(work)
        prompts_ms = max(0.0, at(PROMPT_MS, total) - at(PROMPT_MS, work.num_decodes))
        return (
            decodes_s + self.prompt_share * prompts_ms / 1e3 + self.key_share * _key_s(work.num_tokens) * work.num_keys
        )


@dataclass(frozen=True, slots=True)
class MixtureDevice(Device):
    """The shape of Qwen3-30B-A3B in float8: a step reads the experts that its tokens choose.

    With random weights the tokens of one prompt choose few experts: from some hundreds on their products compute, while
    those of decodes read weights, so that both take their time one after the other. 1,024 tokens of a prompt alone take
    15.8 ms, here 15.7, beside 26 decodes 23.0, here 23.0 (traces of two served workloads). Beside 3 decodes, 2,045
    tokens after 2,045 take 25 to 30 (ITL p99 and the longest of 4096 in, 128 out on two mixed nodes), here 27.8; with
    as much beside any decodes as beside 26 it was 32.
    """

    step_s: float = 1.95e-3
    prompts_s: float = 1.5e-3  # more in a step with prompts
    expert_s: float = 55.2e-6  # for each of NUM_EXPERTS that a layer reads
    context_s: float = 20.5e-9
    token_s: float = 4.58e-6
    key_s: float = 1.0e-9
    beside_s: float = 7.2e-6  # more for each of the first BESIDE_TOKENS beside decodes that read all experts

    def seconds(self, work: StepWork) -> float:
        num = work.num_decodes
        decodes_s = at(MIXTURE_MS, num if work.num_tokens else _padded(work)) / 1e3 if num else self.step_s
        decodes_s += self.context_s * work.context
        if not work.num_tokens:
            return decodes_s
        total, read = _padded(work), _experts(num)
        beside_s = self.beside_s * min(work.num_tokens, BESIDE_TOKENS) * read / NUM_EXPERTS
        prompts_s = self.prompts_s + self.expert_s * (_experts(total) - read) + self.token_s * (total - num)
        return decodes_s + prompts_s + beside_s + self.key_s * work.num_keys


# By shape and number of ranks. Of two (2e7808b, 1k context) were measured: decode 1 / 32 / 128 / 256 in 2.95 / 3.52 /
# 5.62 / 9.35 ms, here 2.92 / 3.62 / 5.77 / 8.64; prompts of 1,024 / 4,096 at 79.4k / 75.3k tokens/s, here 78.2k /
# 74.2k; one prompt of 1,024 in 16.2 ms, here 13.6. Steps of prompts beside decodes were not measured.
DEVICES: dict[tuple[str, int], Device] = {
    ("8b", 1): DenseDevice(),
    ("8b", 2): DenseDevice(2.9e-3, 5e-6, 17e-9, prompt_share=0.57, key_share=0.5),
    ("30b-a3b-fp8", 1): MixtureDevice(),
}
SHAPES = tuple(dict.fromkeys(shape for shape, _ in DEVICES))


def _experts(num_tokens: int) -> float:
    return NUM_EXPERTS * (1 - (1 - CHOSEN_SHARE) ** num_tokens)


def _padded(work: StepWork) -> int:
    """The captured size of a step."""
    return padded(SIZES if work.num_tokens else DECODE_SIZES, work.num_decodes + work.num_tokens)


def _key_s(num_tokens: int) -> float:
    if num_tokens < NEAR_KEYS_S[-1][0]:
        return at(NEAR_KEYS_S, num_tokens)
    return KEY_S * -(-num_tokens // WAVE_TOKENS) * WAVE_TOKENS / num_tokens
