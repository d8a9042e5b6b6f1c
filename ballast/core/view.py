"""Define `DeviceView` and its parts: the frozen snapshot of a device that memory policies read.

Built by the engine before each decision; only views of models that changed are rebuilt. Policies
never change it: they return actions.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ballast.core.cost import StepCosts
from ballast.core.lazy_property import lazy_property
from ballast.core.model import ModelSpec
from ballast.core.request import Precedence, next_due
from ballast.core.residency_plan import NOTHING, ResidencyPlan
from ballast.core.rotation import Rotation
from ballast.core.traffic import TrafficStats

T = TypeVar("T")


class Residency(enum.Enum):
    """State of a model's weights on the device."""

    ABSENT = "absent"
    """The model does not run: all of its weights, or part of them, are on the host only."""
    ACTIVATING = "activating"
    """Pages are allocated or promised; copies are in progress."""
    RESIDENT = "resident"
    EVICTING = "evicting"
    """Eviction waits for a job in flight."""
    FAILED = "failed"
    """Weights could not be loaded onto the device; the model serves nothing."""


class RequestView(NamedTuple):
    """One request. Times are in seconds on the device's clock."""

    id: str
    order: Precedence
    tokens: int
    """Tokens of prompt and output so far."""
    computed: int
    pages: int
    """Pages that preempting it would free now (0 while waiting)."""
    in_flight: bool
    blocks: int
    """Blocks that preempting it would free on pages that also hold other requests' blocks: these
    pages stay with its model."""
    generated: int
    """Tokens of its output so far."""
    max_tokens: int
    """Bound of the tokens of its output."""
    due: float
    """Deadline of its first token by the service level of its model or adapter."""
    pace: float
    """Seconds per output token after the first, on average, that its service level allows."""
    first: float | None
    """Time of its first token; None: there is none yet."""
    last: float
    """Time of its last token; before the first: its arrival."""
    place: int = 0
    """Place in its model's queue (`ballast.core.actions.Reorder`)."""
    streams: bool = False
    """Whether its full blocks are staged on the host: it needs pages for a chunk alone."""
    undone: int = 0
    """Tokens that it had when it last lost its KV by preemption, or after it; 0: it never has."""
    staged: int = 0
    """Its blocks on the host."""
    turn: int = 0
    """Round of its tenant; in a queue, lower ones of a place come first."""

    @property
    def left(self) -> int:
        """Bound of the tokens that it may still generate."""
        return self.max_tokens - self.generated

    @property
    def next_due(self) -> float:
        """Deadline of its next token; -inf if it can no longer keep its service level."""
        return next_due(self.due, self.first, self.generated, self.pace)


@dataclass(frozen=True, slots=True)
class SharedView:
    """A segment of weights that several models contain and the device holds once."""

    owner: str
    pages: int
    holders: tuple[str, ...]
    """Models on the device that use it, without those being evicted."""


class StagingView(NamedTuple):
    """KV blocks of a model's running requests on the host and on the device."""

    staged: int
    """Blocks on the host, or to be there after the next job."""
    home: int
    """Full blocks on the device."""
    room: int
    """Most blocks on the host."""
    slots: int
    """Layers of each staged block on the device at a time."""
    streamed: int
    """Blocks on the host of requests that stream, which never come home."""
    moving: bool
    """Whether an order to move blocks is being carried out."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model on this device."""

    spec: ModelSpec
    residency: Residency
    weight_pages: int
    """Pages its weights take when resident, shared segments included."""
    kv_pages: int
    """Pages that back its KV now, cached prefixes included."""
    cached_pages: int
    """Part of `kv_pages` that dropping cached prefixes would free."""
    loose_pages: int
    """Part of `kv_pages` that compaction would free, if no job is in flight."""
    limit: int | None
    """Bound of `kv_pages`; None: no bound."""
    held: bool
    """Whether admission of waiting requests is stopped."""
    busy: bool
    """Whether a job of this model is in flight."""
    waiting: tuple[RequestView, ...]
    """Waiting requests in order of admission: by priority, place, turn of the tenant, arrival."""
    running: tuple[RequestView, ...]
    """Running requests, first come first."""
    slab_pages: int
    """Pages of a slab, the unit in which its KV cache grows and shrinks."""
    slab_blocks: int
    """Blocks of a slab."""
    first_pages: int
    """Pages the first waiting request needs to be admitted (0 if none waits)."""
    last_used: float
    """Time at which it last had a request, in seconds."""
    costs: StepCosts
    shared: tuple[SharedView, ...] = ()
    """Segments of its weights that other models contain as well."""
    cached_borrowed: int = 0
    """Borrowed pages, not counted above, that dropping cached prefixes would free."""
    rotatable: tuple[int, ...] = ()
    """Layers that may rotate: of equal size, and not shared with other models."""
    layer_pages: int = 0
    """Pages of each rotatable layer."""
    layer_bytes: int = 0
    """Bytes of each rotatable layer, which a load copies."""
    decode_seconds: float | None = None
    """Seconds of its last decode-only job, without stalls; None: there was none."""
    prefill_seconds: float | None = None
    """Seconds of its last job with a prefill, without stalls; None: there was none."""

    staging: StagingView | None = None
    """None: its blocks cannot be staged."""
    first_cached_pages: int = 0
    """Part of `cached_pages` that holds the cached prefix of its first waiting request, if that
    lacks pages: dropping them increases its shortage by as many."""
    frozen: bool = False
    """Whether jobs of the model are stopped; running requests keep their KV."""
    idle_since: float | None = None
    """Time since when it has weights on the device without any request, in seconds; None: it has
    none there, or has requests, paused ones included."""
    cached_of: tuple[tuple[str, int], ...] = ()
    """Pages that hold cached prefixes only, by tenant."""
    cached_chances: Callable[[], tuple[float, ...]] = field(
        default=tuple, compare=False, repr=False
    )
    """Computes the chances that equal parts of its cached prefixes are used again, in the order in
    which they would be dropped; none: nothing is known."""
    given_up: bool = False
    """Whether it is resident, or its weights are loading, without any request, and all requests for
    which it was activated have left before any had a job."""
    traffic: TrafficStats = field(default_factory=TrafficStats)
    promoting: int = 0
    """Pages to which segments read in host memory are being copied, beside passes; 0: none are, or
    the copy is being stopped."""
    plan: ResidencyPlan = NOTHING
    """Where its weights and KV are, or will be by orders."""
    guaranteed_pages: int = 0
    """Pages of KV that are the model's alone: they are in `DeviceView.arena`, and in no other count
    of this view, nor are what the model has on them, and what it needs and they hold."""
    kept_pages: int = 0
    """Pages guaranteed to its weights that these do not have yet, in `DeviceView.promised`."""
    cap: int | None = None
    """Most `kv_pages` by the fleet file (`limit`); None: no bound."""
    _derived: dict[Callable[[ModelView], Any], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def derived(self, fact: Callable[[ModelView], T]) -> T:
        """Return `fact(self)`, a pure function of the view, computed once. An unchanged model keeps
        its view, and the result, in the next decision."""
        try:
            found: T = self._derived[fact]
        except KeyError:
            found = self._derived[fact] = fact(self)
        return found

    @property
    def name(self) -> str:
        return self.spec.name

    def arrival_rate(self, now: float) -> float:
        """Return its mean requests per second over about the last minute before `now` (pass
        `DeviceView.now`)."""
        return self.traffic.rate(now)

    def expected_outputs(self, request: RequestView) -> int:
        """Return the expected number of tokens that a request will still generate, at least 1."""
        return self.traffic.expected_outputs(request.left)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def rotation(self) -> Rotation:
        """Rotation of its layers of weights."""
        return self.plan.rotation

    @property
    def own_pages(self) -> int:
        """Part of `weight_pages` in segments that no other model contains."""
        return self.weight_pages - sum(s.pages for s in self.shared)

    @property
    def freed_pages(self) -> int:
        """Part of `own_pages` that rotating layers have freed, or will."""
        return self.rotation.n_freed * self.layer_pages

    @property
    def present_pages(self) -> int:
        """Pages on the device of segments that no other model contains, slots included."""
        return self.plan.device_pages

    @property
    def missing_pages(self) -> int:
        """Pages that an absent model's activation needs now, without segments that are on the
        device, and pages that are kept for it."""
        own = max(0, self.plan.missing_pages - self.kept_pages)
        return own + sum(s.pages for s in self.shared if not s.holders)

    @property
    def evictable_pages(self) -> int:
        """Pages that its eviction frees now, KV included, without segments that others use."""
        alone = sum(s.pages for s in self.shared if s.holders == (self.name,))
        return self.present_pages + alone + self.kv_pages

    @property
    def fair_pages(self) -> float:
        """Pages of its weights, each shared segment divided by the number of models that use it."""
        return self.own_pages + sum(s.pages / max(1, len(s.holders)) for s in self.shared)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that cannot go on because pages are missing."""

    model: str
    request_id: str
    pages: int
    """Pages that it requested."""
    limited: bool
    """Whether its model's own limit is the cause, not the pool."""
    blocks: int = 0
    """Blocks for which it needs those pages; blocks that its model gets back serve as well."""
    wanted: int = 0
    """Blocks that it requested, including those for which there was room."""


@dataclass(frozen=True)
class DeviceView:
    """Snapshot of one device. Immutable, so derived values are computed once (`derived`)."""

    now: float
    page_bytes: int
    total: int
    """Pages of the pool."""
    arena: int
    """Part of `total` kept for activations."""
    free: int
    reclaiming: int
    """Freed pages that are allocatable when a job in flight ends."""
    promised: int
    """Pages reserved for layers that stop rotating; without those reserved by the policy's own
    promises, which it restates."""
    link_bytes_per_second: float
    """Rate to the device of a copy that has the link to itself: the link's pace, else as measured.
    Beside other copies it gets a share (`ballast.core.link`)."""
    models: tuple[ModelView, ...]
    """Models of the device, in the fleet's order."""
    shortages: tuple[Shortage, ...] = ()
    borrowed: int = 0
    """Unused pages borrowed from other devices, for KV when free pages are short."""
    lent: tuple[tuple[str, int], ...] = ()
    """(device, pages) lent to other devices and not recalled."""
    recalled: int = 0
    """Pages recalled from other devices that have not been returned."""
    activation_bytes_per_second: float | None = None
    """Rate of recent activations from order to arrival, without waits for other activations; None:
    none has ended."""
    lenders: tuple[tuple[str, int], ...] = ()
    """(device, pages) of `borrowed`, by lending device; devices without any are absent."""
    reads_host: bool = False
    """Whether passes can read weights in host memory."""
    kv_fetch_bytes_per_second: float = 0.0
    """Rate at which KV that is kept in tiers below the device comes back; 0: none is kept."""
    near_host: bool = False
    """Whether passes read host memory as fast as the device's: it is the same, and has no pace."""
    weights_in_place: bool = False
    """Whether the policy leaves all weights in host memory, and so all pages to KV."""
    peer_bytes_per_second: float | None = None
    """Rate at which passes read KV on borrowed pages; None: that of the link."""

    def borrowable(self, m: ModelView) -> int:
        """Return the pages in `borrowed` that a model's KV can use: none if its slabs have several
        pages."""
        return self.borrowed if m.slab_pages == 1 else 0

    def first_lacks(self, m: ModelView) -> int:
        """Return the pages that a resident model's first waiting request needs of others: its own
        cached prefixes, which may be part of it, and unused borrowed pages are there already."""
        borrowed = m.cached_borrowed + self.borrowable(m)
        return max(0, m.first_pages - m.cached_pages - borrowed)

    @property
    def weights_bytes_per_second(self) -> float:
        """Expected rate of an activation: as of recent ones, else that of the link."""
        return self.activation_bytes_per_second or self.link_bytes_per_second

    @property
    def coming(self) -> int:
        """Pages that are free or will be without further action, less those promised."""
        return self.free + self.reclaiming + self.recalled - self.promised

    def model(self, name: str) -> ModelView:
        """Return the view of a model. Raises KeyError if the device has no such model."""
        return self.by_name[name]

    @lazy_property
    def by_name(self) -> Mapping[str, ModelView]:
        """Models by name."""
        return {m.name: m for m in self.models}

    def derived(self, fact: Callable[[DeviceView], T]) -> T:
        """Return `fact(self)`, a pure function of the view, computed once."""
        try:
            found: T = self._derived[fact]
        except KeyError:
            found = self._derived[fact] = fact(self)
        return found

    @lazy_property
    def _derived(self) -> dict[Callable[[DeviceView], Any], Any]:
        return {}
