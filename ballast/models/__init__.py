"""Execute models: any decoder that `transformers` supports, and a fast path for Llama-like
families.

Packages from `engine` up may import it; `engine`, `cluster` and `bench` do. It imports `weights`,
`kv`, `kernels`, `memory`, `isolation` and `core`.

- `adapters`: LoRA in modules that `transformers` runs.
- `attention`: Our paged attention, registered with `transformers`.
- `barriers`: The protocol by which a pass waits for layers that are still loading (MIRAGE, 4.1).
- `divergence`: Measure how far a model's outputs are from another's that it stands for.
- `encoder`: The executor of encoders of BERT's kind: embeddings, and scores of pairs.
- `executor`: The common part of all executors: logits, then sampling.
- `fused`: Package: the fast path on CPU.
- `gpu`: Package: executors on GPUs.
- `grammar`: Grammar-constrained decoding by llguidance: token masks from tokens so far.
- `layer_arrays`: Divide a block into the KV of layers that keep different KV.
- `linears`: Linear modules that compute from packed weights.
- `module`: The `transformers` module of a model, its parameters views of pool memory.
- `on_cpu`: Choose the executor of a model on CPU.
- `packed_experts`: Experts of a module, computed from quantised panels.
- `parallel`: Package: tensor-parallel ranks, and the exchange of tensors between them.
- `pooled_states`: Recurrent states of sequences, in the blocks of their KV.
- `profile_run`: Measure the activation memory of a model's jobs when it is loaded.
- `routed_experts`: Which experts the layers of a module route rows to.
- `tokenizer_trial`: Load a tokenizer in a limited child process on trial.
- `transformers`: The executor of any decoder that `transformers` supports, on CPU.
"""
