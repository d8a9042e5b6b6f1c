"""When the first job of a model that is being activated begins: before all weights are there.

::

    link   |  embeddings, head  | layer 0 | layer 1 | layer 2 | layer 3 |
    lane                                       | 0   1     2       3 |  first token
                                               ^ what is still to come takes as long as the job

It waits for each layer that has not landed when it comes to it, so it could begin with the first.
But its lane is then kept from other models for the whole load, and its end comes no sooner: that
follows the last layer, by one layer's work.
"""

from __future__ import annotations

from ballast.core.job import JobLoad, chunk_pairs
from ballast.engine.model import ModelState
from ballast.engine.state import DeviceState


def bytes_ahead(state: DeviceState, m: ModelState) -> int:
    """Of an absent model's weights, how many bytes come in while its first job runs, as far as
    is known of both; 0 where no request waits for it."""
    rate = state.activation_rate.bytes_per_second or state.link_bytes_per_second
    return int(m.costs.of(_first_load(state, m)) * rate) if m.waiting else 0


def _first_load(state: DeviceState, m: ModelState) -> JobLoad:
    """Of the job that the requests which wait now would have together; nothing is cached of a
    model that is absent."""
    left = state.settings.step_tokens
    tokens = chunks = pairs = 0
    for request in m.waiting:
        n = min(left, len(request.tokens))
        if n <= 0 or chunks >= m.spec.max_running:
            break
        tokens, chunks, pairs, left = tokens + n, chunks + 1, pairs + chunk_pairs(n, 0), left - n
    return JobLoad(tokens, chunks, pairs, 0, 0)
