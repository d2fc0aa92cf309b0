"""Triton's row in the table of kernels: all kernels except attention. The import needs the package triton."""

from __future__ import annotations

import logging
from dataclasses import replace

from pd_kernels.backends import TORCH, Kernels, ProposeGated, no_gated_products
from pd_kernels.triton_activation import (
    sigmoid_and_mul,
    sigmoid_and_mul_quantized,
    silu_and_mul,
    silu_and_mul_quantized,
)
from pd_kernels.triton_biased_experts import make_biased_mix, needs_room
from pd_kernels.triton_block_copy import copy_blocks
from pd_kernels.triton_experts import experts
from pd_kernels.triton_logprobs import logprobs
from pd_kernels.triton_lora import expand, shrink
from pd_kernels.triton_matmul import FewRowsLinear
from pd_kernels.triton_norm import add_rms_norm, add_rms_norm_quantized, add_rms_norm_twice, rms_norm
from pd_kernels.triton_penalties import penalize
from pd_kernels.triton_quantize import quantize
from pd_kernels.triton_quantized_product import quantized_product
from pd_kernels.triton_rotary import norm_rope_write
from pd_kernels.triton_routing import route
from pd_kernels.triton_sampling import argmax, best, draw
from pd_kernels.triton_state import TritonState, gated_norm_quantized
from pd_kernels.weight_forms import MXFP4

logger = logging.getLogger(__name__)


def _gated_products() -> ProposeGated:
    try:
        from pd_kernels.gluon_gated import propose_gated
    except Exception as error:  # Gluon is experimental: in another version its decorators may raise anything
        logger.warning("no fused SwiGLU: %s", error)
        return no_gated_products
    return propose_gated


TRITON = Kernels(
    name="triton",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    few_rows=FewRowsLinear.of,
    gated_products=_gated_products(),
    quantize=quantize,
    add_rms_norm_quantized=add_rms_norm_quantized,
    add_rms_norm_twice=add_rms_norm_twice,
    silu_and_mul_quantized=silu_and_mul_quantized,
    sigmoid_and_mul=sigmoid_and_mul,
    sigmoid_and_mul_quantized=sigmoid_and_mul_quantized,
    gated_norm_quantized=gated_norm_quantized,
    quantized_product=quantized_product,
    shrink=shrink,
    expand=expand,
    norm_rope_write=norm_rope_write,
    route=route,
    experts=experts,
    captures_experts=True,
    needs_room=needs_room,
    biased_experts=make_biased_mix,
    captured_forms=frozenset({MXFP4.name}),
    state=TritonState(),
    captures_state=True,
    copy_blocks=copy_blocks,
    argmax=argmax,
    draw=draw,
    best=best,
    logprobs=logprobs,
    penalize=penalize,
)
WITHOUT_FLOAT8 = replace(
    TRITON,
    quantize=TORCH.quantize,
    add_rms_norm_quantized=TORCH.add_rms_norm_quantized,
    add_rms_norm_twice=TORCH.add_rms_norm_twice,
    silu_and_mul_quantized=TORCH.silu_and_mul_quantized,
    sigmoid_and_mul_quantized=TORCH.sigmoid_and_mul_quantized,
    gated_norm_quantized=TORCH.gated_norm_quantized,
    quantized_product=TORCH.quantized_product,
)
"""For GPUs before Ada (8.9): Triton has no float8 (e4m3) there."""
