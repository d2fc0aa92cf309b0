"""Read the settings of latent attention. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pd_cluster.models.spec import LatentSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pd_cluster.models.config_reader import ConfigReader
    from pd_cluster.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class LatentRules:
    """How to read the latent attention of one architecture: defaults, and what no setting says."""

    rank: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    query_rank: int = 1536
    is_interleaved: bool | None = None  # None: as `rope_interleave` says
    is_part_rotary: bool = False  # `partial_rotary_factor` is the rotary part of a query's head; else it is 1
    head_dim_rotates: bool = False  # `head_dim` is another name of `qk_rope_head_dim`
    scale_grows: bool = True  # the scores' scale has YaRN's mscale of `mscale_all_dim`, squared


def with_latent(
    spec: ModelSpec, reader: ConfigReader, rules: LatentRules, field: str, rope_settings: Mapping[str, Any]
) -> ModelSpec:
    """The model `spec` with latent attention. `rope_settings`: those in the config's `field`.

    Raises UnservedModel for what is another model, StartupError for malformed settings.
    """
    reader.refuse("num_key_value_heads", spec.num_kv_heads != spec.num_heads, f"there are {spec.num_heads} heads")
    kind = spec.rope.kind
    reader.refuse(field, kind not in ("default", "yarn"), f"with latent attention RoPE of type {kind} is not")
    latent = _read_sizes(reader, rules)
    size, told = latent.nope + latent.rope, "partial_rotary_factor"
    part = rope_settings.get(told) or reader.optional(told, None)
    expected = latent.rope / size if rules.is_part_rotary else 1.0
    differs = part is not None and (not isinstance(part, int | float) or abs(part - expected) * size >= 1)
    reader.refuse(field, differs, f"{told} = {part!r}, and {latent.rope} of {size} numbers rotate")
    reader.refuse("qk_rope_head_dim", latent.rope % 2 != 0, "pairs of numbers rotate")
    settings = reader.within(field, rope_settings)
    every = settings.number("mscale_all_dim") if settings.optional("mscale_all_dim", 0) else 0.0
    grows = rules.scale_grows and kind == "yarn" and every and spec.rope.factor > 1
    growth = 0.1 * every * math.log(spec.rope.factor) + 1 if grows else 1.0
    beta = settings.number("llama_4_scaling_beta") if settings.optional("llama_4_scaling_beta", 0) else 0.0
    original = settings.integer("original_max_position_embeddings", spec.rope.original_max_len or spec.max_len)
    rope = replace(spec.rope, query_beta=beta, original_max_len=original) if beta else spec.rope
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=size,
        rotary_dim=latent.rope,
        rope=rope,
        score_scale=size**-0.5 * growth**2,
        latent=latent,
    )


def _read_sizes(reader: ConfigReader, rules: LatentRules) -> LatentSpec:
    rotates = rules.head_dim_rotates and reader.optional("head_dim", None) is not None
    rope = reader.integer("qk_rope_head_dim", reader.integer("head_dim") if rotates else rules.rope)
    reader.refuse("head_dim", rotates and reader.integer("head_dim") != rope, f"qk_rope_head_dim is {rope}")
    is_interleaved = rules.is_interleaved
    if is_interleaved is None:
        is_interleaved = not reader.is_null("rope_interleave") and reader.boolean("rope_interleave", True)
    return LatentSpec(
        rank=reader.integer("kv_lora_rank", rules.rank),
        rope=rope,
        nope=reader.integer("qk_nope_head_dim", rules.nope),
        value=reader.integer("v_head_dim", rules.value),
        query_rank=0 if reader.is_null("q_lora_rank") else reader.integer("q_lora_rank", rules.query_rank),
        is_interleaved=is_interleaved,
    )
