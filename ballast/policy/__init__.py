"""Decide which models and requests get memory, compute and devices: pure functions of frozen views.

Packages from `kernels` up may import it; `engine`, `cluster`, `sim`, `bench` and the command line
do. It imports `core` only, and `memory` does not import it either: a policy returns actions and
cannot touch the memory that it decides about.

- `admission`: The order in which waiting requests are admitted.
- `base`: The protocols of memory, admission, compute and fleet policies, and their defaults.
- `c2cserve_knob`: Feedback on the dataflow of GEMMs that read host memory (C2CServe, 7.3).
- `compute`: Which model's job runs next on an idle lane.
- `fleet`: Which devices serve which models, and which replica gets a request.
- `kv_fetching`: Whether KV in a tier below the device is fetched or computed again, or comes home.
- `market`: Claims for pages covered by offers of pages, in order of precedence or by price.
- `memory`: Memory and residency on one device: one module for each memory policy.
- `plans`: The changes of a model's residency plan that policies ask for.
- `presets`: Named combinations of policies, and their options.
- `requirements`: What a policy requires of its device, checked at start.
- `supply`: Sources of pages at the harm that taking them would do: preset `ballast`.
"""
