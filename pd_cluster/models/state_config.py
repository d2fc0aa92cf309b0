"""Which layers of a model keep a state, and its shape, from a config. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pd_cluster.models.spec import StateSpec

if TYPE_CHECKING:
    from pd_cluster.models.config_reader import ConfigReader

_KINDS = ("linear_attention", "full_attention")
_GATES = (None, "swish", "silu")  # one function


def read_state(reader: ConfigReader, num_layers: int) -> StateSpec | None:
    """The layers that `layer_types` calls linear attention; None: there are none.

    Raises UnservedModel for what is another model, StartupError for malformed settings.
    """
    has_gate, gate = reader.optional("attn_output_gate", True), reader.optional("output_gate_type", None)
    reader.refuse("attn_output_gate", not has_gate, "in this architecture the output of attention has a gate")
    reader.refuse("output_gate_type", gate not in _GATES, "only swish is")
    period, kinds = reader.integer("full_attention_interval", 4), reader.optional("layer_types", None)
    if kinds is None:
        kinds = [_KINDS[(layer + 1) % period == 0] for layer in range(num_layers)]
    known = isinstance(kinds, list) and all(kind in _KINDS for kind in kinds)
    reader.refuse("layer_types", not known, f"a list of {' and '.join(_KINDS)} is expected")
    reader.refuse("layer_types", len(kinds) != num_layers, f"there are {num_layers} layers")
    reader.refuse("layer_types", _KINDS[1] not in kinds, "a model without attention has no keys to count tokens by")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _KINDS[0])
    if not layers:
        return None
    key_heads, value_heads = (
        reader.integer("linear_num_key_heads", 16), reader.integer("linear_num_value_heads", 32)
    )  # fmt: skip
    shared = value_heads % key_heads == 0
    reader.refuse("linear_num_value_heads", not shared, f"they cannot share {key_heads} key heads")
    return StateSpec(
        layers,
        key_heads,
        value_heads,
        key_dim=reader.integer("linear_key_head_dim", 128),
        value_dim=reader.integer("linear_value_head_dim", 128),
        width=reader.integer("linear_conv_kernel_dim", 4, least=2),
    )
