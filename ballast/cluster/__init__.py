"""Run one worker process per device, and route requests to them.

Packages from `server` and `sim` up may import it. It imports `engine`, `transport` and what is
below them.

- `combined_report`: Sum of several devices' reports.
- `controller`: The parts that serve one fleet on its devices, and their start and end.
- `device_record`: What is known of one device for routing.
- `device`: One device as the controller sees it: a worker that is replaced when it dies.
- `device_set`: The devices of one server, and which serve which model.
- `fairness`: Fair order of requests between API keys.
- `fitness`: Check of a fleet against this machine, before anything is loaded.
- `fleet_commands`: Operators' commands, carried out over the devices that they concern.
- `fleet_policy_runner`: Run the fleet policy while the server runs.
- `fleet`: The book of placement, shared by the live and the simulated controller.
- `flight`: Shared memory that records what a lane was running when its process died.
- `given_prefixes`: Prefixes that a device is believed to have cached, for routing.
- `lending`: Pairs of workers that may lend pages to each other now.
- `local`: One worker process: start, listen, watch, end.
- `logs`: JSON logs of all processes, written by a thread.
- `machine_choice`: The kind of machine of a device: CPU, GPU, or a group of ranks.
- `migrations`: Move running requests to another device with their KV.
- `open_requests`: Open requests of one device: queued, sent, answered.
- `outgoing_queue`: The ordered queue of a worker's outgoing messages.
- `output_stream`: The output stream of one client's requests, with backpressure.
- `peers`: Other workers of the host, as a worker sees them when lending.
- `pending_orders`: Operators' commands that a worker has not answered yet.
- `placing`: Initial placement, and each worker's configuration.
- `relocation`: Move running requests off a device, after their weights are elsewhere.
- `request_router`: Choice of the device of a request, and retry when a worker dies.
- `segments`: One host tier for all workers of a host.
- `spare`: A warmed-up spare worker process.
- `suspicion`: Requests suspected of killing workers, which run alone.
- `tensor_parallel`: One device served by a group of processes, its ranks.
- `worker_link`: The protocol of a worker process, as its controller uses it.
- `worker`: The worker process of one device.
"""
