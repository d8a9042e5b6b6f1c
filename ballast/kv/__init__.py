"""Keep the paged KV cache of one model on one device.

Packages from `models` up may import it. It imports `memory` and `core`; it cannot see `weights`.
The unit is the block, of `block_tokens` tokens; blocks lie in slabs of whole pages.

- `backing`: Back slabs with pages of the pool, within bounds, or borrowed ones.
- `blocks`: `KvCache`, one model's paged KV cache: allocate, free and compact block tables.
- `book`: State of a cache's blocks that the parts of `KvCache` share.
- `borrowed`: Blocks on borrowed pages.
- `counts`: Counts of used, cached and free blocks, and of the pages they take.
- `compaction`: Plan of block moves that empty whole slabs; pure.
- `directory`: Which tiers below the device have copies of which blocks; pure.
- `disk_file`: KV blocks in a file that outlives the server.
- `disk_tier`: Copies between the host tier and the disk, on a thread.
- `extents`: Addresses and pages of some blocks' bytes.
- `group_prefix`: Index of cached blocks of models whose layers are in groups.
- `host_blocks`: Host memory of staged blocks, and the copies of a pass.
- `host_store`: Blocks in the host's memory, found by name, for all devices of the host.
- `kv_stream`: How staged blocks stream during jobs.
- `layout`: Strides and slabs of KV.
- `pinned_blocks`: Host memory of staged blocks, page-locked for a GPU.
- `prefix`: The prefix cache's index: hash chains of blocks.
- `prefixes`: Find cached prefixes, and drop them.
- `slabs`: State of each slab's blocks, and the order in which blocks are allocated.
- `staged`: Numbers of staged blocks, and the slots that passes read them in.
- `staging`: Moves of used blocks between the device and the host, beside jobs.
- `stream_caches`: Sizes of SwiftCache's layer stream cache and regular cache.
- `survival`: How likely cached blocks are used again, by age.
- `tier_messages`: Messages between workers and the owner of the host's store.
- `tier_shelf`: The order in which a tier's blocks make way.
- `tiered_store`: The host store with a disk behind it.
- `windows`: Block tables of models whose layers are in groups; pure.
"""
