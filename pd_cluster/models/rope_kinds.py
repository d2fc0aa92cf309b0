"""The types of RoPE: how each reads its settings, and what it makes of the frequencies. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pd_cluster.models.spec import RopeSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from pd_cluster.models.config_reader import ConfigReader

_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeKind:
    """One type of RoPE. No frequency may depend on a prompt's length: cached keys would be wrong for longer ones."""

    read: Callable[[ConfigReader, float, int], RopeSpec]  # of the settings, theta and `max_position_embeddings`
    scale: Callable[[RopeSpec, torch.Tensor], torch.Tensor]  # plain frequencies [rotary_dim / 2] -> those of the type
    is_longer: bool = False  # the context is `factor` times the original one; otherwise the config has it already


def _read_plain(settings: ConfigReader, theta: float, max_len: int) -> RopeSpec:
    return RopeSpec(theta)


def _read_linear(settings: ConfigReader, theta: float, max_len: int) -> RopeSpec:
    return RopeSpec(theta, "linear", settings.number("factor"))


def _read_llama3(settings: ConfigReader, theta: float, max_len: int) -> RopeSpec:
    factor, low, high = (settings.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    return RopeSpec(theta, "llama3", factor, low, high, settings.integer(_ORIGINAL, max_len))


def _read_yarn(settings: ConfigReader, theta: float, max_len: int) -> RopeSpec:
    """Without `factor` it is the longer context by the original one. `mscale` works only with `mscale_all_dim`."""
    original = settings.integer(_ORIGINAL, max_len)
    factor = settings.number("factor", max_len / original if max_len > original else None, least=1)
    slow = settings.number("beta_slow", 1.0)
    scales = [settings.number(name) if settings.optional(name, 0) else 0.0 for name in ("mscale", "mscale_all_dim")]
    grown = [0.1 * scale * math.log(factor) + 1.0 for scale in (scales if all(scales) else (1.0, 0.0))]
    return RopeSpec(
        settings.number("rope_theta", theta, least=2),  # the logarithm divides
        "yarn",
        factor,
        slow,
        settings.number("beta_fast", max(32.0, slow), least=slow),
        original,
        settings.number("attention_factor", grown[0] / grown[1]),
        not settings.is_null("truncate") and settings.boolean("truncate", True),  # null is false in transformers
    )


def _same(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    return plain


def _linear(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    return plain / spec.factor


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """As the model card of Llama 3.1: divided are frequencies of few periods within the original context."""
    periods = spec.original_max_len * plain / (2 * math.pi)
    blend = ((periods - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * plain / spec.factor + blend * plain


def _yarn(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    """As arXiv 2309.00071, section 3.2, with the blend linear in the pair's number in place of its periods."""
    num_pairs = len(plain)

    def pair(periods: float) -> float:
        """The number of the pair, no integer, with so many periods within the original context."""
        return num_pairs * math.log(spec.original_max_len / (periods * 2 * math.pi)) / math.log(spec.theta)

    first, last = pair(spec.high_freq_factor), pair(spec.low_freq_factor)
    if spec.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    kept = 1 - ((plain.new_tensor(list(range(num_pairs))) - first) / (last - first or 0.001)).clamp(0, 1)
    return plain / spec.factor * (1 - kept) + plain * kept


ROPE_KINDS: Mapping[str, RopeKind] = {
    "default": RopeKind(_read_plain, _same),
    "linear": RopeKind(_read_linear, _linear, is_longer=True),
    "llama3": RopeKind(_read_llama3, _llama3),
    # Up to `max_position_embeddings` it changes nothing; no longer context is served
    "dynamic": RopeKind(_read_plain, _same),
    "yarn": RopeKind(_read_yarn, _yarn, is_longer=True),
}
"""By the name in configs, `rope_type` or `type`."""
