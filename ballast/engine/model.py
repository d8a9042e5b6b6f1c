"""Hold the state of one model on one device: weights, KV cache, costs, life and requests.

`DeviceState` has one `ModelState` for each model; most modules of the engine work on it. Changes
that policies can see are counted, so that only stale snapshots are rebuilt.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import Protocol

from ballast.core.change_counter import ChangeCounter
from ballast.core.cost import StepCosts
from ballast.core.job import Job, JobLoad
from ballast.core.model import ModelSpec
from ballast.core.report import STEP_BOUNDS
from ballast.core.request import Request
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.rotation import Rotation
from ballast.core.settings import Slo
from ballast.core.traffic import LongestRequest, TrafficStats
from ballast.core.view import ModelView, Residency, Shortage
from ballast.engine.batch import Batch, Paused
from ballast.engine.cost_estimator import CostEstimator
from ballast.engine.life import Life
from ballast.engine.quarantine import Quarantine
from ballast.engine.waiting import Waiting
from ballast.kv.blocks import KvCache
from ballast.kv.kv_stream import KvStream
from ballast.weights.residency import WeightsOnDevice

UNSEEN = frozenset(
    {
        "version",
        "news",
        "tiers",
        "view",
        "deferred",
        "viewed",
        "blocked",
        "last_run",
        "lane_seconds",
        "activations",
        "activation_at",
        "evictions",
        "preemptions",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "step_tokens",
    }
)
"""Attributes of `ModelState` that no snapshot contains. Setting any other counts as a change: an
attribute that is missing here costs time, but never leaves a snapshot stale."""


class PrefixFetcher(Protocol):
    """Finds requests' KV in tiers below the device; `ballast.engine.kv_tiers` implements it."""

    def is_searching(self, r: Request) -> bool:
        """Return whether the answer to a request's look-up has yet to come."""

    def fetch(self, m: ModelState, r: Request) -> None:
        """Begin to fetch KV into blocks of a request that was just admitted, if that pays."""


@dataclass(slots=True, eq=False)
class ModelState:
    """One model on this device, and its requests.

    Its parts (KV cache, weights, life, requests) count their own changes in `version`. Setting an
    attribute here counts as a change too, except those in `UNSEEN`; collections that are not parts
    must be replaced, never changed. A snapshot is stale if `version` has changed since.
    """

    version: ChangeCounter = field(init=False, default_factory=ChangeCounter)
    """Counts changes of what policies see of the model; shared by its parts."""
    news: ChangeCounter = field(init=False, default_factory=ChangeCounter)
    """Counts changes after which a policy should decide again; shared by all models of the device
    and their parts."""
    spec: ModelSpec
    weights: WeightsOnDevice
    kv: KvCache
    costs: StepCosts
    life: Life = field(init=False)
    waiting: Waiting = field(default_factory=Waiting)
    running: Batch = field(default_factory=Batch)
    paused: Paused = field(default_factory=Paused)
    """Paused requests; see `ballast.engine.pausing`."""
    held: bool = False
    """Whether waiting requests are not admitted, by order of a policy."""
    frozen: bool = False
    """Whether it is held and its running requests are not in jobs either."""
    for_requests: bool = False
    """Whether requests waited for it when its last activation was ordered."""
    shortages: tuple[Shortage, ...] = ()
    """Requests that found no pages when its last job was formed."""
    blocked: tuple[str, int] | None = None
    """(request id, `freed` of the pool) when the first waiting request last found no pages."""
    last_run: float = float("-inf")
    last_used: float = float("-inf")
    lane_seconds: float = 0.0
    """Seconds of the whole device that its jobs have taken; on part of its compute, pro rata."""
    activation_at: float = float("-inf")
    """Time at which its last activation was ordered."""
    activations: int = 0
    evictions: int = 0
    preemptions: int = 0
    kv_staging: KvStream | None = None
    """What streams its staged blocks; None: none can be staged."""
    stage_to: int | None = None
    """Number of its blocks to be staged, once the next job has ended; None: no order."""
    stage_order: tuple[str, ...] = ()
    """Requests whose blocks move first by that order."""
    tiers: PrefixFetcher | None = None
    """Tiers below the device in which its KV is looked for; None: there are none."""
    estimator: CostEstimator | None = None
    """Learns `costs` from jobs that end; None: costs are given and stay."""
    decode_seconds: float | None = None
    """Seconds of its last decode-only job, without waiting for layers."""
    prefill_seconds: float | None = None
    """Seconds of its last job with prefill, without waiting for layers."""
    traffic: TrafficStats = field(default_factory=TrafficStats)
    longest: LongestRequest = field(default_factory=LongestRequest)
    """Its longest request lately; of no view."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Names under which its requests are refused, since they failed; no policy sees it."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    """Histogram of its jobs by tokens computed (`ballast.core.report.StepTokens`)."""
    step_tokens: int = 0
    """Tokens computed by all of its jobs."""
    view: ModelView = field(init=False)
    """The last snapshot."""
    deferred: int = field(init=False)
    """Pages that were bound to become free without further action, at the last snapshot."""
    viewed: int = -1
    """`version` at the last snapshot; -1: there is none."""

    def __post_init__(self) -> None:
        self.life = Life(self.spec.name)
        parts = (self.life, self.kv.bounds, self.weights, self.waiting, self.running, self.paused)
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
        """Share the counter `news` of the device to which the model now belongs."""
        self.news = news
        for part in (self.life, self.waiting, self.running, self.paused):
            part.news = news

    @property
    def residency(self) -> Residency:
        return self.life.residency

    @property
    def job(self) -> Job | None:
        """Its job in flight; None: it has none."""
        return self.life.job

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running or self.paused)

    @property
    def idle_since(self) -> float | None:
        """Time since which it is idle; None: it has no weights on the device, or has requests."""
        absent = self.residency is Residency.ABSENT and not self.weights.plan.empty
        if not (self.residency is Residency.RESIDENT or absent) or self.has_requests:
            return None
        return max(self.last_used, self.life.resident_since)

    @property
    def given_up(self) -> bool:
        """Whether all requests for which it is or was activated have left before any had a job."""
        if not (self.for_requests and self.life.unused) or self.has_requests:
            return False
        return self.residency in (Residency.RESIDENT, Residency.ACTIVATING)

    @property
    def rotation(self) -> Rotation:
        """Rotation that is ordered, or else in force."""
        wanted = self.life.remap_to
        return self.weights.slots.rotation if wanted is None else wanted.rotation

    @property
    def plan(self) -> ResidencyPlan:
        """Where its units are or, by orders, will be."""
        now, wanted = self.weights.plan, self.life.remap_to
        if wanted is None:
            return now
        return replace(now, rotation=wanted.rotation, in_place=wanted.in_place)

    @property
    def pages_to_take(self) -> int:
        """Pages that an ordered remap will take (negative: free)."""
        slots, now = self.weights.slots, self.weights.plan
        laid = (now.units[i] for i in self.plan.in_place - now.in_place)
        freed = sum(unit.pages for unit in laid if not unit.shared)
        return (slots.rotation.n_freed - self.rotation.n_freed) * slots.layer_pages - freed

    def took(self, seconds: float | None, load: JobLoad, jobs: int = 1) -> None:
        """Record a job that has ended, the last of `jobs` jobs with the same number of tokens.

        `seconds`: its duration without waiting for layers; None: not typical of other jobs."""
        tokens = load.prefill_tokens + load.decode_sequences
        self.step_counts[bisect_left(STEP_BOUNDS, tokens)] += jobs
        self.step_tokens += jobs * tokens
        if seconds is None:
            return
        if load.prefill_chunks:
            self.prefill_seconds = seconds
        else:
            self.decode_seconds = seconds

    def lost_kv(self, r: Request) -> None:
        """Count a request that has lost its KV as preempted."""
        r.undone = len(r.tokens)
        r.preemptions += 1
        self.preemptions += 1

    def cost(self, seconds: float, load: JobLoad) -> None:
        """Update estimated costs: a job with `load` occupied a lane for `seconds`, the engine's own
        time included, waiting for layers excluded."""
        if self.estimator is not None:
            self.estimator.observe(load, seconds)
            self.costs = self.estimator.costs

    def queue_seconds(self, adapter: int | None) -> float | None:
        """Return how long requests for it or for an adapter may wait for admission, seconds; None:
        unbounded."""
        own = None if adapter is None else self.spec.adapters[adapter].queue_seconds
        return self.spec.queue_seconds if own is None else own

    def late(self, now: float) -> int:
        """Return the number of late requests: waiting ones that have used up half of their TTFT
        target, and running ones whose TPOT exceeds its target."""
        slo, waiting, running = self.slo, tuple(self.waiting), tuple(self.running)
        late = sum(r.submission.arrival < now - slo(r).ttft / 2 for r in waiting)
        return late + sum(r.seconds_per_token > slo(r).tpot for r in running)

    def slo(self, r: Request) -> Slo:
        """Return a request's service level: its adapter's, if it uses one."""
        return self.spec.slo_of(r.adapter)

    def phases(self) -> tuple[list[Request], list[Request]]:
        """Split `running` into requests that decode and requests with prefill left."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for r in self.running:
            if r.fetching:
                continue
            (decoding if r.computed == len(r.tokens) - 1 > 0 else prefilling).append(r)
        return decoding, prefilling
