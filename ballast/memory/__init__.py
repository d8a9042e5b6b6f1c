"""Own the pages of a device: ownership, virtual-memory mappings, and transfers over links.

`kernels` and everything above may import it. It imports `core` only, and cannot see `policy`: it
does what it is asked and chooses nothing. Modules `cuda_*`, `vm_cuda` and `link_cuda` are of GPUs.

- `arena`: Pages set aside for activations, so that these count against the budget.
- `book`: Which page is mapped where; every call of a vm is checked against it.
- `borrow`: The borrower's side of lending: pages of other devices in ranges of this one.
- `copies`: Copies between addresses, at once or in batches for a link.
- `cuda_calls`: The protocol of the CUDA driver calls that are used.
- `cuda_cap`: A cap on PyTorch's caching allocator on a GPU.
- `cuda_devices`: GPUs and MIG slices of this machine, by NVML.
- `cuda_driver`: The CUDA driver through `cuda-bindings`.
- `cuda_events`: Fences made of CUDA events.
- `cuda_gauge`: Measured bandwidth of copies to, from and within a GPU.
- `cuda_graphs`: Capture and replay of CUDA graphs by PyTorch.
- `cuda_pages`: Physical GPU memory: driver handles, created and mapped.
- `cuda_pins`: Page-locked host memory for copies at full rate.
- `cuda_probe`: Discovery of GPUs in a child process.
- `cuda_tensor`: Tensors over GPU addresses, without a copy.
- `host_memory`: Installed and available memory of this machine.
- `huge_pages`: Transparent huge pages of shared memory: are they allowed, ask for them.
- `ledger`: Owner, holders and promises of each page.
- `lend`: The lender's side of lending: leases, recalls and deadlines.
- `link_cuda`: The link to a GPU: copies on streams, one in each direction.
- `link_group`: The link of a tensor-parallel group.
- `memfd`: A device's memory as a sealed memfd.
- `peer_reader`: Reads of another process's pages, for requests that migrate.
- `pool`: All pages of one device: allocate, free, promise, fence.
- `range`: A reserved virtual address range, backed by pages where needed.
- `reserve`: A background thread that populates free pages ahead of need.
- `runs`: A set of page numbers kept as runs of neighbours.
- `share`: Transfer of pages to another process, by file descriptor.
- `syscalls`: Linux memory system calls by ctypes.
- `tensor`: Tensors and arrays over raw addresses, without a copy.
- `transfer`: The link protocol, and `HostLink`: paced background copies on CPU.
- `turns`: Start-time fair queueing of those who share a link (Goyal et al., 1996).
- `vm`: The `Vm` protocol: reserve, map, unmap, export, import, fence.
- `vm_cuda`: `Vm` of a GPU.
- `vm_group`: `Vm` of a tensor-parallel group: one page is one page on every rank.
- `vm_memfd`: `Vm` of the CPU backend: offsets in one memfd.
- `vm_null`: `Vm` without memory, for virtual time and tests: checks every call.
"""
