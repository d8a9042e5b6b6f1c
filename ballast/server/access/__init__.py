"""Decide who may send a request, and how much: API keys, rate limits, fair shares between keys.

`server` alone imports it.

- `fair_shares`: Fair shares of a capacity between API keys.
- `fair_thread`: One thread's work, shared by API keys in turn.
- `gate`: Bounds on open requests and on the bytes and time of their bodies.
- `keys`: API keys, and which routes they open.
- `meter`: Tokens and time of one client's request, for quotas and the log.
- `queue_pace`: How quickly a full queue moves, for `Retry-After`.
- `quotas`: Rate limits of each API key.
"""
