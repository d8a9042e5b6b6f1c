"""Run one worker process per device, and route requests to them.

Packages from `server` and `sim` up may import it. It imports `engine`, `transport` and what is
below them.

- `controller`: `Controller`: routes requests and commands to the devices of one server.
- `device`: One device as the controller sees it: a worker that is replaced when it dies.
- `devices`: The set of a server's devices, and which serve which model.
- `fairness`: Fair order of requests between API keys.
- `fitness`: Check of a fleet against this machine, before anything is loaded.
- `fleet`: The book of placement, shared by the live and the simulated controller.
- `flight`: Shared memory that records what a lane was running when its process died.
- `following`: Run the fleet policy while the server runs.
- `lending`: Pairs of workers that may lend pages to each other now.
- `local`: One worker process: start, listen, watch, end.
- `logs`: JSON logs of all processes, written by a thread.
- `machines`: The kind of machine of a device: CPU, GPU, or a group of ranks.
- `member`: What one tensor-parallel rank has of its own, on CPU.
- `member_cuda`: A GPU as one tensor-parallel rank.
- `members`: The kind of member of a rank: CPU or GPU.
- `migrations`: Move running requests to another device with their KV.
- `orders`: Operators' commands that a worker has not answered yet.
- `outgoing`: The ordered queue of a worker's outgoing messages.
- `outlet`: The output stream of one client's requests, with backpressure.
- `peers`: Other workers of the host, as a worker sees them when lending.
- `placing`: Initial placement, and each worker's configuration.
- `prefixes`: Prefixes that a device is believed to have cached, for routing.
- `rank`: The process of a further tensor-parallel rank.
- `ranks`: A tensor-parallel group as one machine.
- `remote`: A further rank as the first one sees it: its process and connections.
- `remote_vm`: The `Vm` of another rank, by messages.
- `requests`: Open requests of one device: queued, sent, answered.
- `rotors`: Rotating layers of a tensor-parallel group.
- `routing`: Choice of the device of a request, and retry when a worker dies.
- `segments`: One host tier for all workers of a host.
- `spare`: A warmed-up spare worker process.
- `standing`: What is known of one device for routing.
- `suspicion`: Requests suspected of killing workers, which run alone.
- `together`: Sum of several devices' reports.
- `worker`: The worker process of one device.
- `worker_link`: The protocol of a worker process, as its controller uses it.
"""
