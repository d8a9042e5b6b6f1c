"""Decide between devices: the controller's state, without sockets, processes, tasks or clocks.

Messages of workers go in, messages to them come out; time and timers are passed in. So the server
runs it in real time, and tests run it in virtual time with every fault at every moment. The
simulator runs `migrations`, `leases` and `orders` too. Imports `transport`'s messages, `policy` and
`core`.

- `activation_admission`: Holds back requests for absent models until their keys' turns.
- `activation_turns`: Turns and budgets of API keys for having models activated.
- `device_leases`: Lending between the devices of a server: the driver of `leases`.
- `device_observer`: What parts of the controller hear of workers.
- `device_orders`: Orders to the devices of a server.
- `device_record`: The controller's state of one device, for routing.
- `fairness`: Fair order of requests between API keys.
- `fleet_view`: The fleet policy's view of all devices.
- `lease_events`: Events, instructions and readings of `leases`.
- `leases`: Who lends pages to whom, recalls, deadlines, deaths of either end.
- `migration_events`: Events, instructions and readings of `migrations`.
- `migrations`: Move running requests with their KV, and hand them from prefill to decode devices.
- `open_request`: One open request: what its client has.
- `open_requests`: Open requests of one device: queued, sent, answered.
- `order_driver`: The driver of `orders`, in both worlds.
- `order_events`: Events and instructions of `orders`.
- `orders`: Carry out orders of operators and of the fleet policy, which it calls.
- `request_migrations`: Migrations between the devices of a server: the driver of `migrations`.
- `request_router`: Choice of the device of a request, and retry when a worker dies.
- `routed_devices`: The devices of a fleet, and which of them take requests of a model.
- `routed_prefixes`: Prefixes that a device is believed to have cached, for routing.
- `spares`: The prepared worker process in reserve on a host, and when another is started.
- `standby`: When devices on standby serve, and when they leave again.
- `suspicion`: Requests suspected of killing workers, which run alone.
- `timers`: The time and timers of the machines, in real or virtual time.
"""
