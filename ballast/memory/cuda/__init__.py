"""Memory of GPUs through the CUDA driver: pages, mappings, transfers, fences, graphs.

Packages that may import `ballast.memory` may import it. It imports `memory` and `core`. The driver
is called through one protocol (`calls`), so that a stand-in can take its place in tests.

- `allocator_cap`: A cap on PyTorch's caching allocator.
- `bandwidth`: Measured bandwidth of copies to, from and within a GPU.
- `calls`: The protocol of the driver calls that are used.
- `devices`: GPUs and MIG slices of this machine, by NVML.
- `driver`: The CUDA driver through `cuda-bindings`.
- `fences`: Fences made of CUDA events, and stalls that these measure.
- `graphs`: Capture and replay of CUDA graphs by PyTorch.
- `link`: The link to a GPU: copies on streams, one in each direction.
- `pages`: Physical memory: driver handles, created and mapped.
- `pinning`: Page-locked host memory for copies at full rate.
- `probe`: Discovery of GPUs in a child process.
- `tensor`: Tensors over GPU addresses, without a copy.
- `vm`: `Vm` of a GPU.
"""
