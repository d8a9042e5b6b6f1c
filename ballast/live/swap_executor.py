"""Run the jobs of a model whose KV is swapped, and the jobs that change which layers rotate.

Wraps a `ModelExecutor` where the preset swaps KV, and installs the swapper as the barriers at which
its passes load and store KV.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.event import JobResult
from ballast.core.job import SequenceWork
from ballast.kv.event_swapper import EventSwapper
from ballast.kv.link_swapper import LinkSwapper
from ballast.models.executor import ModelExecutor


class KvSwapExecutor:
    """Implements `Executor`. When a job ends, none of its copies is in flight."""

    def __init__(self, model: ModelExecutor, swapper: LinkSwapper | EventSwapper) -> None:
        self._model, self._swapper = model, swapper
        model.barriers = swapper

    def run(self, work: Sequence[SequenceWork]) -> list[JobResult]:
        if not any(w.tokens for w in work):
            self._swapper.move()
            return []
        try:
            return self._model.run(work)
        finally:
            self._swapper.finish()

    def stalled(self) -> float:
        return self._model.stalled()
