"""Execute models on GPUs.

- `adapters`: LoRA of a model.
- `executor`: The common part of executors, and the one of any `transformers` decoder.
- `fused`: The fast path for Llama-shaped families.
- `graphs`: CUDA graphs of decode steps, by bucket.
- `recording`: Forward passes recorded in pieces, with stops between them.
"""
