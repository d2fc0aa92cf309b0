"""The Triton kernels as one backend. Importing this needs triton."""

from __future__ import annotations

from pd_kernels.backends import Kernels
from pd_kernels.triton_activation import silu_and_mul
from pd_kernels.triton_attention import plan_attention
from pd_kernels.triton_blocks import copy_blocks
from pd_kernels.triton_matmul import FewRowsLinear
from pd_kernels.triton_norm import add_rms_norm, rms_norm
from pd_kernels.triton_replayable import TritonReplayable
from pd_kernels.triton_rotary import norm_rope_write
from pd_kernels.triton_sampling import argmax, draw

TRITON = Kernels(
    name="triton",
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    few_rows=FewRowsLinear.of,
    norm_rope_write=norm_rope_write,
    plan_attention=plan_attention,
    replayable=TritonReplayable.of,
    copy_blocks=copy_blocks,
    argmax=argmax,
    draw=draw,
)
