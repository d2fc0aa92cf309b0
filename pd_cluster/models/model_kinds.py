"""Kinds of models that are no decoders which write text, told by their config. Imports no torch."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pd_cluster.errors import UnservedModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# `model_type` of transformers' encoders, nearly all of them relatives of BERT
_ENCODER = re.compile(r"bert|electra|mpnet|^(ernie|esm|fnet|funnel|luke|longformer|big_bird|nystromformer|xlnet|yoso)$")
_ONLY_DECODERS = "served are decoders that write text, and with --task embed those with vectors of the last token"
# End of an architecture's name -> what it is
_HEADS = {
    "ForMaskedLM": "an encoder",
    "ForSequenceClassification": "a classifier",
    "ForTokenClassification": "a classifier of tokens",
    "ForQuestionAnswering": "a finder of spans",
    "ForMultipleChoice": "a classifier",
    "ForImageClassification": "a classifier of images",
    "ForAudioClassification": "a classifier of audio",
    "ForObjectDetection": "a detector of objects",
    "ForSpeechSeq2Seq": "a recognizer of speech",
    "ForCTC": "a recognizer of speech",
    "RewardModel": "a reward model",
}


def check_kind(directory: Path, config: Mapping[str, Any]) -> None:
    """Raises UnservedModel, with what the model is, unless it may be a decoder."""
    what = _kind(config)
    if what:
        raise UnservedModel(f"{directory / 'config.json'}: {what}")


def _kind(config: Mapping[str, Any]) -> str:
    """What it is, if not a decoder with plain or known weights."""
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if not names:
        return "architecture none named is not served: `architectures` must name one"
    model_type = str(config.get("model_type") or "")
    named = f"{names[0]} (model_type {model_type or 'none'})"
    if config.get("is_encoder_decoder"):
        return f"{named} is an encoder-decoder: {_ONLY_DECODERS}"
    decodes = config.get("is_decoder") or names[0].endswith(("ForCausalLM", "LMHeadModel"))
    if _ENCODER.search(model_type) and not decodes:
        return f"{named} is an encoder: {_ONLY_DECODERS}"
    for end, what in _HEADS.items():
        if all(name.endswith(end) for name in names):
            return f"{named} is {what}: {_ONLY_DECODERS}"
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and "bits" in mlx:
        return f"quantization = {mlx!r}: weights quantized in MLX's form are not served; take the model they came from"
    return ""
