"""Decide between devices: pure state machines that the server and the simulator both run.

`handle(now, event)` returns instructions. What surrounds a machine (sockets and processes, or a
heap of virtual time) turns messages into events and instructions into messages; it decides nothing.

- `migrations`: Move running requests with their KV, and hand them from prefill to decode devices.
"""
