"""Carry messages and descriptors between processes of one host.

Every message is checked against its schema on receipt, and none is pickled. Packages from `cluster`
up may import it; `cluster` does. It imports `memory` and `core`, never `engine`.

- `decoding`: Decode messages; the error of one that does not follow its schema.
- `page_descriptors`: Send file descriptors of a device's memory to other workers.
- `sockets`: ZeroMQ sockets between server and worker, in a private Unix directory.
- `tensor_parallel`: Messages and connections between the ranks of a tensor-parallel group.
- `worker_messages`: Messages between the server and the worker of one device.
"""
