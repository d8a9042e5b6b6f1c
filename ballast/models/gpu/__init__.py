"""Executors of models on GPUs.

- `adapters`: LoRA of a model.
- `executor`: The common part of executors, and the one of any `transformers` decoder.
- `fused`: The fused path.
- `graphs`: CUDA graphs of decode steps, by bucket.
- `parallel`: A tensor-parallel rank.
- `recording`: Forward passes recorded in pieces, with stops between them.
"""
