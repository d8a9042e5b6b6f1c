"""Own the pages of a device: ownership, virtual-memory mappings, and transfers over links.

`kernels` and everything above may import it. It imports `core` only, and cannot see `policy`: it
carries out and chooses nothing.

- `address_space`: Reserved addresses, and second mappings of shared memory.
- `arena`: Pages set aside for activations, so that these count against the budget.
- `copies`: Copies between addresses, at once or in batches for a link.
- `cuda`: Package: memory of GPUs through the CUDA driver.
- `free_pages`: The free pages of a pool, and which pages have physical memory.
- `group`: Package: memory of a tensor-parallel group as that of one device.
- `control_groups`: Control groups that limit this process: its own and all above it.
- `cell_book`: Counts which cells of the KV host tier are free.
- `host_cells`: Cells of a memfd that all workers map: memory of the KV host tier.
- `host_memory`: Installed and available memory of this machine.
- `huge_pages`: Transparent huge pages of shared memory: check and request them.
- `ledger`: Owner and holders of each page, and what is reserved for each owner.
- `lending`: Package: pages lent to other devices, and borrowed from them.
- `mapping_table`: Pages by range and index; every call of a vm is checked against it.
- `memfd`: A device's memory as a sealed memfd.
- `page_holders`: Which owners use pages of others.
- `page_reservations`: Pages promised or guaranteed to owners before they allocate them.
- `page_uses`: Numbers of own and attached pages, and by how many indices each is mapped.
- `memfd_pages`: Pages of a memfd in a window and in ranges, with their page tables.
- `peer_reader`: Reads of another process's pages, for requests that migrate.
- `pool`: All pages of one device: allocate, free, promise, fence.
- `range`: A reserved virtual address range, backed by pages where needed.
- `range_indices`: What is mapped at each index of a range.
- `reserve`: A background thread that populates free pages ahead of need.
- `runs`: A set of page numbers kept as runs of neighbours.
- `share`: Send pages to another process, as file descriptors.
- `shared_pace`: One paced host link of several processes.
- `syscalls`: Linux memory system calls by ctypes.
- `tensor`: Tensors and arrays over raw addresses, without a copy.
- `transfer`: The link protocol, and `HostLink`: paced background copies on CPU.
- `fair_queueing`: Start-time fair queueing of streams that share a link (Goyal et al., 1996).
- `vm`: The `Vm` protocol: reserve, map, unmap, export, import, fence.
- `vm_memfd`: `Vm` of the CPU backend: offsets in one memfd.
- `vm_null`: `Vm` without memory, for virtual time and tests: checks every call.
"""
