"""Implement the protocols of `ballast.kernels.gpu` by Triton kernels.

A module `X_code` has the kernels of module `X`, which launches them.

- `attention`: Paged attention: launch and buffers.
- `attention_code`: Kernels of paged attention.
- `gemm`: The batch-invariant GEMM.
- `gemm_code`: Kernels of GEMMs with one order of summation for all tile shapes.
- `hybrid_gemm`: HybridGEMM (C2CServe): products by weights in host memory.
- `layer`: `LayerKernels` by Triton.
- `layer_code`: Kernels of a layer's operations between its GEMMs.
- `lora`: LoRA by Triton.
- `lora_code`: Kernels of LoRA's shrink and expand.
- `row_code`: A GEMV with fused prologue and epilogue.
- `sampling`: Gumbel-max sampling by Triton.
- `sampling_code`: Kernel of Gumbel-max.
"""
