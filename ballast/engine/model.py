"""One model on one device: its weights, its KV cache, its costs and its requests."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from ballast.core.change_counter import ChangeCounter
from ballast.core.cost import StepCosts
from ballast.core.job import Job, JobLoad
from ballast.core.model import ModelSpec
from ballast.core.report import STEP_BOUNDS
from ballast.core.request import Request
from ballast.core.rotation import Rotation
from ballast.core.settings import Slo
from ballast.core.traffic import TrafficStats
from ballast.core.view import ModelView, Residency, Shortage
from ballast.engine.batch import Batch, Paused
from ballast.engine.cost_estimator import CostEstimator
from ballast.engine.life import Life
from ballast.engine.waiting import Waiting
from ballast.kv.blocks import KvCache
from ballast.kv.swapper import KvSwapper
from ballast.weights.residency import WeightsOnDevice

UNSEEN = frozenset(
    {
        "version",
        "news",
        "view",
        "deferred",
        "viewed",
        "blocked",
        "last_run",
        "lane_seconds",
        "activations",
        "evictions",
        "preemptions",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "step_tokens",
    }
)
"""Attributes of `ModelState` that no snapshot shows. All others count as changes when they are set,
so that one that is missing here costs time, and no snapshot is ever stale."""


@dataclass(slots=True, eq=False)
class ModelState:
    """One model on this device, and its requests.

    What policies see of it is kept in parts that count their own changes: KV cache, weights, life,
    the requests. Setting an attribute here counts as one, too (but for `UNSEEN`), and collections
    that are not parts are replaced, never changed. So a snapshot knows whether it is stale.
    """

    version: ChangeCounter = field(init=False, default_factory=ChangeCounter)
    """Grows with every change of what policies see of the model: the parts have it in common."""
    news: ChangeCounter = field(init=False, default_factory=ChangeCounter)
    """Grows with every change of the model that a policy should be asked about; the device's models
    and their parts have it in common."""
    spec: ModelSpec
    weights: WeightsOnDevice
    kv: KvCache
    costs: StepCosts
    life: Life = field(init=False)
    waiting: Waiting = field(default_factory=Waiting)
    running: Batch = field(default_factory=Batch)
    paused: Paused = field(default_factory=Paused)
    """`ballast.engine.pausing`."""
    held: bool = False
    frozen: bool = False
    """Held, and its running requests stand still."""
    shortages: tuple[Shortage, ...] = ()
    """Requests that found no pages when its last job was formed."""
    blocked: tuple[str, int] | None = None
    """(request, epoch of freed memory) at which the first waiting request last found no room."""
    last_run: float = float("-inf")
    last_used: float = float("-inf")
    lane_seconds: float = 0.0
    """Of the whole device, that its jobs have taken so far: on a part of it, so much less."""
    activations: int = 0
    evictions: int = 0
    preemptions: int = 0
    swapper: KvSwapper | None = None
    """None: its KV cannot be swapped."""
    estimator: CostEstimator | None = None
    """Learns `costs` from jobs that end; None: they were measured before."""
    decode_seconds: float | None = None
    """Of its last job that only decoded, without waiting for layers; below, of the last other."""
    prefill_seconds: float | None = None
    traffic: TrafficStats = field(default_factory=TrafficStats)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    """Its jobs, by the number of tokens that each computed (`ballast.core.report.StepTokens`)."""
    step_tokens: int = 0
    """Tokens of all of them."""
    view: ModelView = field(init=False)
    """The last snapshot, and, below, the pages that are bound to come free, as of then."""
    deferred: int = field(init=False)
    viewed: int = -1
    """`version` at the time; -1: there is none."""

    def __post_init__(self) -> None:
        self.life = Life(self.spec.name)
        parts = (self.life, self.kv, self.weights, self.waiting, self.running, self.paused)
        for part in parts:
            part.version = self.version
        self.report_to(self.news)

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name not in UNSEEN:
            self.version.n += 1
            if name == "spec":
                self.news.n += 1

    def report_to(self, news: ChangeCounter) -> None:
        """Count news in `news`, as of a device to which the model belongs."""
        self.news = news
        for part in (self.life, self.waiting, self.running, self.paused):
            part.news = news

    @property
    def residency(self) -> Residency:
        return self.life.residency

    @property
    def job(self) -> Job | None:
        """In flight."""
        return self.life.job

    @property
    def idle_since(self) -> float | None:
        """When it became idle, on the device's clock; None: it is not resident, or has requests."""
        if self.residency is not Residency.RESIDENT or self.waiting or self.running or self.paused:
            return None
        return max(self.last_used, self.life.resident_since)

    @property
    def rotation(self) -> Rotation:
        """Layers that rotate, or will."""
        wanted = self.life.turning
        return self.weights.slots.rotation if wanted is None else wanted

    @property
    def pages_to_take(self) -> int:
        """Pages more that its layers will take (negative: give up) when it has turned."""
        slots = self.weights.slots
        return (slots.rotation.n_freed - self.rotation.n_freed) * slots.layer_pages

    def took(self, seconds: float | None, load: JobLoad, jobs: int = 1) -> None:
        """Note a job that has ended: its `seconds` without waiting for layers, and its tokens; the
        last of several `jobs` with as many tokens. None: it is no measure of others."""
        tokens = load.prefill_tokens + load.decode_sequences
        self.step_counts[bisect_left(STEP_BOUNDS, tokens)] += jobs
        self.step_tokens += jobs * tokens
        if seconds is None:
            return
        if load.prefill_chunks:
            self.prefill_seconds = seconds
        else:
            self.decode_seconds = seconds

    def cost(self, seconds: float, load: JobLoad) -> None:
        """A job of it had a lane for so long, without waiting for layers, the engine's own time
        included."""
        if self.estimator is not None:
            self.estimator.observe(load, seconds)
            self.costs = self.estimator.costs

    def queue_seconds(self, adapter: int | None) -> float | None:
        """How long requests for it, or for one of its adapters, wait to be admitted."""
        own = None if adapter is None else self.spec.adapters[adapter].queue_seconds
        return self.spec.queue_seconds if own is None else own

    def late(self, now: float) -> int:
        """Waiting requests that have used up half of the time in which their first token is due,
        and running ones whose tokens come more slowly than they should."""
        slo, waiting, running = self.slo, tuple(self.waiting), tuple(self.running)
        late = sum(r.submission.arrival < now - slo(r).ttft / 2 for r in waiting)
        return late + sum(r.seconds_per_token > slo(r).tpot for r in running)

    def slo(self, r: Request) -> Slo:
        """Service level of a request: its adapter's, if it asks for one."""
        return self.spec.slo_of(r.adapter)

    def phases(self) -> tuple[list[Request], list[Request]]:
        """Of `running`, those that decode, and those with prefill left."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for r in self.running:
            (decoding if r.computed == len(r.tokens) - 1 > 0 else prefilling).append(r)
        return decoding, prefilling
