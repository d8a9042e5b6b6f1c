"""Carry schema-checked messages between processes of one host.

Packages from `cluster` up may import it; `cluster` does. It imports `memory` and `core`; it cannot
see `engine`.

- `lending`: Transfer of file descriptors of lent memory between workers.
- `messages`: Messages between server and worker, encoded by msgspec.
- `ranks`: Messages between the first rank of a tensor-parallel group and the others.
- `zmq`: ZeroMQ sockets over a private Unix directory.
"""
