"""Choose which model's job runs next on an idle lane, and how much of its prompts it computes.

The engine loop calls one of these policies; `policy.presets` combines them with memory policies.
They import `core`, `policy.base`, and of `policy.fleet` MuxServe's estimate.

- `adbs`: Adaptive batch scheduling: one prefill at a time beside other models' decodes (MuxServe).
- `basic_orders`: Orders without deadlines: round robin, and first come first served.
- `chunks`: Order by deadline, with the smallest prompt chunks that keep levels (C2CServe, 6.3).
- `deadline`: Order by deadline of time to first token and time per output token.
- `decode_shares`: Least part of a device's compute on which a model's decodes serve its rate.
- `demand`: How much lane time is due by when, and how much headroom remains.
"""
