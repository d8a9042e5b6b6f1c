"""Serve one fleet with workers on many hosts.

::

    server ── HostConnection ── (CURVE) ──> HostAgent, one a host   starts and ends workers
       │                                        │ child processes
       └──── HostedWorker ──── (CURVE) ──> worker, one a device   as on the server's own host

Ray places devices on hosts, and starts and restarts the agents; nothing else passes through it, and
only the process that speaks to Ray imports it. What a worker says to the server is what it says on
one host. Where every host is to answer HTTP, it has a relay beside its agent.

On each host:

- `agent`: Keep the workers of one host for a server that is elsewhere.
- `agent_process`: The entry point of an agent.
- `http_relay`: Accept HTTP clients, and carry their bytes to the server.
- `kv_exchange`: KV of requests that move between hosts.
- `kv_transfer`: Send and receive it, in chunks with checksums.
- `model_exchange`: Models that other hosts keep, and that are sent to them.
- `model_transfer`: Send and receive a model between two hosts, in chunks, checked.
- `relay_process`: The entry point of a relay.
- `server_inbox`: Servers that are named to an agent or relay on its standard input.
- `worker_forwarder`: Carry a kept worker's connection to its next server.

In the server:

- `host_choice`: Which host a device comes to.
- `host_connection`: A server's connection to the agent of one host.
- `hosted_worker`: A worker on another host, as `WorkerLink`.
- `hosted_workers`: The hosts of a server, and the workers of devices on them.
- `http_relays`: Keep a relay on each host connected with the server.
- `kv_paths`: Introduce agents to each other.
- `model_copies`: Which host sends a model to which.
- `ray_agents`: The agents on the nodes of a Ray cluster, in the process that speaks to Ray.
- `ray_cluster`: The hosts of a Ray cluster, through a process of its own.
- `ray_messages`: Messages between the server and the process that speaks to Ray.
- `ray_process`: That process.
- `ray_children`: A child process in a detached actor on a node, in that process.
- `ray_relays`: The relays on the nodes of a Ray cluster, in that process.
- `relay_connection`: The server's end of a relay.
"""
