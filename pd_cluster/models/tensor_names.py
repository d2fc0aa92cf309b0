"""Names of a checkpoint's tensors: which slot each one fills, and which may be left unread."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

IGNORED: Mapping[str, tuple[str, ...]] = {
    "RoPE frequencies in old checkpoints; computed from the config": ("*.rotary_emb.inv_freq",),
    "image encoders of multimodal wrappers; requests with images are refused": (
        "vision_tower.*", "model.vision_tower.*", "visual.*", "model.visual.*",
        "multi_modal_projector.*", "model.multi_modal_projector.*",
    ),
    "scales of inputs, measured when the checkpoint was quantized; rows are quantized by their own numbers": (
        "*.input_scale", "*activation_scale",
    ),
    "scales of an FP8 KV cache, measured when the checkpoint was quantized; the cache has scale 1": (
        "*.k_scale", "*.v_scale", "*.kv_scale",
    ),
    "multi-token prediction; it drafts tokens and changes none": ("mtp.*",),
}  # fmt: skip
"""Tensors that may be left unread: what they are -> patterns of their names. No other one may lack a slot.

Besides, a layer for multi-token prediction may follow the model's last layer; it has a tensor `eh_proj.weight`.
"""
HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_MERGE = "eh_proj.weight"  # merges a token's embedding with the hidden state before it
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate|up|down)_proj\.weight(_scale)?")
_OTHER_SCALE = "_inv"  # at the end of a scale's name in some checkpoints
_FUSED = ".experts.down_proj"
_BASE_PREFIXES = ("embed_tokens.", "layers.", "norm.")  # of a decoder that was saved without its head
_TEXT_PREFIXES = {  # of a wrapper's text model, and what its own checkpoint has instead
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}


def match_slots(
    stored: Sequence[str], slots: Collection[str], tied_embeddings: bool
) -> tuple[dict[str, str], dict[str, set[str]]]:
    """Stored name -> slot; and the names that do not fit, by "missing", "unknown" or "stored twice".

    `stored`: names in all files. `tied_embeddings`: the checkpoint may have an output head, which is the embedding.
    """
    found: dict[str, str] = {}
    problems: dict[str, set[str]] = {"missing": set(slots), "unknown": set(), "stored twice": set()}
    if fused := fused_slots(slots):
        named = {slot_name(name).removesuffix(_OTHER_SCALE) for name in stored}
        for name, single in fused.items():
            problems["missing"] -= single if name in named else {name}
    prediction_layers = _prediction_layers(stored, slots)
    for name in stored:
        slot = slot_name(name)
        if slot not in slots and slot.removesuffix(_OTHER_SCALE) in slots:
            slot = slot.removesuffix(_OTHER_SCALE)
        if slot in problems["missing"]:
            found[name] = slot
            problems["missing"].remove(slot)
        elif slot in slots:
            problems["stored twice"].add(slot)
        elif not (is_ignored(name) or slot.startswith(prediction_layers) or (tied_embeddings and slot == HEAD)):
            problems["unknown"].add(name)
    return found, problems


def slot_name(name: str) -> str:
    """The name of a tensor in a checkpoint of the text model alone."""
    if name.startswith(_BASE_PREFIXES):
        return "model." + name
    for prefix, replacement in _TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def spellings(name: str) -> list[str]:
    """What wrappers call the tensor or module `name` of a text model."""
    found = [(prefix, own) for prefix, own in _TEXT_PREFIXES.items() if name.startswith(own)]
    return [prefix + name.removeprefix(own) for prefix, own in found]


def fused_slots(slots: Collection[str]) -> dict[str, set[str]]:
    """Slot of a layer's experts in one tensor -> the slots of single experts. A checkpoint fills one or the others."""
    found: dict[str, set[str]] = {}
    if any(name.endswith(_FUSED) for name in slots):
        for name in slots:
            if expert := _EXPERT.fullmatch(name):
                fused = f"{expert[1]}.{'down' if expert[2] == 'down' else 'gate_up'}_proj{expert[3] or ''}"
                if fused in slots:
                    found.setdefault(fused, set()).add(name)
    return found


def is_ignored(name: str) -> bool:
    """Whether a tensor is on the list IGNORED."""
    return any(fnmatchcase(name, pattern) for patterns in IGNORED.values() for pattern in patterns)


def _prediction_layers(stored: Iterable[str], slots: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the layers for multi-token prediction that follow the model's own layers."""
    last = max((int(layer[1]) for slot in slots if (layer := _LAYER.match(slot))), default=-1)
    layers = [_LAYER.match(slot_name(name)) for name in stored if name.endswith(_MERGE)]
    return tuple(layer[0] for layer in layers if layer and int(layer[1]) > last)
