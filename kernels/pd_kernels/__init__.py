"""Kernels of the forward pass, each beside a plain torch function that defines it.

reference       the definitions: readable, slow, correct in any dtype
torch_ops       the same on any device with library calls, tuned for CPU
sampling        from logits to tokens
triton_*        the same in Triton for GPUs, one family a file; `python -m benchmarks kernels` times them
gluon_*         the same in Gluon for Hopper GPUs
gemm_selection  which library algorithm multiplies many rows, by measurement; few rows are `triton_matmul`'s
values          what kernels take and return
attention       what a backend of attention is asked; `torch_attention`, `triton_attention`, `hopper_attention` are some
attention_backends  their order, and which of them serves a group of layers
backends        the table of the other functions that an implementation fills, and torch's row
selection       which row a device runs
"""
