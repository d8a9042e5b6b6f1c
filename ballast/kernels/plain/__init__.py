"""Operations in PyTorch's own: references for tests, on any device, and used without Triton.

- `attention`: Paged attention.
- `layer`: `LayerKernels` in PyTorch's operations.
- `lora`: LoRA.
"""
