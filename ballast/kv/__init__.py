"""Keep the paged KV cache of one model on one device.

Packages from `models` up may import it. It imports `memory` and `core`; it cannot see `weights`.
The unit is the block, of `block_tokens` tokens; blocks lie in slabs of whole pages.

- `backing`: Which slabs are backed by pages, and whose.
- `blocks`: `KvCache`: blocks, their users, and the pages beneath.
- `books`: Which blocks are used, cached or free, and the pages that takes.
- `compaction`: Which blocks to move so that whole slabs become empty; a pure plan.
- `event_swapper`: KV swapping on a GPU, ordered by CUDA events.
- `extents`: Addresses and pages of some blocks' bytes.
- `layered`: Layer-major KV, so that layers can share pages.
- `layout`: Block-major KV: strides and slabs.
- `link_swapper`: KV swapping on CPU, over the link.
- `prefix`: The prefix cache's index: hash chains of blocks.
- `slabs`: Use of each slab's blocks, and which block to take next.
- `spilled`: The host copy of layer-major KV, and what a pass copies.
- `swapper`: The protocol of swapping rotating layers' KV to the host.
- `tables`: Block tables of sequences: begin, grow, end.
"""
