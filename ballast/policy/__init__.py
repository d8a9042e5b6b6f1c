"""Decide who gets memory, compute and devices: pure functions of frozen views.

Packages from `kernels` up may import it; `engine`, `cluster`, `sim`, `bench` and the command line
do. It imports `core` only; `memory` can neither see it nor be seen by it, so that a policy cannot
touch what it decides about.

- `activations`: What makes way when a newly joined model needs larger activations.
- `adbs`: Adaptive batch scheduling: one prefill at a time beside other models' decodes (MuxServe).
- `admission`: Admission order: requests that can still meet their service level come first.
- `balloon`: Preset `balloon`: one elastic pool; idle weights and cached prefixes make way.
- `base`: The protocols of memory, admission, compute and fleet policies, and their defaults.
- `budget`: Pages that the claims of one decision can count on.
- `claims`: Claims for pages: models to activate, and requests that cannot go on.
- `comeback`: Claims of evicted models that return before they are requested.
- `cover`: Cover claims by offers in order of precedence, from fixed sources or by price.
- `deadline`: Compute order by deadline of time to first token and time per output token.
- `demand`: How much lane time is due by when, and how much slack remains.
- `fair`: Max-min fair shares of KV memory between models that contend for it.
- `fleets`: Fleet policies by name.
- `follow`: Fleet policy that replicates a model from an overloaded device to one with room.
- `home`: What makes way for KV that must leave borrowed pages.
- `kvpr`: KV pressure ratio of devices, and greedy placement (Prism, 6.1, Algorithm 1).
- `kvpr_optimal`: Placement of least KV pressure by CP-SAT, as a bound for the greedy one.
- `kvswap`: Preset `kvswap`: KV swapped layer by layer instead of preemption (Pie).
- `layers`: Layers as a source of pages: offers of remapping weights to KV (MIRAGE, 5.2, 5.3).
- `lending`: The answer to an operator's order to lend pages to another device.
- `market`: `Claim` and `Offer`: demand for pages, and ways to free them, with their price.
- `migrate`: Fleet policy that migrates models to where KV pressure is least (Prism, 6.1).
- `mirage`: Preset `mirage`: layers lend their memory to KV before requests are preempted.
- `mux_estimate`: Estimated throughput of models on a mesh of devices (MuxServe, Equation 3).
- `mux_placement`: Placement by popularity and computation (MuxServe, 3.2).
- `offers`: Sources of offers: cached prefixes, idle models, younger requests, lent pages.
- `order`: Compute orders without deadlines: round robin, and first come first served.
- `placement`: Initial placement of models over devices by size and load.
- `placement_problem`: The vocabulary of placement problems: devices, and homes of models.
- `presets`: Named combinations of policies, and their options.
- `quotas`: KV quotas of models that follow demand (MuxServe).
- `recompute`: Preset `recompute`: fixed weights, preemption by recomputation (vLLM).
- `requirements`: What a policy requires of its device, checked at start.
- `reversion`: Claims by which models take back the layers that they gave up.
- `route`: Which replica of a model gets a request.
- `slack`: One queue of a device's prefills by slack (Prism, 6.2, Algorithm 2).
- `static`: Preset `static`: every model has a fixed share of the device.
- `stay`: Fleet policy that leaves models where they were placed.
- `stuck`: The last resort when nothing can go on: recall lent pages, or fail one request.
- `swap`: Preset `swap`: one whole model at a time has the device (QLM, llama-swap).
- `ttl`: Eviction of models that have been idle longer than their time to live.
- `turns`: Serve one model at a time, with starvation bounds.
"""
