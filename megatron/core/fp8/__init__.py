"""FP8 training: the matrix products of decoder layers in 8 bits, everything else as before.

    settings   what may be asked for (no torch)          quantize   tensors to FP8, plain and by kernels
    formats    the two number formats, and the scale     gemm       products of quantized operands
    scaling    delayed scaling's state                   linear     a linear layer's forward and backward
    cublaslt   products by cuBLASLt itself               trials     whether a library computes them rightly
    mx_scales  scales of 1 x 32 as cuBLAS reads them     mx_check   whether a GPU computes what mxfp8 is
    experts, block_experts    the linear of all experts of a rank: with one scale a tensor, with scales of blocks
    grouped, grouped_blocks   quantize and gemm for them, of rows of several groups
    swiglu_mlp, expert_mlp    both linears of an MLP with SwiGLU between them: of a layer, of experts with one scale a tensor
    model      which linears of a model, the end of a step, checkpoints

The rule for every scale: the largest power of two that brings the largest magnitude inside the format. A power of two moves no mantissa
bit: how a tensor is cut (into tensor-parallel shards, blocks, micro batches) changes its scales, and with them only what underflows.
"""
