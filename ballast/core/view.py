"""What a policy sees: frozen, complete, cheap to renew (only what changed is rebuilt)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

from ballast.core.cost import StepCosts
from ballast.core.model import ModelSpec
from ballast.core.request import Precedence, next_due
from ballast.core.rotation import WHOLE, Rotation
from ballast.core.traffic import TrafficStats

T = TypeVar("T")


class Residency(enum.Enum):
    """Where a model's weights are."""

    ABSENT = "absent"
    """On the host only."""
    ACTIVATING = "activating"
    """Pages are leased or promised; copies are on their way."""
    RESIDENT = "resident"
    EVICTING = "evicting"
    """Waits for a job in flight, then goes."""
    FAILED = "failed"
    """Its weights could not be brought in; it serves nothing."""


class RequestView(NamedTuple):
    """One request. Times are in seconds on the device's clock."""

    id: str
    order: Precedence
    tokens: int
    """Prompt and output so far."""
    computed: int
    pages: int
    """Pages that preempting it would free now (0 while waiting)."""
    in_flight: bool
    blocks: int
    """Blocks that preempting it would leave to its own model, on pages that others use too."""
    generated: int
    """Tokens of its output so far."""
    max_tokens: int
    """Most tokens that its output may have."""
    due: float
    """When its first token was, or is, due, by its service level: its adapter's, if it asks for
    one."""
    pace: float
    """Seconds per output token after the first, on average, that its service level allows."""
    first: float | None
    """When its first token came; None: it has not."""
    last: float
    """When its last token came; before the first: when it arrived."""
    place: int = 0
    """In its model's queue (`ballast.core.actions.Reorder`)."""

    @property
    def left(self) -> int:
        """Most tokens that it may still generate."""
        return self.max_tokens - self.generated

    @property
    def next_due(self) -> float:
        """When its next token is due: -inf where it cannot keep its service level any more."""
        return next_due(self.due, self.first, self.generated, self.pace)


@dataclass(frozen=True, slots=True)
class SharedView:
    """A segment that several models contain, and the device holds once for all of them."""

    owner: str
    pages: int
    holders: tuple[str, ...]
    """Models on the device that use it, those being evicted left out."""


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
    """Of these, pages that dropping cached prefixes alone would free."""
    loose_pages: int
    """Of these, pages that moving blocks together would free, if none is in flight."""
    limit: int | None
    """Bound on kv_pages, if any."""
    held: bool
    """Waiting requests are not admitted."""
    busy: bool
    """A job of this model is in flight."""
    waiting: tuple[RequestView, ...]
    """In the order in which they are admitted: by priority, place, arrival."""
    running: tuple[RequestView, ...]
    """First come first."""
    slab_pages: int
    """Pages that its KV cache takes and gives back at a time."""
    slab_blocks: int
    """Blocks that lie on so many pages."""
    first_pages: int
    """Pages the first waiting request needs to be admitted (0 if none waits)."""
    last_used: float
    """When it last had a request, in seconds."""
    costs: StepCosts
    shared: tuple[SharedView, ...] = ()
    """Of its weights, what other models contain as well."""
    cached_borrowed: int = 0
    """Borrowed pages, of no account above, that dropping cached prefixes would free."""
    rotatable: tuple[int, ...] = ()
    """Layers that may rotate: of one size, and no other model's."""
    layer_pages: int = 0
    """Pages of each of these."""
    layer_bytes: int = 0
    """Bytes of each, which a load copies."""
    rotation: Rotation = WHOLE
    """In force, or to be as soon as no job stands in the way."""
    decode_seconds: float | None = None
    """Of its last job that only decoded, without waiting for layers; None: there was none."""
    prefill_seconds: float | None = None
    """The same of its last job with a prefill."""

    kv_rotation: Rotation | None = None
    """Layers whose KV rotates, or is to; None: none can."""
    kv_turning: bool = False
    """That is about to change: its requests go on after."""
    kv_layer_pages: int = 0
    """Pages of its KV in each layer that shares none."""
    first_cached_pages: int = 0
    """Of `cached_pages`, those that hold the cached prefix of its first waiting request, which
    lacks pages: dropping them makes it lack as many more."""
    frozen: bool = False
    """No job of the model starts; running requests keep their KV."""
    idle_since: float | None = None
    """When its last request ended, or it became resident if that was later, in seconds; None: it
    is not resident, or has requests, paused ones included."""
    traffic: TrafficStats = field(default_factory=TrafficStats)
    _derived: dict[Callable[[ModelView], Any], Any] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def derived(self, fact: Callable[[ModelView], T]) -> T:
        """Return `fact(self)`, a pure function of the view, computed once. An unchanged model has
        the same view in the next decision, and so needs no computing then either."""
        if fact not in self._derived:
            self._derived[fact] = fact(self)
        found: T = self._derived[fact]
        return found

    @property
    def name(self) -> str:
        return self.spec.name

    def arrival_rate(self, now: float) -> float:
        """Return its requests per second, on average over about the last minute before `now`, a
        time on the device's clock: `DeviceView.now`."""
        return self.traffic.arrivals.per_second(now)

    def expected_outputs(self, request: RequestView) -> int:
        """Return how many tokens one of its requests is expected to generate from now on, at least
        1."""
        return self.traffic.expected_outputs(request.left)

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def own_pages(self) -> int:
        """Of `weight_pages`, those of segments that no other model contains."""
        return self.weight_pages - sum(s.pages for s in self.shared)

    @property
    def freed_pages(self) -> int:
        """Of `own_pages`, those that layers have given up, or will."""
        return self.rotation.n_freed * self.layer_pages

    @property
    def missing_pages(self) -> int:
        """Pages its activation, if absent, needs now: not what other models have brought."""
        return self.own_pages + sum(s.pages for s in self.shared if not s.holders)

    @property
    def evictable_pages(self) -> int:
        """Pages its eviction, if resident, frees now, KV included: not what other models use."""
        alone = sum(s.pages for s in self.shared if s.holders == (self.name,))
        return self.own_pages - self.freed_pages + alone + self.kv_pages

    @property
    def fair_pages(self) -> float:
        """Pages of its weights, each shared one divided by the models that use it now."""
        return self.own_pages + sum(s.pages / max(1, len(s.holders)) for s in self.shared)


@dataclass(frozen=True, slots=True)
class Shortage:
    """A request that could not go on for want of pages."""

    model: str
    request_id: str
    pages: int
    """Pages it asked for."""
    limited: bool
    """The model's own limit stood in the way, not the pool."""
    blocks: int = 0
    """Blocks for which it needs those pages; any that its model gets back will do as well."""
    wanted: int = 0
    """Blocks that it asked for, those included for which there was room."""


@dataclass(frozen=True)
class DeviceView:
    """One device. It does not change, so what follows from it is worked out once (`derived`)."""

    now: float
    page_bytes: int
    total: int
    """Pages of the pool."""
    arena: int
    """Of these, kept for activations."""
    free: int
    reclaiming: int
    """Pages given back that wait for a job in flight."""
    promised: int
    """Pages set aside for layers that stop rotating. Those set aside by the policy's own promises
    are not among them: it states these anew."""
    link_bytes_per_second: float
    """To the device, of a copy that has the link to itself: as the link is paced, else as measured
    on copies so far. Beside others a copy gets a part of that (`ballast.core.link`)."""
    models: tuple[ModelView, ...]
    """In the fleet's order."""
    shortages: tuple[Shortage, ...] = ()
    borrowed: int = 0
    """Pages of other devices that KV may take where free ones are short, and has not."""
    lent: tuple[tuple[str, int], ...] = ()
    """(device, pages) lent to other devices and not recalled."""
    recalled: int = 0
    """Pages recalled from other devices that have not been returned."""
    activation_bytes_per_second: float | None = None
    """At which the last activations brought weights, from their order to the moment when they were
    there, waits for other activations left out; None: none has ended."""
    lenders: tuple[tuple[str, int], ...] = ()
    """(device, pages) of `borrowed`, those of each device; devices of none left out."""

    @property
    def weights_bytes_per_second(self) -> float:
        """At which an activation may be expected to bring weights."""
        return self.activation_bytes_per_second or self.link_bytes_per_second

    @property
    def coming(self) -> int:
        """Pages that are free or will be without further action, less those promised."""
        return self.free + self.reclaiming + self.recalled - self.promised

    def model(self, name: str) -> ModelView:
        """Raises KeyError where the device has no such model."""
        return self.by_name[name]

    @cached_property
    def by_name(self) -> Mapping[str, ModelView]:
        """Models by name."""
        return {m.name: m for m in self.models}

    def derived(self, fact: Callable[[DeviceView], T]) -> T:
        """`fact(self)`, a pure function of the view, worked out once."""
        if fact not in self._derived:
            self._derived[fact] = fact(self)
        found: T = self._derived[fact]
        return found

    @cached_property
    def _derived(self) -> dict[Callable[[DeviceView], Any], Any]:
        return {}
