"""Simulate devices and clusters: the same engine loop and policies in virtual time.

`bench` and the command line may import it. It imports `cluster`, `engine` and what is below them;
it cannot see `server`. Costs come from profiles (`profiles/*.toml`) or a calibration.

- `abbreviations`: Actions of older stories, in place of the plans that policies state today.
- `calibrate`: Measure this machine's job costs, link and loop overhead.
- `change_queue`: Internal changes of a simulated world (ends of flows, of layers) in time order.
- `cluster_files`: Placement, links and operators' orders of a simulated cluster, from files.
- `cluster`: A cluster of simulated devices under one workload.
- `controller`: The controller in virtual time.
- `cost_switches`: Switch single costs of a simulation on or off.
- `decoding`: Advance a batch through pure decode steps without turns of the loop.
- `device`: `SimDevice`: one device in virtual time.
- `distorted_traffic`: Estimates of traffic that are taken away or wrong, for ablations.
- `event_heap`: The event heap, in a total order.
- `fitting`: Robust non-negative fits to measured seconds.
- `fleet_device`: The controller's record of a simulated device.
- `fluid`: Max-min fair flows over a graph of links.
- `frozen_heap`: Keep full garbage collections out of live measurements.
- `in_place`: Passes that read weights in host memory, over the shared link.
- `job_spread`: Random variation of job durations.
- `known_traffic`: Traffic whose future is known: oracle estimates.
- `lanes`: Jobs of several lanes that share compute and memory bandwidth.
- `kv_tiers`: KV of simulated devices in a virtual host tier.
- `layer_passes`: Forward passes that wait for layers in transfer.
- `layer_stream`: Layers that stream, in virtual time.
- `leap_lanes`: Skip over decode steps of models on several lanes.
- `leap`: Skip over decode steps while nothing else can change.
- `lending`: Page lending between simulated devices.
- `link`: The link between a simulated device and its host.
- `machine_profile`: Costs of a machine, for a simulated device.
- `measure_copies`: By how much jobs are slower beside copies.
- `measure_link`: Measured bandwidth of this machine's link.
- `migration`: Migration of requests between simulated devices.
- `model_catalogue`: Sizes of public models by name.
- `no_bytes`: Stand-ins for memory and host tier that hold no bytes.
- `operator_orders`: Orders of operators in virtual time.
- `page_costs`: Charge a simulated loop for mapping and unmapping pages.
- `peer_costs`: Costs between devices, and of workers' starts.
- `placement_answers`: Solve placement problems given in JSON (`ballast place`).
- `roles`: Roles of devices, and devices as replicas for a request.
- `profile_tables`: The tables of a profile's file.
- `profile`: Device profiles, which hold the costs of jobs, read from TOML.
- `replay`: Replay of a story through loop and policies, compared entry by entry.
- `roofline`: Job costs from hardware peaks, derated.
- `runner`: The runner in virtual time: durations from cost formulas.
- `simulate`: Serve a workload on simulated devices.
- `slices`: MIG slices of devices, equal or not.
- `stand_in_tokens`: Generate token ids for the block digests of a story.
- `steps_ahead`: Simulate an engine that schedules steps ahead of the device.
- `story_costs`: Costs of jobs and of the loop, derived from a story.
- `story_events`: The events of a story, restored for its replay.
- `story_reader`: Reader of story files.
- `toml_file`: TOML files with known keys, read and written.
- `topology`: Links between simulated hosts and devices.
- `wide_stream`: Weights that come over several devices' links at once (Prism, 5.3).
- `world`: Run several simulated devices in one order of time.
"""
