"""Run Llama-like decoders on CPU by the fast path: a job is one program that all threads run.

- `adapters`: LoRA of a fused model.
- `angles`: Cosines and sines of a job's positions.
- `experts`: A fused model's layers of experts.
- `linears`: Tables of a fused model's matrices.
- `library`: A fused model's GEMMs by PyTorch's kernels.
- `model`: The executor: tables made once, filled for each job, and its pass.
- `passes`: A forward pass as programs of operations, with stops between them.
- `tables`: Operation tables that are made once.
- `workspace`: Addresses of a model's activations in its lane's workspace.
"""
