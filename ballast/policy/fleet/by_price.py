"""Lend pages, and move models, to devices where a page is worth more than where it is.

The fleet policy of placement `price` (preset `ballast`). Each device publishes what a page is worth
there (`core.price_curve`); a page changes devices where these prices differ by more than reading it
over the link costs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetAction,
    FleetDecision,
    FleetView,
    LendPages,
    ModelDemand,
    ModelLoad,
    Place,
    RecallPages,
)
from ballast.core.price_curve import PriceCurve
from ballast.core.units import ceil_div
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.initial_placement import spread
from ballast.policy.fleet.migrate import MigrationMemo, ModelHomes, homes_of, under_way
from ballast.policy.fleet.replica_choice import Replica, held_prefix
from ballast.policy.requirements import Requirements

MARGIN = 2.0
"""A model moves only where that avoids this many times the harm that it does, and a page in use is
recalled only by a lender to which it is worth as many times its worth to the borrower."""
LEAST_GAIN = 0.5
"""Expected misses that a move of a model must avoid."""
UNTAKEN = 2
"""Most alternatives that the reason of an action names."""
BUSY = 0.8
"""Part of a device's compute beyond which no model moves there."""


@dataclass(frozen=True, slots=True)
class PriceMemo:
    """Memo: what the policy waits for."""

    migrating: MigrationMemo = field(default_factory=MigrationMemo)
    needless: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By (lender, borrower) since when the borrower has had enough pages of its own, in seconds."""
    tried: Mapping[str, float] = field(default_factory=dict)
    """When a model was moved last, or a move was tried."""


@dataclass(frozen=True, slots=True)
class ByPrice(FleetPolicy):
    """Every `every` seconds, lend pages to devices that would pay more for them than their lender
    and the link between them cost, recall those that have become worth more to their lender, or
    that the borrower has not needed for `window` seconds, and start at most one move of a model.

    Of several lenders the cheapest one lends first; the device that would pay most borrows first.
    Devices that borrow do not lend. A model moves, as under `kvpr` weights first, where the harm
    that its pages avoid on its device, for others and for requests for it that arrive while it is
    absent, exceeds by `MARGIN` what as many pages cost on the other one. It is not moved again for
    `settling` seconds. To another host its weights, and then the KV of its requests, come over the
    network: what a move avoids counts for the part of `settling` that is left then.
    """

    every: float = 1.0
    window: float = 5.0
    settling: float = 60.0

    @property
    def requires(self) -> Requirements:
        return Requirements(following=True)

    @property
    def lends(self) -> bool:
        return True

    @property
    def moves(self) -> bool:
        return True

    @property
    def by_price(self) -> bool:
        return True

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return spread(needs, rooms, by_work=True)

    def route(self, replicas: Sequence[Replica]) -> str:
        """Return a device where the weights are resident: at the target of a move they may be
        loading."""
        return held_prefix([r for r in replicas if r.resident] or replicas)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        before = memo if isinstance(memo, PriceMemo) else PriceMemo()
        curves = {d.name: d.prices for d in view.devices if d.prices is not None}
        lenders: dict[str, set[str]] = defaultdict(set)
        for lender, borrower in view.pairs:
            lenders[borrower].add(lender)
        recalls, needless = self._recalls(view, curves, lenders, before.needless)
        actions: list[FleetAction] = [*recalls, *_lends(view, curves, lenders)]
        homes = homes_of(view)
        leaving, ends = under_way(before.migrating, homes, view.now, self.settling)
        moved: list[FleetAction] = [*ends]
        tried = {m: at for m, at in before.tried.items() if view.now < at + self.settling}
        if not leaving and not moved:
            move = _best_move(view, homes, curves, tried, self.settling)
            if move is not None:
                place, source = move
                moved = [place]
                leaving[place.model] = source, view.now
                tried[place.model] = view.now
        after = PriceMemo(MigrationMemo(leaving), needless, tried)
        return FleetDecision((*actions, *moved), after, view.now + self.every)

    def _recalls(
        self,
        view: FleetView,
        curves: Mapping[str, PriceCurve],
        lenders: Mapping[str, Set[str]],
        before: Mapping[tuple[str, str], float],
    ) -> tuple[list[RecallPages], dict[tuple[str, str], float]]:
        """Return recalls, and since when pages have not been needed that are not recalled yet."""
        found, needless = [], {}
        leases = sorted(view.leases, key=lambda v: (v.lender, -v.pages, v.borrower))
        lacking = {v.lender: curves[v.lender].lacking for v in leases if v.lender in curves}
        home = {v.borrower: curves[v.borrower].free for v in leases if v.borrower in curves}
        for lease in leases:
            standing, pair = lease.pages - lease.recalled, (lease.lender, lease.borrower)
            lender, borrower = curves.get(lease.lender), curves.get(lease.borrower)
            if lender is None or borrower is None or standing <= 0:
                continue
            if lease.lender not in lenders.get(lease.borrower, ()):
                continue
            pages = min(standing, lacking[lease.lender])
            worth = borrower.price_of(pages)
            if pages and lender.price > MARGIN * worth:
                lacking[lease.lender] -= pages
                why = f"a page is worth {lender.price:.2g} to {lease.lender}, {worth:.2g} to"
                found.append(RecallPages(*pair, pages, why=f"{why} {lease.borrower}"))
            elif (pages := min(standing, home[lease.borrower])) > 0:
                home[lease.borrower] -= pages
                since = before.get(pair, view.now)
                if view.now >= since + self.window:
                    why = f"{lease.borrower} has had enough of its own for {self.window:g} s"
                    found.append(RecallPages(*pair, pages, why=why))
                else:
                    needless[pair] = since
        return found, needless


def _lends(
    view: FleetView, curves: Mapping[str, PriceCurve], lenders: Mapping[str, Set[str]]
) -> Iterator[LendPages]:
    """Yield what devices lend: to the one that would pay most first, the cheapest pages first."""
    borrowed: Counter[str] = Counter()
    for lease in view.leases:
        borrowed[lease.borrower] += lease.pages - lease.recalled
    lending = {lease.lender for lease in view.leases}
    wanting = [(-c.price, n) for n, c in curves.items() if c.lacking and n not in lending]
    if not wanting:
        return
    totals = {d.name: d.total for d in view.devices}
    supply = _Supply(curves, borrowed)
    for worth, name in sorted(wanting):
        able = lenders.get(name, frozenset())
        taken = supply.take(curves[name], able, totals[name] - borrowed[name])
        rest = supply.cheapest(able) if taken else {}
        for lender, (pages, price) in taken.items():
            others = [(other, cost) for other, cost in rest.items() if other != lender][:UNTAKEN]
            best = ", ".join(f"{other} at {cost:.2g}" for other, cost in others)
            why = f"a page is worth {-worth:.2g} to {name}, costs {lender} at most"
            why = f"{why} {price:.2g}; {'next best: ' + best if best else 'nobody else can'}"
            yield LendPages(lender, name, pages, why)


class _Supply:
    """What devices that borrow nothing can lend, the cheapest pages first."""

    def __init__(self, curves: Mapping[str, PriceCurve], borrowed: Mapping[str, int]) -> None:
        found: list[tuple[float, str, int]] = []
        for name, curve in curves.items():
            if name not in borrowed:
                start = 0
                for end, price in curve.points:
                    if end > start:
                        found.append((price, name, end - start))
                        start = end
        found.sort()
        self._steps = [(price, name) for price, name, _ in found]
        self._left = [pages for *_, pages in found]
        """Pages of each step that have not been taken."""

    def take(self, curve: PriceCurve, able: Set[str], most: int) -> dict[str, tuple[int, float]]:
        """Take the cheapest pages of those who are `able` to lend, at most so many, for which a
        device would pay more than they and the link cost; returns those of each lender, and the
        highest price of them."""
        taken: dict[str, tuple[int, float]] = {}
        wanted, left = curve.wanted, self._left
        n, worth = wanted.pop() if wanted else (0, 0.0)
        for at, (price, lender) in enumerate(self._steps):
            while left[at] and lender in able:
                if not n:
                    if not wanted:
                        return taken
                    n, worth = wanted.pop()
                pages = min(left[at], n, most)
                if pages <= 0 or price + curve.link >= worth:
                    return taken
                taken[lender] = taken.get(lender, (0, 0.0))[0] + pages, price
                left[at] -= pages
                n -= pages
                most -= pages
        return taken

    def cheapest(self, able: Set[str]) -> dict[str, float]:
        """Return the least price of each of the few cheapest lenders, of those `able`."""
        found: dict[str, float] = {}
        for (price, lender), left in zip(self._steps, self._left, strict=True):
            if left and lender in able:
                found.setdefault(lender, price)
                if len(found) > UNTAKEN:
                    break
        return found


def _best_move(
    view: FleetView,
    homes: Mapping[str, ModelHomes],
    curves: Mapping[str, PriceCurve],
    tried: Mapping[str, float],
    settling: float,
) -> tuple[Place, str] | None:
    """Return the move of a model that avoids most harm beyond what it costs, and the device that it
    leaves: the one where a page is worth most of those that a model can leave; None: none is worth
    it. While its weights come to another host it avoids none of what it would in `settling`
    seconds."""
    found: list[tuple[float, str, str, str, float, float]] = []
    needs = {need.model: need for need in view.needs}
    crowded = [d for d in view.devices if _is_crowded(curves.get(d.name))]
    if not crowded:
        return None
    targets = [_Target.of(d, curves[d.name]) for d in view.devices if d.name in curves]
    for device in sorted(crowded, key=lambda d: (-curves[d.name].price, d.name)):
        curve = curves[device.name]
        for h in device.hosting:
            need = needs.get(h.model)
            if need is None or not h.open_requests or not h.homed or h.model in tried:
                continue
            most = curve.stranded.get(h.model, 0.0) + curve.relief(_held(device, h))
            if most >= LEAST_GAIN and list(homes[h.model].at) == [device.name]:
                for target in targets:
                    cost = target.cost_of(need, h, device)
                    coming = view.seconds_to_host(need, target.device)
                    coming += view.seconds_between(device, target.device, _kv_used(device, h))
                    gain = most * max(0.0, 1.0 - coming / settling)
                    if gain >= LEAST_GAIN and gain > MARGIN * cost:
                        to = target.device.name
                        found.append((cost - gain, h.model, to, device.name, gain, cost))
        if found:
            break
    if not found:
        return None
    found.sort()
    (_, model, to, source, gain, cost), *others = found
    names = [f"{m} to {t} {-less:.2g}" for less, m, t, *_ in others[:UNTAKEN]]
    best = f"; next best: {', '.join(names)}" if names else "; nothing else is worth it"
    why = f"avoids {gain:.2g} expected late requests on {source}, costs {cost:.2g}{best}"
    return Place(model, to, why, activate=True), source


def _is_crowded(curve: PriceCurve | None) -> bool:
    return curve is not None and bool(curve.lacking or curve.stranded)


def _held(device: DeviceLoad, h: ModelLoad) -> int:
    """Return the pages that become free where a model leaves."""
    return ceil_div(h.weights, device.page_bytes) + h.kv_pages


def _kv_used(device: DeviceLoad, h: ModelLoad) -> int:
    """Return the bytes of KV of a model's requests."""
    return (h.kv_pages - h.cached_pages) * device.page_bytes


class _Target(NamedTuple):
    """A device that a model may move to."""

    device: DeviceLoad
    curve: PriceCurve
    work: float
    models: Set[str]
    """Models that it serves already."""

    @classmethod
    def of(cls, device: DeviceLoad, curve: PriceCurve) -> _Target:
        models = {h.model for h in device.hosting if h.homed}
        return cls(device, curve, device.work, models)

    def cost_of(self, need: ModelDemand, h: ModelLoad, source: DeviceLoad) -> float:
        """Return the harm of bringing a model from `source`: of the pages that its weights and the
        KV in use take here, and of the link that carries them; inf: it cannot come."""
        device = self.device
        if device is source or h.model in self.models:
            return inf
        if self.work + h.work > BUSY or need.least > device.room.bytes:
            return inf
        kv = _kv_used(source, h)
        pages = ceil_div(max(need.weights + kv, need.least), device.page_bytes)
        return self.curve.cost(pages) + self.curve.link * ceil_div(kv, device.page_bytes)
