"""Which model's job runs next on an idle lane."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.view import Candidate


def least_recently_run(candidates: Sequence[Candidate]) -> str:
    """Round-robin by jobs; of models that have never run, the oldest request first, then name."""
    last = (float("inf"),)
    return min(candidates, key=lambda c: (c.last_run, c.first_waiting or last, c.model)).model
