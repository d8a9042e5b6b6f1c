"""Decide who may send a request, and how much: API keys, rate limits, fair shares between keys.

`server` alone imports it.

- `fair_shares`: Divides a capacity fairly between API keys.
- `gate`: Bounds on open requests and on the bytes and time of their bodies.
- `keys`: Authentication by key, and the routes that each key opens.
- `meter`: Tokens and time of one client's request, for quotas and the log.
- `queue_pace`: Estimates how long a full queue takes to drain, for `Retry-After`.
- `quotas`: Rate limits of each API key.
- `whole_answers`: Bound on the memory of answers that are sent whole.
"""
