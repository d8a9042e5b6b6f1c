"""Carry messages between processes, and descriptors between those of one host.

Every message is checked against its schema on receipt, and none is pickled. Packages from `cluster`
up may import it; `cluster` does. It imports `memory` and `core`, never `engine`.

- `connection_watch`: What ZeroMQ reports of a socket's connections.
- `curve`: Encrypted, authenticated connections between hosts.
- `dead_peers`: TCP connections whose peer has vanished.
- `decoding`: Decode messages; the error of one that does not follow its schema.
- `host_messages`: Messages between the server and the agent of a host.
- `kv_door`: KV of other hosts, from a host's agent to its workers.
- `kv_messages`: Messages between the agents of two hosts, of which one sends KV.
- `page_descriptors`: Send file descriptors of a device's memory to other workers.
- `relay_messages`: Messages between the server and an HTTP relay of another host.
- `sockets`: ZeroMQ sockets between server and worker, in a private Unix directory.
- `tensor_parallel`: Messages and connections between the ranks of a tensor-parallel group.
- `weight_messages`: Messages between the agents of two hosts, of which one sends a model.
- `worker_messages`: Messages between the server and the worker of one device.
"""
