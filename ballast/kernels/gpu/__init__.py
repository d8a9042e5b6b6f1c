"""Operations of a forward pass on a GPU: protocols, tables made on the host, choice of kernels.

The kernels are those of `triton`, or of `plain` where Triton is not installed.

- `attention`: Choice of the attention kernels.
- `attention_plan`: Work items of paged attention, planned on the host.
- `batch`: A job's sequences as GPU tensors at stable addresses; the twin of `PagedBatch`.
- `kv`: A model's KV cache on a GPU as kernels index it.
- `layer`: The protocol of a Llama-shaped layer's operations between its GEMMs.
- `lora`: Tables of which rows of a job use which adapter.
- `sampling`: Sampling from logits on a GPU, equal to `ballast.kernels.sampling.sample`.
- `staging`: Device tensors at stable addresses, filled through pinned host memory.
"""
