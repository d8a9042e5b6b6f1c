"""One model on one device: its weights, its KV cache, its costs and its requests."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from ballast.core.cost import StepCosts
from ballast.core.job import Job, Load
from ballast.core.model import ModelSpec
from ballast.core.report import STEP_BOUNDS
from ballast.core.request import Request
from ballast.core.rotation import Rotation
from ballast.core.settings import Slo
from ballast.core.view import ModelView, Residency, Shortage
from ballast.engine.cost_estimator import CostEstimator
from ballast.engine.waiting import Waiting
from ballast.kv.blocks import KvCache
from ballast.kv.swapper import KvSwapper
from ballast.weights.residency import WeightsOnDevice

OUTPUTS_WEIGHT = 0.05
"""Of the request that ended last in `ModelState.mean_outputs`."""


@dataclass(slots=True, eq=False)
class ModelState:
    """One model on this device, and its requests.

    `running`, as `waiting`, is sorted by `Request.order`.
    """

    spec: ModelSpec
    weights: WeightsOnDevice
    kv: KvCache
    costs: StepCosts
    residency: Residency = Residency.ABSENT
    waiting: Waiting = field(default_factory=Waiting)
    running: list[Request] = field(default_factory=list)
    paused: dict[str, Request] = field(default_factory=dict)
    """By id (`ballast.engine.pausing`)."""
    held: bool = False
    frozen: bool = False
    """Held, and its running requests stand still."""
    job: Job | None = None
    """In flight."""
    transfer_id: int | None = None
    shortages: list[Shortage] = field(default_factory=list)
    """Requests that found no pages when its last job was formed."""
    leaving: list[Request] = field(default_factory=list)
    """Requests in flight that are to be preempted when the job ends."""
    blocked: tuple[str, int] | None = None
    """(request, epoch of freed memory) at which the first waiting request last found no room."""
    last_run: float = float("-inf")
    last_used: float = float("-inf")
    resident_since: float = float("-inf")
    """When it became resident last, on the device's clock."""
    lane_seconds: float = 0.0
    """Of the whole device, that its jobs have taken so far: on a part of it, so much less."""
    activations: int = 0
    evictions: int = 0
    preemptions: int = 0
    turning: Rotation | None = None
    """Layers that shall rotate as soon as no job and no load stands in the way."""
    settling: bool = False
    """A `Settled` is bound to come."""
    swapper: KvSwapper | None = None
    """None: its KV cannot be swapped."""
    swap_failed: str | None = None
    """Why its KV could not be moved when that was tried; it is not tried again."""
    swap_to: Rotation | None = None
    """Layers whose KV shall rotate as soon as no job stands in the way."""
    estimator: CostEstimator | None = None
    """Learns `costs` from jobs that end; None: they were measured before."""
    decode_seconds: float | None = None
    """Of its last job that only decoded, without waiting for layers; below, of the last other."""
    prefill_seconds: float | None = None
    job_began: float = 0.0
    """When its job in flight, or its last, was started, on the device's clock."""
    mean_outputs: float | None = None
    """Output tokens of a request, on average over those that ended lately; None: none has."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    step_counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS) + 1))
    """Its jobs, by the number of tokens that each computed (`ballast.core.report.StepTokens`)."""
    step_tokens: int = 0
    """Tokens of all of them."""
    view: ModelView | None = None
    """The snapshot, dropped (None) by whatever changes the model."""

    @property
    def idle_since(self) -> float | None:
        """When it became idle, on the device's clock; None: it is not resident, or has requests."""
        if self.residency is not Residency.RESIDENT or self.waiting or self.running or self.paused:
            return None
        return max(self.last_used, self.resident_since)

    @property
    def rotation(self) -> Rotation:
        """Layers that rotate, or will."""
        return self.weights.slots.rotation if self.turning is None else self.turning

    @property
    def pages_to_take(self) -> int:
        """Pages more that its layers will take (negative: give up) when it has turned."""
        slots = self.weights.slots
        return (slots.rotation.lent - self.rotation.lent) * slots.layer_pages

    def took(self, seconds: float, load: Load) -> None:
        """Note a job that has ended: its `seconds` without waiting for layers, and its tokens."""
        tokens = load.prefill_tokens + load.decode_sequences
        self.step_counts[bisect_left(STEP_BOUNDS, tokens)] += 1
        self.step_tokens += tokens
        if load.prefill_chunks:
            self.prefill_seconds = seconds
        else:
            self.decode_seconds = seconds

    def cost(self, seconds: float, load: Load) -> None:
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
        return self.spec.slo if r.adapter is None else self.spec.adapters[r.adapter].slo

    def expected_outputs(self, r: Request) -> int:
        """Tokens that a request is expected to generate from now on, at least 1."""
        allowed = r.submission.max_tokens - r.generated
        if self.mean_outputs is not None:
            allowed = min(allowed, round(self.mean_outputs))
        return max(1, allowed)

    def ended(self, r: Request) -> None:
        """A request has ended with all of its output."""
        n = float(r.generated)
        before = n if self.mean_outputs is None else self.mean_outputs
        self.mean_outputs = before + (n - before) * OUTPUTS_WEIGHT

    def phases(self) -> tuple[list[Request], list[Request]]:
        """Of `running`, those that decode, and those with prefill left."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for r in self.running:
            (decoding if r.computed == len(r.tokens) - 1 > 0 else prefilling).append(r)
        return decoding, prefilling

    def admit(self, request: Request) -> None:
        """Into `running`, by order."""
        at = len(self.running)
        while at > 0 and self.running[at - 1].order > request.order:
            at -= 1
        self.running.insert(at, request)
