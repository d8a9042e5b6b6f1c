"""Simulate devices and clusters: the same engine loop and policies in virtual time.

`bench` and the command line may import it. It imports `cluster`, `engine` and what is below them;
it cannot see `server`. Costs come from profiles (`profiles/*.toml`) or a calibration.

- `calibrate`: Measure this machine's job costs, link and loop overhead.
- `change_queue`: Internal changes of the simulated world, in time order.
- `cluster_files`: Placement, links and lending of a simulated cluster, from files.
- `cluster`: A cluster of simulated devices under one workload.
- `controller`: The controller in virtual time.
- `cost_switches`: Switches for the costs that a simulation counts.
- `decoding`: The effect of decode steps without any other change.
- `derating`: Fit of the fraction of peak that a device reaches.
- `device`: `SimDevice`: one device in virtual time.
- `event_heap`: The event heap, in a total order.
- `fitting`: Robust fits of the cost formulas to measurements.
- `fluid`: Max-min fair flows over a graph of links.
- `job_spread`: Random variation of job durations.
- `lanes`: Jobs of several lanes that share compute and memory bandwidth.
- `layer_passes`: Forward passes through layers that come and go.
- `leap_lanes`: Many decode steps at once over several lanes.
- `leap`: Many decode steps at once where nothing else changes.
- `lending`: Page lending between simulated devices.
- `link`: The link between a simulated device and its host.
- `measure_link`: Measured bandwidth of this machine's link.
- `migration`: Migration of requests between simulated devices.
- `model_catalogue`: Sizes of public models by name.
- `page_costs`: The cost of mapping pages.
- `placement_answers`: Placement problems in JSON, and answers by each algorithm.
- `prefill_handover`: Roles of devices: prompts computed on some, decoded on others.
- `profile_tables`: The tables of a profile's file.
- `profile`: Device profiles: what jobs cost, read from TOML.
- `replay`: Replay of a story through loop and policies, compared entry by entry.
- `roofline`: Job costs from hardware peaks, derated.
- `rotor`: Rotating layers in virtual time.
- `runner`: The runner in virtual time: durations from cost formulas.
- `simulate`: Serve a workload on simulated devices.
- `stand_in_tokens`: Stand-in tokens that share prefixes as a story's digests do.
- `steps_ahead`: An engine that schedules steps ahead of the device.
- `story_costs`: Costs of jobs and of the loop, derived from a story.
- `story_events`: The events of a story, restored for its replay.
- `story_reader`: Reader of story files.
- `swapper`: KV swapping in virtual time.
- `toml_file`: TOML files with known keys, read and written.
- `topology`: Links between simulated hosts and devices.
- `world`: Several simulated devices in one order of time.
"""
