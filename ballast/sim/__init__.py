"""Simulate devices and clusters: the same engine loop and policies in virtual time.

`bench` and the command line may import it. It imports `cluster`, `engine` and what is below them;
it cannot see `server`. Costs come from profiles (`profiles/*.toml`) or a calibration.

- `agenda`: Internal changes of the simulated world, in time order.
- `ahead`: An engine that schedules steps ahead of the device.
- `calibrate`: Measure this machine's job costs, link and loop overhead.
- `catalogue`: Sizes of public models by name.
- `cluster`: A cluster of simulated devices under one workload.
- `controller`: The controller in virtual time.
- `decoding`: The effect of decode steps without any other change.
- `derating`: Fit of the fraction of peak that a device reaches.
- `device`: `SimDevice`: one device in virtual time.
- `fitting`: Robust fits of the cost formulas to measurements.
- `fluid`: Max-min fair flows over a graph of links.
- `given`: Placement, links and lending of a simulated cluster, from files.
- `handover`: Roles of devices: prompts computed on some, decoded on others.
- `heap`: The event heap, in a total order.
- `in_service`: Costs of jobs and of the loop, derived from a story.
- `lanes`: Jobs of several lanes that share compute and memory bandwidth.
- `leap`: Many decode steps at once where nothing else changes.
- `leap_lanes`: Many decode steps at once over several lanes.
- `lending`: Page lending between simulated devices.
- `link`: The link between a simulated device and its host.
- `lives`: Reader of story files.
- `measure_link`: Measured bandwidth of this machine's link.
- `migration`: Migration of requests between simulated devices.
- `modelled`: Switches for the costs that a simulation counts.
- `pages`: The cost of mapping pages.
- `passes`: Forward passes through layers that come and go.
- `place`: Placement problems in JSON, and answers by each algorithm.
- `profile`: Device profiles: what jobs cost, read from TOML.
- `profile_tables`: The tables of a profile's file.
- `replay`: Replay of a story through loop and policies, compared entry by entry.
- `restore`: The events of a story, restored for its replay.
- `roofline`: Job costs from hardware peaks, derated.
- `rotor`: Rotating layers in virtual time.
- `runner`: The runner in virtual time: durations from cost formulas.
- `simulate`: Serve a workload on simulated devices.
- `spread`: Random variation of job durations.
- `standins`: Stand-in tokens that share prefixes as a story's digests do.
- `swapper`: KV swapping in virtual time.
- `toml_file`: TOML files with known keys, read and written.
- `topology`: Links between simulated hosts and devices.
- `world`: Several simulated devices in one order of time.
"""
