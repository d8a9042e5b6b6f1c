"""Define the operations of a forward pass on a GPU: protocols, host-made tables, choice of kernels.

Used by `models.gpu` and `live`. The kernels are those of `triton`, or of `plain` if Triton is not
installed.

- `attention`: Choice of the attention kernels.
- `attention_plan`: Work items of paged attention, planned on the host.
- `batch`: A job's sequences as GPU tensors at stable addresses; the twin of `PagedBatch`.
- `kv`: A model's KV cache on a GPU as kernels index it.
- `layer`: The protocol of a Llama-shaped layer's operations between its GEMMs.
- `lora`: Tables of a job's rows by LoRA adapter.
- `sampling`: Sampling from logits on a GPU, equal to `ballast.kernels.sampling.sample`.
- `staging`: Device tensors at stable addresses, filled through pinned host memory.
"""
