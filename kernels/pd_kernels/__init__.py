"""Kernels of the forward pass. A plain torch function defines the result of each kernel.

reference           the definitions: readable, slow, correct in any dtype
torch_ops           torch library calls for any device, tuned for CPU
sampling            the choice of tokens from logits: definitions, and torch functions tuned for CPU
triton_*            Triton kernels for GPUs, one family a file; `python -m benchmarks kernels` times them
gluon_*             Gluon kernels for Hopper GPUs
gemm_selection      measures which library algorithm multiplies many rows fastest; `triton_matmul` multiplies few rows
state               the interface of layers with states instead of keys and values: `torch_state`, `triton_state`
values              values that kernels take and return; `quantized`: weights and rows in float8
attention           the interface of attention backends
*_attention         the attention backends: `torch_attention`, `triton_attention`, `hopper_attention`
attention_backends  the order of the attention backends, and the choice of one for a group of layers
backends            the table of all other kernels, one row per implementation, and torch's row
selection           the choice of a row for a device
"""
