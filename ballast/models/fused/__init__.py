"""The fast path on CPU, of decoders of Llama's kind: a job is one program that all threads run.

- `adapters`: LoRA of a fused model.
- `angles`: Cosines and sines of a job's positions.
- `experts`: A fused model's layers of experts.
- `library`: A fused model's GEMMs by PyTorch's kernels.
- `model`: The executor: tables made once, filled for each job, and its pass.
- `passes`: A forward pass as programs, and what is due between them.
- `tables`: Operation tables that are made once.
- `workspace`: Where a model's activations lie in its lane's workspace.
"""
