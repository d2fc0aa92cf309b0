"""The tables of `docs/models.md`, from the registry of architectures and the lists of wrappers and ignored tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from docs.generate.document import code, table
from pd_cluster.models.hf_config import Windows
from pd_cluster.models.missing_parts import MISSING_PARTS
from pd_cluster.models.registry import ARCHITECTURES
from pd_cluster.models.rope_kinds import ROPE_KINDS
from pd_cluster.models.tensor_names import IGNORED
from pd_cluster.models.wrapper import WRAPPERS

if TYPE_CHECKING:
    from pd_cluster.models.experts_config import ExpertsRules

DOCUMENT = "docs/models.md"
_WINDOWS = {
    Windows.NONE: "none",
    Windows.ALL: "every layer, if `sliding_window` is set",
    Windows.SOME: "with `use_sliding_window`, in the layers that the config names",
    Windows.PATTERN: "in the layers that the config names, or by its pattern",
}
_QK_NORM = {None: "as `use_qk_norm` says", True: "yes", False: "no"}
_BIAS = {None: "as `attention_bias` says", True: "yes", False: "no"}


def _architectures() -> str:
    rows = []
    for name, architecture in ARCHITECTURES.items():
        rules = architecture.rules
        family = architecture.build()
        file = str(getattr(family, "__module__", "")).replace(".", "/") + ".py"
        rows.append(
            [
                code(name),
                code(file),
                _BIAS[rules.qkv_bias],
                "of all heads as one row" if rules.norms_heads_together else _QK_NORM[rules.qk_norm],
                _WINDOWS[rules.windows],
                code(rules.activation[1]),
                _feed_forward(rules.experts),
            ]
        )
    headers = [
        "architecture",
        "family",
        "bias of Q, K, V",
        "norm of Q and K",
        "sliding windows",
        "activation",
        "feed-forward",
    ]
    return table(headers, rows)


def _feed_forward(experts: ExpertsRules | None) -> str:
    if experts is None:
        return "dense"
    return "experts, one of them shared" if experts.is_shared or experts.num_shared else "experts"


def _rope() -> str:
    return "RoPE types that are served: " + ", ".join(map(code, ROPE_KINDS)) + "."


def _wrappers() -> str:
    rows = [[code(name), code(wrapper.text_architecture)] for name, wrapper in WRAPPERS.items()]
    return table(["wrapper", "architecture of its text model"], rows)


def _ignored() -> str:
    rows = [[what, ", ".join(map(code, patterns))] for what, patterns in IGNORED.items()]
    return table(["what", "tensors"], rows)


def _missing() -> str:
    rows = [[", ".join(map(code, names)), what] for what, names in MISSING_PARTS.items()]
    return table(["architectures", "what is missing"], rows)


PARTS = {
    "architectures": _architectures, "wrappers": _wrappers, "rope": _rope, "ignored": _ignored, "missing": _missing,
}  # fmt: skip
