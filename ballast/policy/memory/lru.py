"""Keep whole models with their reserved KV while they fit; evict the least recently used one.

The memory policy of preset `lru`: how Ollama and llama.cpp's router share a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ballast.core.actions import Action, Decision, Hold, Limit
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.base import MemoryPolicy
from ballast.policy.market.claims import earliest, kv_claims, shortage_claims
from ballast.policy.market.cover import cover
from ballast.policy.market.offers import (
    cached_prefixes,
    idle_models,
    lent_pages,
    oldest,
    own_younger_requests,
    younger_models,
    younger_requests,
)
from ballast.policy.market.starvation import next_owed, owes_first_token, unserved_since
from ballast.policy.memory.balloon import undo_younger_work
from ballast.policy.memory.static import cover_limited, recalls, request_pages
from ballast.policy.plans import activation, eviction

_WHERE_RESERVATIONS_OVERLAP = (
    cached_prefixes,
    lent_pages,
    idle_models,
    younger_requests,
    younger_models,
)
"""Sources of pages beside pinned models, and models that an operator has loaded."""


@dataclass(frozen=True, slots=True)
class LeastRecentlyUsed(MemoryPolicy):
    """Load a model when it is requested, with KV reserved for `parallel` of the longest requests
    to expect.

    Loaded models stay while they fit. For the absent model whose request has waited longest, idle
    models are evicted, the least recently used first. If that is not enough, the model that has
    been loaded for longest, and for at least `quantum` seconds, admits no more requests, finishes
    its running ones, and is evicted; at once, if the absent model owes a first token
    (`starvation.owes_first_token`) to a request that came before all to which the loaded one owes
    one. Within its reservation a model preempts its own youngest request.
    """

    parallel: float = 4
    quantum: float = 1.0

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        reserved = {m.name: self._reservation(view, m) for m in view.models}
        actions: list[Action] = [
            Limit(m.name, reserved[m.name], why="reserved for its requests")
            for m in view.models
            if m.limit != reserved[m.name]
        ]
        loaded = _loaded_since(view, memo)
        wanted = [m for m in view.models if _wanted(m)]
        owed = {m.name for m in wanted if owes_first_token(view, m)}
        wanted.sort(key=lambda m: (m.name not in owed, oldest(m)))
        room = Reservations(view, reserved)
        draining: set[str] = set()
        wake = None
        for heir in wanted:
            evictions = room.evict_for(heir, _idle_by_last_use(view))
            if evictions is None:
                draining, wake = self._drain_for(view, heir, room, loaded)
                drained = (m for m in view.models if m.name in draining)
                at_once = heir.name in owed
                ready = [m for m in drained if not m.running or (at_once and _after(m, heir))]
                evictions = room.evict_for(heir, [*_idle_by_last_use(view), *ready])
            if evictions is None:
                break
            gone = {m.name for m in evictions}
            actions += [
                eviction(m, why=f"used least recently, {heir.name} is requested") for m in evictions
            ]
            freed = sum(m.evictable_pages for m in evictions)
            actions += recalls(view, heir.missing_pages - freed)
            actions.append(activation(view, heir, why="requests wait for it"))
            draining -= gone
            if draining:
                break
        for m in view.models:
            if m.held != (m.name in draining):
                why = "makes room for a model that is requested" if not m.held else "stays"
                actions.append(Hold(m.name, m.name in draining, why))
        short, _ = shortage_claims(view, patience=math.inf)
        covered = cover(view, short, _WHERE_RESERVATIONS_OVERLAP)
        within = replace(view, shortages=tuple(s for s in view.shortages if s.limited))
        limited, _ = kv_claims(within, waiting=False)
        actions += [*covered.actions, *cover_limited(view, limited, [own_younger_requests])]
        wake = earliest(wake, next_owed(view) if wanted else None)
        return Decision(tuple(actions), loaded, wake, covered.promises)

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Undo younger work at once, of any model."""
        return undo_younger_work(view)

    def _reservation(self, view: DeviceView, m: ModelView) -> int:
        """Return the KV pages reserved for a model: those of `parallel` of the longest
        requests to expect, or what its weights and pinned models leave."""
        pinned = sum(o.weight_pages for o in view.models if o.spec.pinned and o is not m)
        alone = view.total - view.arena - pinned - m.weight_pages
        return max(m.slab_pages, min(int(self.parallel * request_pages(m)), alone))

    def _drain_for(
        self, view: DeviceView, heir: ModelView, room: Reservations, loaded: Mapping[str, float]
    ) -> tuple[set[str], float | None]:
        """Return the busy models to drain so that `heir` fits once they are evicted, and when the
        next one may be drained."""
        busy = [m for m in view.models if _evictable(m) and not m.idle]
        busy.sort(key=lambda m: (not m.held, loaded[m.name], m.name))
        may = [m for m in busy if m.held or view.now >= loaded[m.name] + self.quantum]
        later = [loaded[m.name] + self.quantum for m in busy if m not in may]
        chosen = room.fewest_for(heir, [*_idle_by_last_use(view), *may])
        if chosen is None:
            return {m.name for m in busy if m.held}, earliest(*later)
        return {m.name for m in chosen if not m.idle}, None


class Reservations:
    """Pages that loaded models, with their reservations, leave on a device."""

    def __init__(self, view: DeviceView, reserved: Mapping[str, int]) -> None:
        self._pages = view.total - view.arena
        self._reserved = reserved
        self._there = {m.name: m for m in view.models if _on_device(m)}

    def evict_for(
        self, heir: ModelView, candidates: Sequence[ModelView]
    ) -> Sequence[ModelView] | None:
        """Count `heir` as loaded, in place of the first `candidates` that must go for it; None: it
        does not fit, and nothing changes."""
        chosen = self.fewest_for(heir, candidates)
        if chosen is not None:
            for m in chosen:
                del self._there[m.name]
            self._there[heir.name] = heir
        return chosen

    def fewest_for(
        self, heir: ModelView, candidates: Sequence[ModelView]
    ) -> Sequence[ModelView] | None:
        """Return the first `candidates` whose eviction makes room for `heir`; None: all do not."""
        there = dict(self._there)
        chosen: list[ModelView] = []
        following = iter([m for m in candidates if m.name in there])
        while self._used([*there.values(), heir]) > self._pages:
            if (m := next(following, None)) is None:
                # Beside models that are never evicted it loads all the same.
                return chosen if all(o.spec.pinned for o in there.values()) else None
            del there[m.name]
            chosen.append(m)
        return chosen

    def _used(self, models: Sequence[ModelView]) -> int:
        shared = {s.owner: s.pages for m in models for s in m.shared}
        own = sum(m.own_pages + self._reserved[m.name] for m in models)
        return own + sum(shared.values())


def _loaded_since(view: DeviceView, memo: object) -> dict[str, float]:
    """Return since when each model is loaded, in seconds."""
    before: Mapping[str, float] = memo if isinstance(memo, dict) else {}
    here = (m.name for m in view.models if m.residency is Residency.RESIDENT)
    return {name: before.get(name, view.now) for name in here}


def _wanted(m: ModelView) -> bool:
    return bool(m.waiting) and m.residency is Residency.ABSENT


def _on_device(m: ModelView) -> bool:
    return m.residency in (Residency.RESIDENT, Residency.ACTIVATING, Residency.EVICTING)


def _evictable(m: ModelView) -> bool:
    return m.residency is Residency.RESIDENT and not m.spec.pinned


def _after(m: ModelView, heir: ModelView) -> bool:
    """Whether all requests to which a model owes a first token came after the first of `heir`'s: of
    two models that evicted each other at once, none would ever end a prompt."""
    return m.derived(unserved_since) > heir.derived(unserved_since)


def _idle_by_last_use(view: DeviceView) -> list[ModelView]:
    """Return the unpinned models without requests, the least recently used first."""
    idle = [m for m in view.models if _evictable(m) and m.idle]
    return sorted(idle, key=lambda m: (m.last_used, m.name))
