"""Decide whether KV in a tier below the device is fetched or computed again, or comes home.

Used by the engine when it admits a request, and when a block has filled: what would never be
fetched is not stored either. And when a request begins to decode whose KV lies with a neighbour.
"""

from __future__ import annotations

from ballast.core.cost import StepCosts, copy_seconds
from ballast.core.kv_tiers import DISK_BYTES_PER_SECOND

OVERHEAD_SECONDS = 1e-3
"""Of a fetch, beside its copy: a message each way, and a turn of the loop."""


def computing_seconds(costs: StepCosts, start: int, tokens: int, total: int) -> float:
    """Return the seconds by which prefilling positions `start` to `total` takes longer than doing
    so from `start + tokens` on."""
    rest = total - start - tokens
    later = costs.prefill_seconds(rest, start + tokens) if rest > 0 else 0.0
    return costs.prefill_seconds(total - start, start) - later


def is_worth_fetching(
    costs: StepCosts,
    start: int,
    tokens: int,
    total: int,
    n_bytes: int,
    bytes_per_second: float,
    overhead: float = OVERHEAD_SECONDS,
    disk_bytes: int = 0,
) -> bool:
    """Return whether fetching `n_bytes`, the KV of `tokens` positions from `start` of a prompt of
    `total`, takes less time than computing it. `disk_bytes`: those read from disk first."""
    fetching = overhead + copy_seconds(n_bytes, bytes_per_second)
    fetching += copy_seconds(disk_bytes, DISK_BYTES_PER_SECOND)
    return fetching < computing_seconds(costs, start, tokens, total)


def is_worth_exchanging(read_seconds: float, step_seconds: float, steps: int) -> bool:
    """Return whether KV with a neighbour, for which each of `steps` decode steps of `step_seconds`
    would read `read_seconds` beside its work, is to change places with KV of the device: it crosses
    the link once in either direction."""
    return steps * (read_seconds - step_seconds) > 2 * read_seconds
