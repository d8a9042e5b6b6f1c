"""Order the queue of a device: which waiting requests are admitted first.

Every other package of `ballast.policy` may use it; it imports `core` and `policy.base`.

- `late_last`: Requests that can still meet their service level come first.
- `least_harm`: The most requests in time, for lane and memory.
- `slack`: One queue of a device's prefills by slack (Prism, 6.2, Algorithm 2).
- `turns_by_slack`: Requests that made way come back when their next token is due.
"""
