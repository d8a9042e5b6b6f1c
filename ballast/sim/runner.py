"""Run jobs in virtual time: schedule each job's end by the cost formulas of `core/cost.py`.

`SimRunner` replaces the lane threads of the live runner. No model is evaluated: tokens are a
function of request id and position.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf

from ballast.core.clock import Clock
from ballast.core.cost import StepCosts
from ballast.core.event import EmbeddingOutput, JobDoneEvent, JobResult, PromptScoresOutput
from ballast.core.job import Job, JobLoad, SampledToken
from ballast.core.model import ModelSpec
from ballast.sim.event_heap import EventHeap
from ballast.sim.in_place import InPlaceReads
from ballast.sim.job_spread import JobFactors
from ballast.sim.lanes import Part, SimLanes, guessed, measured, measured_seconds
from ballast.sim.layer_passes import Alone, LayerSource, Pace, Pass
from ballast.sim.layer_stream import SimStreams
from ballast.sim.link import SimLink
from ballast.sim.machine_profile import PAUSE, RECENT, MachineProfile
from ballast.sim.page_costs import LoopTime


class SimRunner:
    """Runs a job by scheduling its end.

    Tokens are a function of (request id, position), never an end-of-sequence token: lengths are
    the workload's, those of `ends` or the requests' bounds. Scores and embeddings are zeros. The
    lane is idle during the engine's own time per job. Jobs that have less than the whole device
    take no longer after a pause or a prefill. A job that comes to layers which are not there waits
    for them (`sim.layer_passes`).
    """

    ends: Mapping[str, int]
    """Positions of the last tokens of answers that end before their bounds, by request."""

    def __init__(
        self,
        heap: EventHeap,
        clock: Clock,
        specs: Mapping[str, ModelSpec],
        costs: Mapping[str, StepCosts],
        profile: MachineProfile,
        link: SimLink,
        streams: SimStreams,
        parts: int,
        calls: LoopTime,
        factors: JobFactors,
    ) -> None:
        """`costs`: by model, those of `profile` and of models that join; `parts`: of the device,
        which jobs on several lanes divide (`sim.lanes`); `calls`: pending calls of the loop, which
        end before a job begins; `factors`: on the expected duration of jobs."""
        self.maps_kv = profile.pages is not None and profile.pages.kv
        self._heap = heap
        self._clock = clock
        self._specs = specs
        self._costs = costs
        self._profile = profile
        self._link = link
        self._streams = streams
        self._overhead = profile.overhead
        self._settling = profile.settling
        self._parts = parts
        self._calls = calls
        self._hides_calls = profile.ahead > 0
        self._factors = factors
        self._hidden = 0.0
        """Seconds of calls that the job before the last hides."""
        self._measured: dict[str, Sequence[tuple[float, StepCosts]]] = {}
        """By model, costs on some shares of the device, ascending."""
        self._lanes = SimLanes(heap, clock, profile.overhead)
        self.borrowed: Callable[[str], LayerSource] | None = None
        """Source, by model, of KV on borrowed pages; None where such KV does not move."""
        self._borrowed: dict[str, LayerSource] = {}
        self.in_place: Mapping[str, InPlaceReads] = {}
        """By model, what its passes read in host memory, as long as any of it is there."""
        self._began = self._free = 0.0
        """Times at which the last job began and ends, the latter if known."""
        self._ahead: tuple[str, float, Alone] | None = None
        """A decode step that has begun before its job was started: model, time, and pace."""
        self._after_pause = self._prefills = False
        """Whether the last job followed a pause, and whether it has a prefill."""
        self._model: str | None = None
        """That of the last job."""
        self._ended: dict[str, float] = {}
        """By model, when its last job before another model's ended."""
        self._switch = 0.0
        """Seconds that the last job takes longer as the one before was another model's."""
        self._turns = 0
        """Turns of the loop while the last job runs or ran, that no job has been slower for."""
        self._slowed = 0.0
        """Seconds that the last job takes longer for such turns."""
        self._since_prefill = len(profile.settling)
        """Jobs from the last one with a prefill to the last job: 0 if that is the first after it;
        beyond `settling` it says no more than that."""

    def start(self, job: Job) -> None:
        self._heap.begin(job)
        results = tuple(self._results(self._specs[job.model], job))
        now = self._clock.now()
        read, written = sum(w.start for w in job.work), sum(len(w.tokens) for w in job.work)
        if job.parts is not None and job.parts < self._parts:
            way = (partial(self._pass, job.model), read, written)
            waits = self._waits(job.model)
            part = self._part(
                job.model, job.load, job.parts / self._parts, self._factor(now, job.model)
            )

            def begin(at: float) -> None:
                self._lanes.start(at, job, part, results, way if waits else None)

            if self._calls.until > now:
                self._heap.agenda.schedule(self._calls.until, begin)
            else:
                begin(now)
            return
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[:2] == (job.model, now):
            pace = ahead[2]
        else:
            seconds = self._seconds(job.model, job.load) if written else 0.0
            if not self._waits(job.model):
                self._free = self._begins(now) + seconds + self._overhead
                self._heap.schedule(self._free, JobDoneEvent(job, results, seconds))
                return
            pace = self._begin(job.model, seconds, read, written)

        def ended() -> None:
            seconds = pace.seconds + pace.stall
            done = JobDoneEvent(job, results, seconds, pace.stall, pace.carried)
            self._heap.schedule(self._end(pace), done)

        pace.ended = ended
        if pace.end is not None:
            ended()

    def step(self, job: Job, sequences: int, context: int) -> None:
        """Begin a decode step of a model whose jobs wait for nothing, while the loop has no `calls`
        to end; `job` need not have its work yet, which says what it brings (`give_work`).

        `context`: as of `JobLoad`.
        """
        self._heap.begin(job)
        if job.parts is not None and job.parts < self._parts:
            now, load = self._clock.now(), JobLoad(0, 0, 0, sequences, context)
            factor = self._factor(now, job.model)
            part = self._part(job.model, load, job.parts / self._parts, factor)
            self._lanes.start(now, job, part, ())
            return
        seconds, _, end = self.decodes(job.model, sequences, context)
        self._heap.schedule(end, JobDoneEvent(job, (), seconds))

    def give_work(self, job: Job) -> None:
        """The job of that number in flight, which was begun by `step`, is `job`."""
        results = tuple(self._results(self._specs[job.model], job))
        if job.parts is not None and job.parts < self._parts:
            self._lanes.give_work(job, results)
        self._heap.give_work(job, results)

    def decodes(self, model: str, sequences: int, context: int) -> tuple[float, float, float]:
        """Begin a decode step of a model whose jobs wait for nothing; its job is started at the
        same moment at the latest. Returns its seconds, the seconds of these that it waits (0), and
        the time at which it ends for the loop.

        `context`: as of `JobLoad`.
        """
        seconds = self._seconds(model, JobLoad(0, 0, 0, sequences, context))
        self._free = end = self._begins(self._clock.now()) + seconds + self._overhead
        return seconds, 0.0, end

    def turned(self, job: Job) -> None:
        """Record a turn of the loop while `job` runs alone. Live, that job is slower; here the next
        one is, which begins when that has ended either way."""
        if job.parts is None or job.parts >= self._parts:
            self._turns += 1

    def calls_at(self, at: float) -> bool:
        """Whether calls of the loop are still pending at that time."""
        return self._calls.until > at

    def even(self, at: float) -> bool:
        """Whether consecutive decode steps from then on that need no page take exactly their
        expected time."""
        settled = self._since_prefill + 1 >= len(self._settling)
        return settled and not self._factors.used and not self.calls_at(at)

    def decodes_on(self, model: str, sequences: int) -> tuple[Callable[[int], float], float]:
        """Return the seconds of a decode step by context, and the engine's own seconds, for
        consecutive steps while they are `even`; each begins when the one before has ended for the
        loop."""
        return self._costs[model].decoding(sequences), self._overhead

    def decoded(self, began: float, end: float) -> None:
        """Record that a consecutive step is in flight, with its begin and its end for the loop."""
        self._began, self._free = began, end
        self._after_pause, self._since_prefill = False, len(self._settling)
        self._switch, self._slowed = 0.0, 0.0

    def decodes_in_layers(
        self, model: str, sequences: int, context: int, until: float
    ) -> tuple[float, float, float]:
        """Begin a step as `decodes` does, of a model that may wait for layers. No event is due
        before `until`; an end that is not certain by then, or before changes bring one, is inf."""
        if not self._waits(model):
            return self.decodes(model, sequences, context)
        seconds = self._seconds(model, JobLoad(0, 0, 0, sequences, context))
        pace = self._begin(model, seconds, context - sequences, sequences)
        self._ahead = model, self._clock.now(), pace
        self._heap.agenda.run(until, until)
        if pace.end is None:
            return seconds, 0.0, inf
        return seconds + pace.stall, pace.stall, self._end(pace)

    def moves(self, models: Iterable[str]) -> bool:
        """Whether any bytes are on their way, or jobs of `models` would move some."""
        return self._link.moving > 0 or any(self._waits(model) for model in models)

    def goes_through_layers(self, models: Iterable[str]) -> bool:
        """Whether any job on part of the device goes through its layers one by one, or jobs of
        `models` would."""
        return self._lanes.layered or any(self._waits(model) for model in models)

    def _seconds(self, model: str, load: JobLoad) -> float:
        """Return the seconds of a job that begins now, without its waits; the same if called again
        at the same time."""
        now = self._clock.now()
        if now != self._began:
            self._after_pause = now > self._free + PAUSE
            self._since_prefill = 0 if self._prefills else self._since_prefill + 1
            self._hidden = now - self._began if self._hides_calls and now <= self._free else 0.0
            self._switch = self._switch_to(model, now)
            turns = 0 if self._after_pause else self._turns
            self._slowed, self._turns = turns * self._profile.turn, 0
            self._began, self._model = now, model
        self._prefills = load.prefill_chunks > 0
        seconds = self._device_seconds(model, load)
        if self._after_pause:
            seconds += self._profile.wake
        else:
            seconds += self._switch
        if not self._prefills and self._since_prefill < len(self._settling):
            seconds += self._settling[self._since_prefill]
        return (seconds + self._slowed) * self._factor(now, model)

    def _device_seconds(self, model: str, load: JobLoad) -> float:
        """Return the seconds of a job, without what it waits for."""
        reads = self.in_place.get(model)
        return reads.seconds(load) if reads and reads.waits else self._costs[model].of(load)

    def _switch_to(self, model: str, now: float) -> float:
        """Return the further seconds of a job that begins now after another model's, if it does."""
        if self._model is None or self._model == model:
            return 0.0
        self._ended[self._model] = min(self._free, now)
        recent = now - self._ended.get(model, -inf) < RECENT
        return self._profile.switch_back if recent else self._profile.switch

    def _factor(self, now: float, model: str) -> float:
        """Factor on the expected duration of a job that begins at `now`."""
        factor = self._factors.at(now, model) if self._factors.used else 1.0
        if self._profile.copies_slow and self._link.moving:
            factor *= 1.0 + self._profile.copies_slow
        return factor

    def _begins(self, now: float) -> float:
        """Return when a job begun at `now` runs: after the pending calls of the loop, less the part
        of them that the job before hides."""
        return max(now, self._calls.until - self._hidden)

    def _part(self, model: str, load: JobLoad, share: float, factor: float) -> Part:
        """Return the seconds of a job on a share of the device that it has to itself; `factor`: on
        its expected duration."""
        if model not in self._measured:
            self._measured[model] = self._profile.on_parts(self._specs[model])
        seen, (compute, memory) = self._measured[model], self._costs[model].split(load)
        reads = self.in_place.get(model)
        if reads is not None and reads.waits:
            part = guessed(share, reads.seconds(load), 0.0, self._profile.reach)
        elif not seen:
            part = guessed(share, compute, memory, self._profile.reach)
        else:
            seconds = measured_seconds([*seen, (1.0, self._costs[model])], load, share)
            part = measured(share, seconds, memory, self._profile.reach)
        return Part(*(factor * seconds for seconds in part))

    def _begin(self, model: str, seconds: float, read: int, written: int) -> Alone:
        now = self._clock.now()
        pace = Alone(self._heap.agenda, self._begins(now), seconds)
        self._free = inf
        self._pass(model, pace).begin(now, read, written)
        return pace

    def _end(self, pace: Alone) -> float:
        """When a job that has ended does so for the loop."""
        assert pace.end is not None
        self._free = pace.end + self._overhead
        return self._free

    def _pass(self, model: str, pace: Pace) -> Pass:
        return Pass(self._specs[model].n_layers, self._sources(model), pace)

    def _sources(self, model: str) -> list[LayerSource]:
        stream, borrowed = self._streams.of(model), None
        if self.borrowed is not None:
            borrowed = self._borrowed.get(model)
            if borrowed is None:
                borrowed = self._borrowed[model] = self.borrowed(model)
        found = (stream, borrowed, self.in_place.get(model))
        return [source for source in found if source is not None and source.waits]

    def _waits(self, model: str) -> bool:
        """Whether a job of the model that begins now may have to wait for transfers."""
        stream = self._streams.of(model)
        reads = self.in_place.get(model)
        if any(source is not None and source.waits for source in (stream, reads)):
            return True
        return self.borrowed is not None and bool(self._sources(model))

    def _results(self, spec: ModelSpec, job: Job) -> Iterator[JobResult]:
        for w in job.work:
            if w.scoring is not None:
                yield PromptScoresOutput(
                    w.request_id, w.scoring.start, (0.0,) * len(w.scoring.targets)
                )
            if w.sample is not None:
                token, ends = self.token(spec, w.request_id, w.end), self.ends.get(w.request_id)
                yield SampledToken(w.request_id, token, ends=w.end == ends)
            if w.embed:
                yield EmbeddingOutput(w.request_id, bytes(4 * spec.hidden))

    @staticmethod
    def token(spec: ModelSpec, request_id: str, position: int) -> int:
        """Return the token of request `request_id` at `position`."""
        return SimRunner.tokens(spec, request_id, position, position + 1)[0]

    @staticmethod
    def tokens(spec: ModelSpec, request_id: str, first: int, end: int) -> list[int]:
        """Return the request's tokens at positions from `first` on, before `end`."""
        vocab, ends, named = spec.vocab, spec.eos_token_ids, zlib.crc32(f"{request_id}:".encode())
        tokens = [zlib.crc32(b"%d" % at, named) % vocab for at in range(first, end)]
        return [_another(t, ends, vocab) if t in ends else t for t in tokens] if ends else tokens


def _another(token: int, than: Sequence[int], vocab: int) -> int:
    """Return the next token that is not in `than`."""
    while token in than:
        token = (token + 1) % vocab
    return token
