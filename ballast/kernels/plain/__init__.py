"""Implement GPU operations as plain PyTorch: references for tests, and the fallback without Triton.

- `attention`: Paged attention.
- `layer`: `LayerKernels` in PyTorch's operations.
- `lora`: LoRA.
"""
