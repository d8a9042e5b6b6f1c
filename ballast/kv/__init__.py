"""Keep the paged KV cache of one model on one device.

Packages from `models` up may import it. It imports `memory` and `core`; it cannot see `weights`.
The unit is the block, of `block_tokens` tokens; blocks lie in slabs of whole pages.

- `backing`: Back slabs with pages of the pool, or borrowed ones.
- `blocks`: `KvCache`, one model's paged KV cache: allocate, cache, free and compact blocks.
- `books`: Counts of used, cached and free blocks, and of the pages they take.
- `compaction`: Plan of block moves that empty whole slabs; pure.
- `extents`: Addresses and pages of some blocks' bytes.
- `kv_stream`: How KV of rotating layers streams during jobs.
- `layered`: Layer-major KV, so that layers can share pages.
- `layout`: Block-major KV: strides and slabs.
- `pinned_spill`: The host copy, page-locked for a GPU.
- `prefix`: The prefix cache's index: hash chains of blocks.
- `slabs`: State of each slab's blocks, and the order in which blocks are allocated.
- `spilled`: The host copy of layer-major KV, and the pieces that a pass copies.
- `tables`: Block tables of sequences: match prefixes, grow, free.
"""
