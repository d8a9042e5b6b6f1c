"""Place models on devices, at the start and as load changes, and choose replicas for requests.

The fleet's controller calls these policies; they import `core` and `policy.base`, and nothing that
decides about a single device.

- `by_price`: Fleet policy that lends pages and moves models where a page is worth more.
- `elastic_cache`: Sizes of SwiftCache's caches and units, and its Algorithm 1.
- `elastic_lending`: Fleet policy that lends idle KV memory to devices that lack it (SwiftCache).
- `fixed_placement`: Fleet policies that leave models where they were placed: by work, or drawn.
- `initial_placement`: Place models on devices by size and expected work, before anything arrives.
- `kv_pressure`: KV pressure ratio of devices, and greedy placement (Prism, 6.1, Algorithm 1).
- `link_aware`: Fleet policy by the budget of a shared link (C2CServe, 6.1, 6.2).
- `migrate`: Fleet policy that migrates models to where KV pressure is least (Prism, 6.1).
- `mux_estimate`: Estimated throughput of models on a mesh of devices (MuxServe, Equation 3).
- `mux_placement`: Placement by popularity and computation (MuxServe, 3.2).
- `optimal_placement`: Placement of least KV pressure by CP-SAT, as a bound for the greedy one.
- `placement_problem`: The types of placement problems: devices, and homes of models.
- `replica_choice`: Choose which replica of a model gets a request.
- `replicate`: Fleet policy that replicates a model from an overloaded device to one with room.
"""
