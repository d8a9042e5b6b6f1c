"""Run tensor-parallel ranks: a rank's part of a model, and the exchange of tensors between ranks.

- `exchanges`: Exchange between ranks of one host: by gloo or shared memory.
- `model`: A rank of a fused model on CPU.
"""
