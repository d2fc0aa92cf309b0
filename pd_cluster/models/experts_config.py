"""Read the settings of a mixture of experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pd_cluster.models.spec import ExpertsSpec

if TYPE_CHECKING:
    from pd_cluster.models.config_reader import ConfigReader


@dataclass(frozen=True, slots=True)
class ExpertsRules:
    """How to read the mixture of experts of one architecture."""

    size: str  # the setting that has the size of an expert's activations
    normalized: bool | None = None  # None: as `norm_topk_prob` says
    default_normalized: bool = False  # of `norm_topk_prob`, which is true for sigmoids
    is_shared: bool = False  # one more expert, of `shared_expert_intermediate_size`, computes every token
    is_everywhere: bool = False  # no layer has a dense feed-forward, and configs have no `intermediate_size`
    is_sigmoid: bool = False  # routed as in DeepSeek-V3: see `_read_grouped_experts`, which uses the fields after it
    is_grouped: bool = False  # routed as there, by the softmax
    num_shared: int = 0  # default of `n_shared_experts`
    num_dense: int = 0  # default of `first_k_dense_replace`
    num_groups: int = 1  # default of `n_group`
    groups_chosen: int = 1  # default of `topk_group`
    factor: float = 1.0  # default of `routed_scaling_factor`
    is_v2: bool = False  # as DeepSeek-V2: `topk_method` says whether there are groups, and one expert ranks a group
    names_layers: bool = False  # `mlp_layer_types` names the dense layers
    is_biased: bool = False  # see ExpertsSpec


def read_experts(reader: ConfigReader, experts: ExpertsRules, num_layers: int) -> ExpertsSpec:
    """The number of experts has several names: transformers 5 saves the hub's `num_experts` as `num_local_experts`."""
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    given = [name for name in names if reader.optional(name, None) is not None] or names[-1:]
    num_experts, num_chosen = reader.integer(given[0]), reader.integer("num_experts_per_tok")
    differ = any(reader.integer(name) != num_experts for name in given)  # which counts differs between model types
    reader.refuse(given[-1], differ, f"{given[0]} is {num_experts}")
    reader.refuse("num_experts_per_tok", num_chosen > num_experts, f"there are {num_experts} experts")
    dense, period = reader.optional("mlp_only_layers", ()), reader.integer("decoder_sparse_step", 1)
    reader.refuse("mlp_only_layers", not isinstance(dense, (list, tuple)), "a list of layers is expected")
    default = experts.is_sigmoid or experts.default_normalized
    normalized = reader.optional("norm_topk_prob", default and not reader.is_null("norm_topk_prob"))
    if experts.normalized is not None:
        normalized = experts.normalized
    spec = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=num_chosen,
        size=reader.integer(experts.size),
        normalized=bool(normalized),
        shared_size=reader.integer("shared_expert_intermediate_size") if experts.is_shared else 0,
        dense_layers=tuple(layer for layer in range(num_layers) if layer in dense or (layer + 1) % period),
    )
    told = "in this architecture every layer has experts"
    reader.refuse("mlp_only_layers", experts.is_everywhere and bool(dense), told)
    reader.refuse("decoder_sparse_step", experts.is_everywhere and period != 1, told)
    if experts.is_biased:
        limit, alpha = reader.number("swiglu_limit", spec.limit), reader.number("swiglu_alpha", spec.alpha)
        spec = replace(spec, is_biased=True, limit=limit, alpha=alpha)
    is_grouped = experts.is_sigmoid or experts.is_grouped
    return _read_grouped_experts(reader, experts, spec, num_layers) if is_grouped else spec


def _read_grouped_experts(reader: ConfigReader, rules: ExpertsRules, spec: ExpertsSpec, num_layers: int) -> ExpertsSpec:
    """The settings of DeepSeek-V3's routing (arXiv 2412.19437, section 2.1) in addition to those of `spec`."""
    scoring, expected = reader.optional("scoring_func", None), "sigmoid" if rules.is_sigmoid else "softmax"
    reader.refuse("scoring_func", scoring not in (None, expected), f"in this architecture only {expected} is")
    num_groups, chosen = reader.integer("n_group", rules.num_groups), reader.integer("topk_group", rules.groups_chosen)
    best = 2
    if rules.is_v2:
        method = reader.optional("topk_method", "greedy")
        known = method in ("greedy", "group_limited_greedy")
        reader.refuse("topk_method", not known, "in this architecture greedy and group_limited_greedy are")
        normalizes = bool(reader.optional("norm_topk_prob", False))
        reader.refuse("norm_topk_prob", normalizes, "transformers and the model's own code differ in it")
        num_groups, chosen, best = (num_groups, chosen, 1) if method == "group_limited_greedy" else (1, 1, best)
    else:
        reader.refuse("topk_method", reader.optional("topk_method", "noaux_tc") != "noaux_tc", "only noaux_tc is")
    size = spec.num_experts // num_groups
    reader.refuse("n_group", spec.num_experts % num_groups != 0, f"there are {spec.num_experts} experts")
    told = f"a group's rank is the sum of its {best} best experts"
    reader.refuse("n_group", num_groups > 1 and size < best, told)
    reader.refuse("topk_group", chosen > num_groups, f"there are {num_groups} groups")
    reader.refuse("topk_group", spec.num_chosen > chosen * size, f"{spec.num_chosen} experts are chosen of {size} each")
    return replace(
        spec,
        shared_size=reader.integer("n_shared_experts", rules.num_shared, 0) * spec.size,
        shared_gated=False,
        dense_layers=_dense_layers(reader, rules, num_layers),
        is_sigmoid=rules.is_sigmoid,
        factor=reader.number("routed_scaling_factor", rules.factor),
        num_groups=num_groups,
        groups_chosen=chosen,
        group_best=best,
    )


def _dense_layers(reader: ConfigReader, rules: ExpertsRules, num_layers: int) -> tuple[int, ...]:
    reader.refuse("moe_layer_freq", reader.optional("moe_layer_freq", 1) != 1, "every layer after the first ones is")
    first = tuple(range(min(num_layers, reader.integer("first_k_dense_replace", rules.num_dense, 0))))
    kinds = reader.optional("mlp_layer_types", None) if rules.names_layers else None
    if kinds is None:
        return first
    known = isinstance(kinds, list) and len(kinds) == num_layers and all(kind in ("dense", "sparse") for kind in kinds)
    reader.refuse("mlp_layer_types", not known, f"a list of {num_layers} times dense or sparse is expected")
    found = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    differs = reader.optional("first_k_dense_replace", None) is not None and found != first
    reader.refuse("first_k_dense_replace", differs, f"mlp_layer_types says that layers {found} are dense")
    return found
