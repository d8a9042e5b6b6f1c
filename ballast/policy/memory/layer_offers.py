"""Offer the memory of weight layers for KV: which models, how many layers, at what price (MIRAGE).

MIRAGE, sections 5.2 and 5.3. Used by the memory policy `mirage` and by `layer_reversion`. It only
returns offers and plans; slots and streams change which layers rotate.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, log2

from ballast.core.actions import Action, Reside
from ballast.core.cost import copy_seconds
from ballast.core.job import JobLoad
from ballast.core.request import Precedence
from ballast.core.rotation import WHOLE, Rotation, best, most, stall
from ballast.core.view import DeviceView, ModelView, RequestView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.plans import is_activation, is_eviction, last_plans, remap

PROMPT = 512
"""Tokens of the first prefill expected of a model, until one has been measured."""


@dataclass(frozen=True, slots=True)
class LayerOffers:
    """Offers of layers' memory in one decision; made anew for each decision.

    An active model has requests and, where models take turns, has the turn. Active models give up
    as many layers as their decode steps can hide the loads of, inactive ones as many as their next
    prefill can.
    """

    active: frozenset[str]
    recent: tuple[str, ...]
    """Names of models, the one used last at the end."""
    cap: bool = True
    """Whether a model gives up no more layers than a pass can hide the loads of (5.3)."""
    slots: int | None = None
    """Slots of each rotation; None: the number that stalls least."""
    portion: float = 1.0
    """Largest part of a model's rotatable layers that it may give up."""
    lru: bool = False
    """Whether the model used longest ago gives up layers first, instead of the one used last."""
    pooled: bool = True
    """Whether the KV of all models comes from one pool."""
    seconds: float = 1.0
    """Seconds for which an active model is expected to do without its layers."""
    stall: float = 0.5
    """Most seconds for which a request may wait for layers beyond the caps, over its answer."""
    _most: dict[int, tuple[ModelView, int]] = field(default_factory=dict, init=False, compare=False)
    """Results of `most`, by the identity of the model's view, which is kept alive here."""
    _order: dict[tuple[int, bool], tuple[Sequence[ModelView], list[ModelView]]] = field(
        default_factory=dict, init=False, compare=False
    )
    """Results of `order`, likewise."""

    def of_inactive(self, view: DeviceView, claim: Claim) -> Iterator[Offer]:
        """Offer layers of inactive models, the least important first, each up to its cap."""
        for m in self.order(view.models, active=False):
            yield from self._offers(view, m, self.most(view, m))

    def of_active(self, view: DeviceView, claim: Claim) -> Iterator[Offer]:
        """Offer layers of active models, each up to its cap; the claim's own model first within a
        priority."""
        models = self.order(view.models, active=True)
        for m in sorted(models, key=lambda m: (m.spec.priority, m.name != claim.model)):
            yield from self._offers(view, m, self.most(view, m))

    def beyond_caps(self, view: DeviceView, claim: Claim) -> Iterator[Offer]:
        """Offer layers beyond the caps if no older request is before the claim's, as many as make
        no request wait longer than `stall` in all.

        So an accepted request is served even if a cap has become lower since.
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
                requests = [*m.running, *first] if m is own else m.running
                yield from self._offers(view, m, self.bearable(view, m, requests))

    def bearable(self, view: DeviceView, m: ModelView, requests: Iterable[RequestView]) -> int:
        """Return the most layers that a model may give up while none of `requests` waits for
        layers for longer than `stall`: in the passes of its whole answer, or, if there are no
        requests, in the next prefill."""
        top, cap = self.bound(m), self.most(view, m)
        passes = _passes(m, requests)
        while top > cap:
            plan = self._plan(view, m, top)
            if plan is not None and passes * self._stall(view, m, plan) <= self.stall:
                break
            top -= 1
        return top

    def stalls(self, view: DeviceView, m: ModelView) -> bool:
        """Return whether requests of an active model that gives up more layers than its cap wait
        for them longer than `stall`."""
        if not self.cap or m.rotation.n_freed <= self.most(view, m):
            return False
        passes = _passes(m, (*m.running, *m.waiting[:1]))
        return passes * self._stall(view, m, m.rotation) > self.stall

    def _plan(self, view: DeviceView, m: ModelView, alpha: int) -> Rotation | None:
        n, ratio = m.spec.n_layers, _rounded(self._ratio(view, m))
        return best(n, m.rotatable, alpha, 1.0, ratio, 0.0, m.rotation, self.slots)

    def _stall(self, view: DeviceView, m: ModelView, plan: Rotation) -> float:
        """Return the seconds for which a pass waits for layers."""
        copy = copy_seconds(m.layer_bytes, view.link_bytes_per_second)
        return copy * stall(m.spec.n_layers, plan, 1.0, _rounded(self._ratio(view, m)))

    def wait_seconds(self, view: DeviceView, m: ModelView, alpha: int) -> float:
        """Return the seconds for which each pass waits for layers if a model gives up `alpha`."""
        plan = self._plan(view, m, alpha) if alpha else None
        return 0.0 if plan is None else self._stall(view, m, plan)

    def any_left(self, view: DeviceView) -> bool:
        """Whether some model gives up fewer layers than its cap allows."""
        able = (m for a in (False, True) for m in self.order(view.models, active=a))
        return any(m.rotation.n_freed < self.most(view, m) for m in able)

    def order(self, models: Sequence[ModelView], *, active: bool) -> list[ModelView]:
        """Return the models with layers to give up, the first to do so first."""
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
        """Return the most layers that a model may ever give up."""
        return most_freeable(m, self.portion, self.slots)

    def most(self, view: DeviceView, m: ModelView) -> int:
        """Return the most layers that a model may give up while a pass hides their loads (its
        cap)."""
        known = self._most.get(id(m))
        if known is None:
            bound, n = self.bound(m), m.spec.n_layers
            if self.cap and bound:
                hidden = most(n, m.rotatable, 1.0, n * self._ratio(view, m), self.slots)
                bound = min(bound, hidden)
            known = self._most[id(m)] = m, bound
        return known[1]

    def remap(self, m: ModelView, alpha: int, why: str) -> Reside:
        """Return a plan that frees `alpha` layers, any of them; `choose` chooses which, once the
        final number is known."""
        if alpha <= 0:
            return remap(m, WHOLE, why)
        slots = self.slots or 1
        return remap(m, Rotation(m.rotatable[: alpha + slots], slots), why)

    def choose(self, view: DeviceView, actions: Iterable[Action]) -> list[Action]:
        """Choose the layers of the last remap of each model; leave out those that are no better
        than the present ones. Other actions stay."""
        chosen = (self._with_best_layers(view, a) for a in last_plans(actions))
        return [action for action in chosen if action is not None]

    def _with_best_layers(self, view: DeviceView, asked: Action) -> Action | None:
        """Choose the layers of a remap and their slots: the plan that stalls least, weighed against
        the layers that it remaps; None if it is no better than the present one."""
        if not isinstance(asked, Reside) or is_eviction(asked) or is_activation(view, asked):
            return asked
        m = view.model(asked.model)
        n, ratio = m.spec.n_layers, _rounded(self._ratio(view, m))
        plan = self._plan(view, m, asked.plan.rotation.n_freed)
        if plan is None or plan == m.rotation:
            return None
        if plan.n_freed == m.rotation.n_freed:
            before, after = (stall(n, r, 1.0, ratio) for r in (m.rotation, plan))
            if after >= before:
                return None
        return remap(m, plan, asked.why)

    def _offers(self, view: DeviceView, m: ModelView, top: int) -> Iterator[Offer]:
        """Offer a model's layers up to `top`, as one divisible offer."""
        freed = m.rotation.n_freed

        def act(pages: int, claim: Claim) -> Reside:
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
        """Return the request-seconds of delay expected while a model gives up `alpha` layers.

        Active models: in their steps meanwhile, for which all their running requests wait. Inactive
        ones: in their next prefill, which is less likely soon the longer the model has been unused.

        A pass is taken to last as long as its loads if these take longer. Stalls within a pass that
        is long enough overall are ignored: they would need the plan's timeline, which is not made
        for every offer.
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
        """Return the copies of a layer that fit in the compute time of one layer."""
        copy = copy_seconds(m.layer_bytes, view.link_bytes_per_second)
        return self._pass(m) / m.spec.n_layers / copy

    def _pass(self, m: ModelView) -> float:
        """Return the seconds of a model's next pass over its layers (T_compute)."""
        if m.name not in self.active:
            return m.prefill_seconds or m.costs.prefill_seconds(PROMPT)
        if m.decode_seconds is not None:
            return m.decode_seconds
        context = sum(r.tokens for r in m.running)
        return m.costs.of(JobLoad(0, 0, 0, max(1, len(m.running)), context))


def layers_of(m: ModelView) -> tuple[str, ...]:
    """Return the key of the offers of a model's layers."""
    return "layers", m.name


def freed_layers(m: ModelView, budget: PageBudget) -> int:
    """Return the layers that a model gives up once the decision, as made so far, is done."""
    return m.rotation.n_freed + budget.taken(layers_of(m)) // max(1, m.layer_pages)


def _passes(m: ModelView, requests: Iterable[RequestView]) -> int:
    """Return the passes of the longest answer; 1 without requests."""
    return max((r.generated + m.expected_outputs(r) for r in requests), default=1)


def _rounded(ratio: float) -> float:
    """Round a ratio down, by less than a tenth."""
    return float(2.0 ** (floor(8 * log2(ratio)) / 8))


def _oldest_running(view: DeviceView) -> Precedence | None:
    return _oldest(view.models)


def _oldest(models: Iterable[ModelView]) -> Precedence | None:
    """Return the precedence of the oldest running request; None if none runs."""
    return min((m.running[0].order for m in models if m.running), default=None)


def most_freeable(m: ModelView, portion: float = 1.0, slots: int | None = None) -> int:
    """Return the layers that a model could give up if stalls did not matter: at least one slot is
    left."""
    return max(0, min(int(portion * len(m.rotatable)), len(m.rotatable) - (slots or 1)))
