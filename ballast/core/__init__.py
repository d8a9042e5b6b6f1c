"""Define the vocabulary of all other packages: plain data and pure formulas.

Every package may import it; it imports none of them, and neither torch, sockets, files nor a wall
clock.

- `actions`: Actions that a policy may ask for, `Decision`, and `Short`, the result of a shortage.
- `capability`: Which devices can lend pages to which, and by what means.
- `chains`: Keyed digests of prompt blocks, which show shared prefixes without their tokens.
- `change_counter`: A counter of changes, by which a cached snapshot is recognised as stale.
- `clock`: The `Clock` protocol and a virtual clock.
- `command`: Commands that add a model to a device or remove it, and the unions of commands.
- `compute`: The view and the decision of a compute policy: which model's job runs next on a lane.
- `cost`: Cost formulas of jobs, copies and activation memory, in seconds and bytes.
- `entries`: The entries of a story as plain dictionaries without token ids.
- `errors`: All exceptions, in one tree, named by fault and remedy.
- `estimates`: When a model's next request comes, and how often cached blocks are used again.
- `event`: Events that change a device's state, and outputs that it sends to clients.
- `fairqueue`: A bounded queue in which owners take turns.
- `fleet`: The view and the decision of a fleet policy: placement of models over devices.
- `fleet_orders`: Orders that place models, move requests, drain devices and lend pages.
- `fleet_state`: The devices as the controller knows them, and base classes of their commands.
- `gemm_traffic`: Bytes of a GEMM over host link and device memory, by dataflow (C2CServe, 5.2).
- `job`: Jobs: prefill chunks and decode steps of one model, and their results.
- `kv_tiers`: Settings and events of KV tiers below the device.
- `lazy_property`: A property that is computed once, when it is first read.
- `lease`: Leases of pages that one device lends to another, and their messages.
- `levels`: Service levels and bounds of a model or adapter, one record for all that have them.
- `link_budget`: Reservations of a host link by models that read weights over it (C2CServe, 6.2).
- `link`: Directions and rates of the link between host and device.
- `migration`: Commands and results of moving a running request with its KV to another device.
- `model`: `ModelSpec`: the sizes of a model that scheduling and memory need.
- `omitted`: Mark fields that stories omit while they have their default.
- `order`: What an order to the fleet is: its steps.
- `pass_traffic`: Bytes of a pass that reads its weights in host memory (C2CServe, 5).
- `price_curve`: A device's marginal prices of pages, which it publishes to fleet policies.
- `report`: `DeviceReport`: what a device reports for routing, metrics and display.
- `request`: Sampling parameters, submissions, and the life of a request inside an engine.
- `residency_plan`: Where each unit of a model is, how passes read it, and what that costs.
- `rotation`: Which layers of a model share slots, so that the others' memory is free (MIRAGE, 5.4).
- `sampling_defaults`: Sampling parameters of requests that name none.
- `settings`: Frozen settings of a fleet, its devices, models and server.
- `spacing`: Layers evenly spaced on a circle (MIRAGE, 5.4).
- `story`: The recorded events and decisions of a device, in order, with their times.
- `story_requests`: Numbers and block digests of a story's requests, in place of ids and tokens.
- `token_bucket`: Rates per minute, with bursts: quotas and budgets of API keys.
- `traffic`: Arrival rates and token counts of one model's recent requests.
- `units`: Sizes in bytes: constants, parsing and formatting.
- `view`: `DeviceView` and its parts: the frozen snapshot that memory policies decide on.
"""
