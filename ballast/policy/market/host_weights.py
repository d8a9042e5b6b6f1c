"""Decide which weights lie on pages while passes could read them in host memory (C2CServe; places
that change are ours).

Read in place, weights take no page and no copy, and requests can begin at once; but each pass takes
as long as the link takes to carry them. On pages they cost once what one more pass would have read,
and go back to host memory without any copy: so free pages are a cache of weights, by segments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ballast.core.actions import Action, Reside
from ballast.core.link_budget import LinkBudget, link_demand
from ballast.core.pass_traffic import decode_bytes
from ballast.core.residency_plan import ResidencyPlan
from ballast.core.rotation import WHOLE
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.claim_and_offer import Claim, Offer
from ballast.policy.market.idle_segments import divided
from ballast.policy.plans import activation, eviction

RESERVE = 0.1
"""Part of the pages that stays free for KV when weights leave host memory."""
BATCH = 0.005
"""Seconds of the link's unreserved part that segments of one copy take. Passes read host memory
until all of it has landed, and wait while its pages are mapped."""
FIRST = 4
"""Waiting requests of a model by which its next passes are judged."""
HOT = 2
"""Least tokens that a running request is still expected to generate, for its model to be hot: a
copy costs the link what one pass reads."""


# -- models that are asked for --------------------------------------------------------------------


def served(view: DeviceView, free: int, *, pages: bool) -> list[Action]:
    """Have each model served that is asked for and runs nothing: passes read what it lacks in host
    memory, or it comes onto `free` pages, if `pages` allows it.

    It comes where the link cannot carry its `W / TPOT` beside the models that read over it already
    (C2CServe, 6.2), so that passes would keep their level on pages alone. Idle models' weights make
    way, those used longest ago first, as far as `RESERVE` stays free.
    """
    actions: list[Action] = []
    spare = free - round(RESERVE * (view.total - view.arena))
    idle = sorted(filter(_gives, view.models), key=lambda m: (m.last_used, m.name))
    asked = [m for m in view.models if _asked_for(m)]
    for m in sorted(asked, key=lambda m: m.waiting[0].order) if pages else asked:
        whole = _on_pages(m) if pages and _is_too_slow(view, m) else None
        room = spare + sum(o.present_pages for o in idle)
        if whole is not None and (wanted := m.plan.to(whole).pages) <= room:
            while wanted > spare:
                gone = eviction(o := idle.pop(0), f"{m.name} is asked for", wanted - spare)
                spare -= o.plan.to(gone.plan).pages
                actions.append(gone)
            spare -= wanted
            actions += _brought(m, whole)
        elif m.residency is Residency.ABSENT:
            actions.append(activation(view, m, "it is asked for", in_place=True))
    return actions


def _asked_for(m: ModelView) -> bool:
    """Whether a model has requests and runs none, and its places can change now."""
    if not m.waiting or m.running or m.busy or m.promoting:
        return False
    return m.residency is Residency.ABSENT or (
        m.residency is Residency.RESIDENT and bool(m.plan.in_place)
    )


def _is_too_slow(view: DeviceView, m: ModelView) -> bool:
    """Whether the link cannot carry what a model's passes would read, for its first requests' next
    tokens."""
    if view.near_host or max(m.expected_outputs(r) for r in m.waiting[:FIRST]) < HOT:
        return False
    return link_demand(decode_bytes(m.spec), m.spec.slo.tpot) > view.derived(_unreserved)


def _on_pages(m: ModelView) -> ResidencyPlan | None:
    """Return the plan in which a model's own units have pages, but for embeddings of which a pass
    reads few rows; None: it contains what other models do, or lacks nothing."""
    if m.shared:
        return None
    first = frozenset({0}) if len(m.plan.units) > m.plan.n_layers + 1 else frozenset[int]()
    on_host = first & (m.plan.in_place | m.plan.absent)
    plan = replace(m.plan, rotation=WHOLE, absent=frozenset(), in_place=on_host)
    return plan if m.plan.to(plan).pages > 0 else None


def _brought(m: ModelView, whole: ResidencyPlan) -> list[Action]:
    """Return what brings a model: what it reads in place is given up first."""
    now, why = m.plan, "it is asked for, and there is room for its weights"
    leaving = now.in_place - whole.in_place
    if not leaving:
        return [Reside(m.name, whole, why)]
    gone = replace(now, absent=now.absent | leaving, in_place=now.in_place - leaving)
    return [Reside(m.name, gone, why), Reside(m.name, whole, why)]


def _gives(m: ModelView) -> bool:
    """Whether an idle model has weights on pages that it can give up at once."""
    there = m.residency in (Residency.ABSENT, Residency.RESIDENT)
    return m.idle and there and not (m.busy or m.promoting or m.spec.pinned) and m.present_pages > 0


# -- onto pages -----------------------------------------------------------------------------------


def weights_home(view: DeviceView, free: int) -> list[Action]:
    """Bring segments of the hottest model onto `free` pages that nobody claims, as far as `RESERVE`
    stays free, in the order in which a pass reads them. Where they do not suffice, idle models'
    weights go back to host memory first, those used longest ago."""
    if view.near_host or any(m.promoting for m in view.models):
        return []
    spare = free - round(RESERVE * (view.total - view.arena))
    for m in sorted(filter(_hot, view.models), key=lambda m: m.derived(_passes), reverse=True):
        units, pages = _next_units(view, m, spare)
        if units:
            plan = replace(m.plan, in_place=m.plan.in_place - units)
            return [Reside(m.name, plan, "it is hot, and there is room for its weights")]
        idle = _laid_of_idle(view, m, pages - spare)
        if idle:
            return idle
    return []


def _hot(m: ModelView) -> bool:
    """Whether a model reads own units in place that it can have pages for, and goes on doing so."""
    there = m.residency is Residency.RESIDENT and next(_own(m), None) is not None
    return there and m.derived(_passes) >= HOT


def _passes(m: ModelView) -> int:
    """Return the passes that a model's running requests are still expected to take."""
    return max((m.expected_outputs(r) for r in m.running), default=0)


def _own(m: ModelView) -> Iterator[int]:
    """Yield the units that passes read in place and no other model contains, in the order in which
    they gain most: layers, what follows them, embeddings, of which a pass reads few rows."""
    order = (*range(1, len(m.plan.units)), 0)
    return (i for i in order if i in m.plan.in_place and not m.plan.units[i].shared)


def _next_units(view: DeviceView, m: ModelView, spare: int) -> tuple[frozenset[int], int]:
    """Return the units of a model to copy next, on at most `spare` pages, and the pages of the
    first of them. The link's part that passes have not reserved bounds the copy, beyond one
    unit. Where passes need more than the link has, all are late, and a copy delays them once and
    shortens all that follow: pages alone bound it."""
    unreserved = view.derived(_unreserved)
    most = unreserved * BATCH if unreserved >= 0 else math.inf
    units: list[int] = []
    pages = n_bytes = 0
    own = list(_own(m))
    for i in own:
        unit = m.plan.units[i]
        if pages + unit.pages > spare or (units and n_bytes + unit.n_bytes > most):
            break
        units.append(i)
        pages, n_bytes = pages + unit.pages, n_bytes + unit.n_bytes
    return frozenset(units), m.plan.units[own[0]].pages


def _unreserved(view: DeviceView) -> float:
    """Return the bytes per second of the link that no running model needs for its TPOT level;
    negative: they need more than it has."""
    reading = (m for m in view.models if m.running and m.plan.in_place)
    needs = {m.name: m.derived(_demand) for m in reading}
    return LinkBudget(view.link_bytes_per_second, needs).free


def _demand(m: ModelView) -> float:
    """Return the bytes per second of the link that a running model needs for its TPOT level."""
    return link_demand(m.plan.share_away * decode_bytes(m.spec), m.spec.slo.tpot)


# -- back to host memory --------------------------------------------------------------------------


def _laid_of_idle(view: DeviceView, hot: ModelView, lacked: int) -> list[Action]:
    """Return what frees `lacked` pages of weights of idle models, if these have as many."""
    actions: list[Action] = []
    for m in sorted(view.models, key=lambda m: (m.last_used, m.name)):
        if lacked > 0 and m.idle and m.residency is Residency.RESIDENT and m.present_pages:
            plan = m.plan.laid(lacked)
            lacked += m.plan.to(plan).pages
            actions.append(Reside(m.name, plan, f"{hot.name} is hot"))
    return actions if lacked <= 0 else []


def copies_to_pages(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer to stop copies of weights that passes read in host memory meanwhile."""
    for m in view.models:
        if m.promoting:
            stop = partial(_lay, m, m.plan)
            yield Offer(("copy", m.name), m.name, m.promoting, float, stop, later=True)


def idle_weights_to_host(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer weights on pages of idle models, which can be read in host memory as well; of those
    used longest ago first, the last layers first."""
    for m in sorted(view.models, key=lambda m: (m.last_used, m.name)):
        if m.idle:
            yield from laid(m)


def weights_to_host(view: DeviceView, claim: Claim) -> Iterator[Offer]:
    """Offer weights on pages of models with requests, whose passes then read them in host memory:
    of those with the fewest passes to come first."""
    busy = (m for m in view.models if not m.idle)
    for m in sorted(busy, key=lambda m: (m.derived(_passes), m.name)):
        yield from laid(m)


def laid(m: ModelView) -> Iterator[Offer]:
    """Offer a resident model's own weights, the last layers first; free of charge."""
    if m.residency is not Residency.RESIDENT:
        return

    def act(pages: int, claim: Claim) -> Reside:
        return _lay(m, m.plan.laid(pages), pages, claim)

    for end, grain in m.derived(divided):
        key = "segments", m.name
        yield Offer(key, m.name, end, float, act, grain=grain, cumulative=True, later=True)


def _lay(m: ModelView, plan: ResidencyPlan, _: int, claim: Claim) -> Reside:
    return Reside(m.name, plan, f"{claim.model} needs pages")
