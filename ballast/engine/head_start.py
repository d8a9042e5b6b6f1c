"""Compute how early the first job of an activating model begins: before all weights have landed.

Used by `apply` when it activates a model: the link reports when no more than `bytes_ahead` is left.

::

    link   |  embeddings, head  | layer 0 | layer 1 | layer 2 | layer 3 |
    lane                                       | 0   1     2       3 |  first token
                                               ^ the remaining load takes as long as the job

The job waits at each layer that has not landed, so it could begin as soon as the first layer has.
But then it would occupy its lane for the whole load, and would end no sooner: its end follows the
last layer's landing by one layer's work.
"""

from __future__ import annotations

from ballast.core.job import JobLoad, chunk_pairs
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def bytes_ahead(state: DeviceState, m: ModelState) -> int:
    """Return the bytes of an absent model's weights that the link is expected to load while the
    model's first job runs; 0 if no request waits for the model."""
    rate = state.activation_rate.bytes_per_second or state.link_bytes_per_second
    return int(m.costs.of(_first_load(state, m)) * rate) if m.waiting else 0


def _first_load(state: DeviceState, m: ModelState) -> JobLoad:
    """Return the load of the first job: prefill of the waiting requests, within `step_tokens`.

    An absent model has no cached prefixes."""
    left = state.settings.step_tokens
    tokens = chunks = pairs = 0
    for request in m.waiting:
        n = min(left, len(request.tokens))
        if n <= 0 or chunks >= m.spec.max_running:
            break
        tokens, chunks, pairs, left = tokens + n, chunks + 1, pairs + chunk_pairs(n, 0), left - n
    return JobLoad(tokens, chunks, pairs, 0, 0)
