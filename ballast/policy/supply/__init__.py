"""Offer pages at the harm that taking them would do: the sources of the preset `ballast`.

One module for each source. A source is a function of a view and a claim; its offers' prices are
expected rises in weighted misses of deadlines (`ballast.policy.market.harm`). A new system joins by
one more module here, and one more entry in `ballast.policy.memory.arbiter`.

- `cached_blocks`: Cached prefixes, by how likely they are used again.
- `host_direct`: Weights that passes read in host memory instead of coming.
- `moved_pages`: Scattered blocks, and pages lent to other devices.
- `parked_models`: Weights of models with requests, whose KV stays cached meanwhile.
- `preemption`: Single running requests.
- `prewarming`: Weights that come before they are requested, onto pages that nobody claims.
- `staged_kv`: KV blocks of running requests, which steps then read on the host.
- `streamed_layers`: Layers of running models, which passes then read through slots.
- `weights`: Weights of idle models, by how likely a request is soon.
"""
