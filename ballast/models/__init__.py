"""Execute models: any decoder that `transformers` knows, and a fused path of Llama-shaped families.

Packages from `engine` up may import it; `engine`, `cluster` and `bench` do. It imports `weights`,
`kv`, `kernels`, `memory`, `isolation` and `core`.

- `adapters`: LoRA in modules that `transformers` runs.
- `attention`: Our attention function, registered with `transformers`.
- `barriers`: Where a pass waits for layers that come and go (MIRAGE, 4.1).
- `executor`: The common part of all executors: logits, then sampling.
- `fused`: Package: the fast path on CPU.
- `gpu`: Package: executors on GPUs.
- `grammar`: Grammar-constrained decoding by llguidance: token masks from tokens so far.
- `linears`: Linear modules replaced by packed ones.
- `module`: The `transformers` module of a model, its parameters views of pool memory.
- `on_cpu`: The executor of a model on CPU.
- `parallel`: Package: tensor-parallel ranks, and the exchange of tensors between them.
- `profile_run`: Activation memory of a model's jobs, measured when it is loaded.
- `tokenizer_trial`: A trial load of a tokenizer in a child process.
- `transformers`: The executor of any decoder that `transformers` knows, on CPU.
"""
