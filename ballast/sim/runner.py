"""What replaces lanes in virtual time: durations from `core/cost.py`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from ballast.core.clock import Clock
from ballast.core.cost import StepCosts
from ballast.core.event import Embedded, JobDone, PromptScores, Result
from ballast.core.job import Job, Load, Sampled
from ballast.core.model import ModelSpec
from ballast.sim.heap import EventHeap


class SimRunner:
    """Runs a job by saying when it will be done.

    Tokens are a function of (request id, position), never an end-of-sequence token: lengths are
    the workload's. Scores and embeddings are zeros. `overhead` is the engine's own time per job, in
    seconds, which the lane spends idle.
    """

    def __init__(
        self,
        heap: EventHeap,
        clock: Clock,
        specs: Mapping[str, ModelSpec],
        costs: Mapping[str, StepCosts],
        overhead: float = 0.0,
    ) -> None:
        self._heap = heap
        self._clock = clock
        self._specs = specs
        self._costs = costs
        self._overhead = overhead

    def start(self, job: Job) -> None:
        spec = self._specs[job.model]
        seconds = self._costs[job.model].seconds(job)
        done = JobDone(job, tuple(self._results(spec, job)), seconds)
        self._heap.schedule(self._clock.now() + seconds + self._overhead, done)

    def decodes(self, model: str, sequences: int, context: int) -> tuple[float, float]:
        """Of a job that only decodes, if it began now: its seconds, and when it would end.

        `context`: as of `Load`.
        """
        seconds = self._costs[model].of(Load(0, 0, 0, sequences, context))
        return seconds, self._clock.now() + seconds + self._overhead

    def _results(self, spec: ModelSpec, job: Job) -> Iterator[Result]:
        for w in job.work:
            if w.scoring is not None:
                yield PromptScores(w.request_id, w.scoring.start, (0.0,) * len(w.scoring.targets))
            if w.sample is not None:
                yield Sampled(w.request_id, self.token(spec, w.request_id, w.end))
            if w.embed:
                yield Embedded(w.request_id, bytes(4 * spec.hidden))

    @staticmethod
    def token(spec: ModelSpec, request_id: str, position: int) -> int:
        """What request `request_id` has at `position`."""
        token = zlib.crc32(f"{request_id}:{position}".encode()) % spec.vocab
        while token in spec.eos_token_ids:
            token = (token + 1) % spec.vocab
        return token
