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
from ballast.sim.lanes import SimLanes
from ballast.sim.rotor import SimRotors
from ballast.sim.swapper import SimSwappers


class SimRunner:
    """Runs a job by saying when it will be done.

    Tokens are a function of (request id, position), never an end-of-sequence token: lengths are
    the workload's. Scores and embeddings are zeros. In seconds: `overhead` is the engine's own time
    per job, which the lane spends idle; `wake` is what a job takes longer after a pause, and a
    decode step after a prefill. `parts`: of the device, which jobs on several lanes divide
    (`sim.lanes`, as is `reach`); of `wake` those know nothing that have less than all. What a job
    waits for layers comes on top.
    """

    def __init__(
        self,
        heap: EventHeap,
        clock: Clock,
        specs: Mapping[str, ModelSpec],
        costs: Mapping[str, StepCosts],
        rotors: SimRotors,
        overhead: float = 0.0,
        wake: float = 0.0,
        parts: int = 1,
        reach: float = 1.0,
        swappers: SimSwappers | None = None,
    ) -> None:
        self._heap = heap
        self._clock = clock
        self._specs = specs
        self._costs = costs
        self._rotors = rotors
        self._overhead = overhead
        self._wake = wake
        self._parts = parts
        self._swappers = swappers
        self._lanes = SimLanes(heap, clock, reach, overhead)
        self._began = self._free = 0.0
        """When the last job began, and when it ends."""
        self._after_pause = self._after_prefill = self._prefills = False
        """Of the last job: what it followed, and whether it has a prefill."""

    def start(self, job: Job) -> None:
        results = tuple(self._results(self._specs[job.model], job))
        share = 1.0 if job.parts is None else job.parts / self._parts
        read, written = sum(w.start for w in job.work), sum(len(w.tokens) for w in job.work)
        if self._swappers is not None and not written:
            seconds = self._swappers.carrying(job.model) / share
            end = self._clock.now() + seconds + self._overhead
            self._heap.schedule(end, JobDone(job, results, seconds, seconds))
            return
        if share < 1:
            split = self._costs[job.model].split(job.load)
            seconds = self._lanes.alone(share, *split)
            stall = self._rotors.stall(job.model, seconds)
            if self._swappers is not None:
                stall += self._swappers.stall(job.model, seconds, read, written, share)
            self._lanes.start(job, share, *split, results, stall)
            return
        seconds, stall, end = self._until(job.model, job.load, read, written)
        self._heap.schedule(end, JobDone(job, results, seconds, stall))

    def decodes(self, model: str, sequences: int, context: int) -> tuple[float, float, float]:
        """Of a job that only decodes, if it began now: its seconds, how many of these it waits for
        layers, and when it would end.

        `context`: as of `Load`.
        """
        load = Load(0, 0, 0, sequences, context)
        return self._until(model, load, context - sequences, sequences)

    def _until(self, model: str, load: Load, read: int, written: int) -> tuple[float, float, float]:
        """As `decodes`, of any job that begins now; the same if asked again now.

        `read`, `written`: tokens whose KV it finds and makes."""
        now = self._clock.now()
        if now != self._began:
            self._after_pause, self._after_prefill = now > self._free, self._prefills
            self._began = now
        self._prefills = load.prefill_chunks > 0
        seconds = self._costs[model].of(load)
        if self._after_pause or (self._after_prefill and not self._prefills):
            seconds += self._wake
        stall = self._rotors.stall(model, seconds)
        if self._swappers is not None:
            stall += self._swappers.stall(model, seconds, read, written)
        seconds += stall
        self._free = now + seconds + self._overhead
        return seconds, stall, self._free

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
