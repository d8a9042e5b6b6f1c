"""Run the process of one device, its worker.

A worker has two threads of its own: the main thread owns the socket to the server, the device's
thread builds the device and runs its loop. They meet in two queues, the device's inbox and the
outgoing queue, so that the loop never waits for the socket. The server's end, which starts the
process, watches it and ends it, is here as well. Which requests a worker gets is decided elsewhere.

Both ends:

- `early_process`: A worker's process that starts before its server knows what it is for.
- `flight_recorder`: Shared memory that records which requests are in the job in flight.
- `process_names`: Names of worker processes, as operators see them.
- `renewals`: Connect a worker with the next server, by word of its host's agent.

In the worker:

- `device_thread`: Build the device and run its loop, on a thread of its own.
- `outgoing_queue`: Messages and outputs to be sent, from all threads, in order.
- `process`: The entry point of the process.
- `server_orders`: What the server has ordered and is not done, ended when the server is gone.
- `status_reporter`: Send the device's state and heartbeats.
- `worker`: Pass messages between the socket and the device.

In the server:

- `liveness_watch`: Detect that a worker's process hangs.
- `local_process`: A worker's process on this host: start it, end it.
- `local_worker`: A worker on the server's host.
- `spare_worker`: A worker process prepared to take the place of one that dies.
- `supervised_worker`: Exchange messages with a worker's process and watch it, wherever it runs.
- `worker_link`: The protocol of a worker as its controller uses it.
"""
