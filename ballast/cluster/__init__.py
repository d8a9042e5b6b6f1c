"""Run one worker process per device, and route requests to them.

Three subpackages hold the details: `worker` (the process of one device), `lending` (pages lent
between workers), `tensor_parallel` (one device served by several processes). The other modules are
the controller, which runs in the server's process, and code that server and workers share.

Packages from `server` and `sim` up may import it. It imports `engine`, `transport` and packages
below them.

- `combined_report`: Sum of several devices' reports.
- `controller`: The parts that serve one fleet on its devices, and their start and end.
- `device`: One device as the controller sees it: a worker that is replaced when it dies.
- `device_set`: The devices of one server, and which serve which model.
- `fleet_commands`: Operators' orders, which coroutines await, and those of the fleet policy.
- `handed_weights`: Weights on their way from a server to the one that takes its place.
- `hosts`: Workers on many hosts, which Ray places.
- `kept_models`: Models kept beyond the lives of the workers that loaded them.
- `lending`: Pages lent between the workers of one server.
- `logs`: JSON logs of all processes, written by a thread.
- `loop_timers`: Timers of the event loop, for the machines of `ballast.control`.
- `machine_check`: Check of a fleet against this machine, before anything is loaded.
- `machine_choice`: The kind of machine of a device: CPU, GPU, or a group of ranks.
- `output_stream`: The output stream of one client's requests, with backpressure.
- `placing`: Initial placement, and each worker's configuration.
- `kept_kv`: Scrub KV of models and keys that have gone; report on tiers.
- `kv_broker`: The host's KV store, in the server's process.
- `kv_client`: A worker's connection to it.
- `segment_broker`: Segments of weights shared between the workers of a host.
- `standby_devices`: Devices that serve while load asks for them.
- `tensor_parallel`: One device served by a group of processes, its ranks.
- `worker`: The process of one device, and the server's end of it.
"""
