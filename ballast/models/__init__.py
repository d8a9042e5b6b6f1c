"""Execute models: any decoder that `transformers` knows, and a fused path of Llama-shaped families.

Packages from `engine` up may import it; `engine`, `cluster` and `bench` do. It imports `weights`,
`kv`, `kernels`, `memory`, `isolation` and `core`.

- `adapters`: LoRA in modules that `transformers` runs.
- `attention`: Our attention function, registered with `transformers`.
- `barriers`: Where a pass waits for layers that come and go (MIRAGE, 4.1).
- `collectives`: Collectives of ranks by `torch.distributed`.
- `device_adapters`: LoRA of a model on a GPU.
- `device_fused`: The fused path on a GPU.
- `device_parallel`: A tensor-parallel rank on a GPU.
- `fused`: The fused path on CPU: a job is one program of all threads.
- `fused_adapters`: LoRA of a fused model.
- `fused_angles`: Cosines and sines of a job's positions.
- `fused_experts`: A fused model's layers of experts.
- `fused_tables`: Operation tables of a fused model that are made once.
- `fused_workspace`: Where a fused model's activations lie in its lane's workspace.
- `gloo`: Collectives on CPU by gloo.
- `grammar`: Grammar-constrained decoding by llguidance: token masks from tokens so far.
- `graphs`: CUDA graphs of decode steps, by bucket.
- `library`: A fused model's GEMMs by PyTorch's kernels.
- `linears`: Linear modules replaced by packed ones.
- `module`: The `transformers` module of a model, its parameters views of pool memory.
- `nccl`: Collectives on GPUs by NCCL.
- `on_cpu`: The executor of a model on CPU.
- `on_device`: Executors on a GPU: their common part, and any `transformers` decoder.
- `parallel`: A tensor-parallel rank of a fused model.
- `passes`: A forward pass as programs, and what is due between them.
- `profile_run`: Activation memory of a model's jobs, measured when it is loaded.
- `recording`: Forward passes recorded in pieces, with stops between them.
- `served`: What all executors share: logits, then sampling.
- `shared`: Collectives of ranks on one host over shared memory.
- `tokenizer_trial`: A trial load of a tokenizer in a child process.
- `transformers`: The executor of any decoder that `transformers` knows, on CPU.
"""
