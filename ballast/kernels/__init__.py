"""Compute the operations of a forward pass: kernels for CPU (Numba) and GPU (Triton).

Packages from `weights` up may import it; `weights`, `models`, `engine` and `cluster` do. It imports
`memory` and `core`. A module `X_code` has the compiled part of module `X`.

- `attention`: The protocol of paged attention, and the parameters of one layer's attention.
- `attention_code`: Compiled part of paged attention: the work of one thread.
- `attention_intrinsics`: Loops over vectors in registers, for the steps of attention.
- `attention_steps_code`: Compiled steps of attention: scores, softmax, values, merging.
- `attention_table`: Fields of the table that attention's kernels read; sizes of their memory.
- `binding_code`: Compiled part of `team.bind`: pins a thread to one CPU.
- `choice_file`: The cache file of the choices between linear kernels.
- `choices`: Number of rows from which oneDNN multiplies a matrix: measured once per machine.
- `compile_beside`: A process that compiles kernels beside a worker's, at the first start.
- `compiled`: Compiles kernels, and keeps them on disk where that can be written.
- `contest`: Time our linear kernel against oneDNN's on one matrix.
- `experts`: A mixture's router and experts: tables of the kernels in `experts_code`.
- `experts_code`: Compiled router, and the sum of a row's experts.
- `gpu`: Package: operations on a GPU: protocols, host-made tables, choice of kernels.
- `intrinsics`: Numba intrinsics: addresses as arrays, atomics, bfloat16, calls by address.
- `kv_int8_code`: Compiled code that rounds keys and values to int8.
- `layer`: Operation tables of the kernels in `layer_code`.
- `layer_code`: Compiled embedding, norms, rotary position, and KV writes.
- `linear`: Linear layers on CPU with panel-packed weights.
- `linear_code`: Compiled part of linear layers.
- `lora`: Batched LoRA on CPU, one adapter per row.
- `lora_code`: Compiled part of LoRA.
- `meeting`: All-reduce and barrier of processes over shared memory.
- `meeting_code`: Compiled part of the barrier.
- `onednn`: Linear layers by oneDNN on packed weights in the pool's memory.
- `paged_attention`: Paged attention on CPU for decodes and prefill chunks together.
- `packed_delta`: An adapter's differences in few bits, on CPU.
- `panel_forms`: Forms of quantised panels: how blocks of weights stay packed.
- `plain`: Package: operations as plain PyTorch, a reference on any device.
- `program_code`: Compiled part of programs: operations separated by barriers.
- `quantised`: Pack rows of quantised matrices into panels; tables of their kernels.
- `quantised_dots_code`: Compiled part of those that multiply activations in int8.
- `quantised_code`: Compiled part of quantised linear layers.
- `sampling`: The next token as a function of logits, parameters, seed and position.
- `stream_copy`: Copies of weights that bypass the CPU's caches.
- `stream_copy_code`: Compiled part of such copies: non-temporal stores.
- `team`: Compiled kernels on PyTorch's OpenMP threads.
- `triton`: Package: Triton kernels for GPUs.
- `vector_code`: LLVM code for vectors of float32, and how many lanes they have.
- `workspace`: A grow-only activation buffer of a lane with stable addresses.
"""

import os

# Triton up to 3.9 fuses multiplications with additions by default, 3.10 does not: results of one
# kernel would differ between versions. Must be set before Triton compiles any kernel.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
