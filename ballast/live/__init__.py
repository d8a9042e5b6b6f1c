"""Run a device's engine on a machine: its clock, its memory, and threads that run jobs.

Packages from `cluster` up may import it. It imports `engine` and what is below; it cannot see
`transport`. The simulator has counterparts of the runner, the inbox and the link in virtual time.

- `command_executor`: Carry out operators' commands beside the loop: load a model, then let it join.
- `cpu_machine`: The parts of a live CPU device: memory, link, executors.
- `cuda_machine`: The parts of a live GPU.
- `cuda_reads`: What a GPU's passes read in host memory, and HybridGEMM's share.
- `cuda_runner`: Lanes as GPU streams, each with its host thread.
- `cuda_streams`: Streams of a GPU's lanes, with shares of its multiprocessors.
- `device`: `LiveDevice`: memory, host tier, models and loop behind five methods.
- `event_stream`: Layers that stream on a GPU, ordered by CUDA events.
- `grammar_cache`: Bookkeeping of grammars that are needed, compiled, or queued.
- `grammar_compiler`: Compile grammars on a thread beside the lanes.
- `host_stream`: Layers that stream on a CPU device, over the host link.
- `in_place_reads`: What passes read where it lies: weights on the host, KV on borrowed pages.
- `peer_slots`: Copies of borrowed KV that passes read in slots, for comparisons.
- `hosted_models`: The models of a device in its host tier: loaded, refused, unloaded.
- `inbox`: The live clock and the inbox of events.
- `kv_tiers`: Copies of KV between a CPU device and the host tier.
- `machine`: The protocol of a machine: memory, link and executors of one device.
- `never_run`: GPU features that have been tested with stand-ins only.
- `own_store`: A KV store of this process alone.
- `paced_reads`: Passes that read elsewhere in place wait for a paced link.
- `runner`: The executor protocol, and lanes as CPU threads.
- `warmup`: Warm-up of a spare worker process.
"""
