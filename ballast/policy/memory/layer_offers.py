"""Offer the memory of weight layers for KV: which models, how many layers, at what price (MIRAGE).

MIRAGE, sections 5.2 and 5.3. Used by the memory policy `mirage` and by `layer_reversion`. It only
returns offers and `Remap` actions; rotors and slots change which layers rotate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import floor, log2

from ballast.core.actions import Action, Remap
from ballast.core.cost import copy_seconds
from ballast.core.job import JobLoad
from ballast.core.request import Precedence
from ballast.core.rotation import WHOLE, Rotation, best, most, stall
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.page_budget import PageBudget

PROMPT = 512
"""Tokens of the prefill that a model is expected to begin with, before one has been measured."""


@dataclass(frozen=True, slots=True)
class LayerOffers:
    """What models give up of their layers, in one decision, for which one is made.

    A model whose turn it is, or that has requests where there are no turns, is active; it lends
    what its decode steps hide, the others what their next prefill does.
    """

    active: frozenset[str]
    recent: tuple[str, ...]
    """Models, the one used last at the end."""
    cap: bool = True
    """Whether a pass brings no more layers than it can hide (5.3)."""
    slots: int | None = None
    """Slots of each rotation; None: what stalls least."""
    portion: float = 1.0
    """Of a model's layers that can rotate, at most so many are lent."""
    lru: bool = False
    """Whether the model used longest ago lends first, not the one used last."""
    pooled: bool = True
    """Whether the KV of all models comes from one pool."""
    seconds: float = 1.0
    """So long layers of an active model are expected to stay lent."""
    _most: dict[int, tuple[ModelView, int]] = field(default_factory=dict, init=False, compare=False)
    """What `most` has found, by the identity of the model's view, which is kept alive here."""
    _order: dict[tuple[int, bool], tuple[Sequence[ModelView], list[ModelView]]] = field(
        default_factory=dict, init=False, compare=False
    )
    """What `order` has found, likewise."""

    def of_inactive(self, view: DeviceView, claim: Claim) -> Iterator[Offer]:
        """Layers of inactive models, the least important first, each up to its cap."""
        for m in self.order(view.models, active=False):
            yield from self._offers(view, m, self.most(view, m))

    def of_active(self, view: DeviceView, claim: Claim) -> Iterator[Offer]:
        """Layers of active models, each up to its cap; before others its own, for whom they are."""
        models = self.order(view.models, active=True)
        for m in sorted(models, key=lambda m: (m.spec.priority, m.name != claim.model)):
            yield from self._offers(view, m, self.most(view, m))

    def beyond_caps(self, view: DeviceView, claim: Claim) -> Iterator[Offer]:
        """All that can be lent, whatever it costs, for a request that no other one stands before.

        What was accepted is answered, also where a cap has become lower since.
        """
        own = view.model(claim.model)
        oldest = view.derived(_oldest_running) if self.pooled else _oldest([own])
        if oldest is not None and oldest < claim.order:
            return
        first = own.waiting[:1]
        if not claim.may_preempt and (oldest or not first or first[0].order != claim.order):
            return  # it waits for others to end
        for active in (False, True):
            for m in self.order(view.models, active=active):
                yield from self._offers(view, m, self.bound(m))

    def any_left(self, view: DeviceView) -> bool:
        """Whether a model lends less than it may."""
        able = (m for a in (False, True) for m in self.order(view.models, active=a))
        return any(m.rotation.n_freed < self.most(view, m) for m in able)

    def order(self, models: Sequence[ModelView], *, active: bool) -> list[ModelView]:
        """Models with layers to lend, who lends first coming first."""
        known = self._order.get((id(models), active))
        if known is None:
            known = self._order[id(models), active] = models, self._sorted(models, active)
        return known[1]

    def _sorted(self, models: Sequence[ModelView], active: bool) -> list[ModelView]:
        rank = {name: i if self.lru else -i for i, name in enumerate(self.recent)}
        never = -1 if self.lru else 1
        able = [
            m
            for m in models
            if m.layer_pages > 0
            and m.residency is Residency.RESIDENT
            and not m.spec.pinned
            and (m.name in self.active) is active
        ]
        return sorted(able, key=lambda m: (m.spec.priority, rank.get(m.name, never), m.name))

    def bound(self, m: ModelView) -> int:
        """Most layers that a model may ever lend."""
        return most_freeable(m, self.portion, self.slots)

    def most(self, view: DeviceView, m: ModelView) -> int:
        """Most layers that a model lends so that a pass can hide their loads."""
        known = self._most.get(id(m))
        if known is None:
            known = self._most[id(m)] = m, self._hidden(view, m)
        return known[1]

    def _hidden(self, view: DeviceView, m: ModelView) -> int:
        bound = self.bound(m)
        if not self.cap:
            return bound
        n = m.spec.n_layers
        return min(bound, most(n, m.rotatable, 1.0, n * self._ratio(view, m), self.slots))

    def freed(self, m: ModelView, budget: PageBudget) -> int:
        """Layers that a model lends once a decision, as far as it is made, is done."""
        return m.rotation.n_freed + budget.taken(layers_of(m)) // max(1, m.layer_pages)

    def remap(self, m: ModelView, alpha: int, why: str) -> Remap:
        """So many layers, whichever; `settled` chooses, once it is known how many in the end."""
        if alpha <= 0:
            return Remap(m.name, WHOLE, why)
        slots = self.slots or 1
        return Remap(m.name, Rotation(m.rotatable[: alpha + slots], slots), why)

    def settled(self, view: DeviceView, remap: Remap) -> Remap | None:
        """The plan that stalls least, and of several the one that moves fewest layers; None where
        that is no change for the better."""
        m = view.model(remap.model)
        n, ratio = m.spec.n_layers, _rounded(self._ratio(view, m))
        plan = best(n, m.rotatable, remap.rotation.n_freed, 1.0, ratio, 0.0, m.rotation, self.slots)
        if plan is None or plan == m.rotation:
            return None
        if plan.n_freed == m.rotation.n_freed:
            before, after = (stall(n, r, 1.0, ratio) for r in (m.rotation, plan))
            if after >= before:
                return None
        return replace(remap, rotation=plan)

    def _offers(self, view: DeviceView, m: ModelView, top: int) -> Iterator[Offer]:
        """Its layers up to `top`, as one offer of which any number can be taken."""
        freed = m.rotation.n_freed

        def act(pages: int, claim: Claim) -> Remap:
            alpha = freed + pages // m.layer_pages
            return self.remap(m, alpha, f"{claim.model} needs pages")

        if top > freed:
            yield Offer(
                layers_of(m),
                m.name,
                (top - freed) * m.layer_pages,
                lambda: self._harm(view, m, top) - self._harm(view, m, freed),
                act,
                grain=m.layer_pages,
                cumulative=True,
                later=True,
            )

    def _harm(self, view: DeviceView, m: ModelView, alpha: int) -> float:
        """Return the request-seconds expected where a model lends `alpha` layers: in the steps
        while it does, for which all of its requests wait, or in its next prefill, which is less
        likely soon the longer it has not been used.

        A pass is as long as its loads take if they take longer; what even that hides not in time,
        a plan's timeline would tell, which is not made for every offer.
        """
        loads = alpha + (self.slots or 1) if alpha else 0
        copy = copy_seconds(m.layer_bytes, view.link_bytes_per_second)
        own = self._pass(m)
        seconds = max(0.0, loads * copy - own)
        if m.name in self.active:
            return seconds * self.seconds / (own + seconds) * max(1, len(m.running))
        idle = max(0.0, view.now - m.last_used)
        return seconds * (seconds / m.spec.slo.ttft) / (1.0 + idle)

    def _ratio(self, view: DeviceView, m: ModelView) -> float:
        """Copies of a layer in the seconds that one layer computes."""
        copy = copy_seconds(m.layer_bytes, view.link_bytes_per_second)
        return self._pass(m) / m.spec.n_layers / copy

    def _pass(self, m: ModelView) -> float:
        """Seconds of a model's next pass over its layers (T_compute)."""
        if m.name not in self.active:
            return m.prefill_seconds or m.costs.prefill_seconds(PROMPT)
        if m.decode_seconds is not None:
            return m.decode_seconds
        context = sum(r.tokens for r in m.running)
        return m.costs.of(JobLoad(0, 0, 0, max(1, len(m.running)), context))


def layers_of(m: ModelView) -> tuple[str, ...]:
    """Key of the offers of a model's layers."""
    return "layers", m.name


def last_remaps(actions: Iterable[Action]) -> list[Action]:
    """Of the rotations that one model gets in one decision, only the last."""
    actions = list(actions)
    last = {a.model: a for a in actions if isinstance(a, Remap)}
    return [a for a in actions if not isinstance(a, Remap) or a is last[a.model]]


def _rounded(ratio: float) -> float:
    """Down, by less than a tenth."""
    return float(2.0 ** (floor(8 * log2(ratio)) / 8))


def _oldest_running(view: DeviceView) -> Precedence | None:
    return _oldest(view.models)


def _oldest(models: Iterable[ModelView]) -> Precedence | None:
    """Order of the oldest request that runs, if any does."""
    return min((m.running[0].order for m in models if m.running), default=None)


def most_freeable(m: ModelView, portion: float = 1.0, slots: int | None = None) -> int:
    """Layers that a model could lend if nothing hid their loads: one slot is left at least."""
    return max(0, min(int(portion * len(m.rotatable)), len(m.rotatable) - (slots or 1)))
