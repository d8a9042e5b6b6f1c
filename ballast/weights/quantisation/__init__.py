"""Quantised matrices in safetensors: which tensors of a checkpoint make up each, and its rows.

Used by `weights` alone. A matrix becomes one stored tensor with a `Packing`, so that the rest of
`weights` handles it as GGUF's blocks: in a panel form that keeps its bits, or dequantised.

- `config`: What config.json says about the quantisation; refusal of other methods by name.
- `formats`: Replaces the tensors of each format's matrices by one stored tensor each.
- `unpack`: Takes the rows of each format apart.
"""
