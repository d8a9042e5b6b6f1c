"""Divide KV memory by quotas that follow each model's demand (MuxServe).

MuxServe (Duan et al., 2024), section 3.3: every model has a quota of token blocks, which is adapted
from time to time by moving blocks from models that use few of theirs to models that use all. The
memory policy of preset `muxserve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ballast.core.actions import Action, Decision, DropCache, Limit
from ballast.core.units import ceil_div
from ballast.core.view import DeviceView, ModelView
from ballast.policy.base import PlacedModels
from ballast.policy.market.claims import kv_claims
from ballast.policy.market.offers import own_younger_requests
from ballast.policy.memory.quota_steps import Use, next_quotas
from ballast.policy.memory.static import Division, cover_within, keep_places, shares


@dataclass(frozen=True, slots=True)
class QuotaMemo:
    """Quotas in pages, and when they were adapted."""

    division: Division
    first: Mapping[str, int]
    """By model, its first quota: its fixed share."""
    since: float
    """When quotas were last adapted or set, in seconds."""


class Wish(NamedTuple):
    """Bounds and weight of one model's part of divided pages."""

    least: float
    most: float
    """Most that the model can use now; at least `least`."""
    weight: float


@dataclass(frozen=True, slots=True)
class Quotas(PlacedModels):
    """Keep every model's weights on the device, and bound its KV by a quota that follows demand.

    Quotas begin as fixed shares (`static`), in proportion to `share`. Every `adapt` seconds, if a
    model could use more than its quota, they are adapted. With `steps`, as section 3.3 has it,
    models that use little of theirs give pages to models that use all of theirs
    (`policy.memory.quota_steps`). Without, which is ours, they are set anew: the KV that present
    requests will have when they end, max-min fair by the model's weight, which is `share` x request
    rate x mean tokens of a request x bytes of KV per token. So KV in use, normalised by rate and
    size, is equal among all models that can use more (Equation 2). The rest is divided by weight.

    A quota is never less than the largest present request needs. As far as that leaves room, it is
    not less than the smaller of the model's fixed share and one request of full context: what is
    accepted can be served, and what `static` accepts is accepted. Pages move as requests free them:
    a shrinking quota comes down to what its model holds, without cached prefixes, and others grow
    by that much. Within its quota a model is served first come first served, its own youngest
    request making way for older ones.
    """

    adapt: float = 5.0
    steps: float = 1

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        known = memo if isinstance(memo, QuotaMemo) else None
        division, actions = keep_places(view, None if known is None else known.division, shares)
        moves: list[Action] = []
        if known is None or known.division.among != division.among:
            adapted = known = QuotaMemo(division, division.pages, view.now)
        elif any(m.name in division.pages and m.derived(wanted) > _quota(m) for m in view.models):
            adapted = self._adapted(view, known)
            moves = transfers(view, adapted.division.pages, sum(adapted.first.values()))
        else:
            adapted = known
        claims, _ = kv_claims(view, waiting=False)
        actions += [*moves, *cover_within(view, claims, [own_younger_requests])]
        # If new quotas change no limit, only another event can.
        may_change = moves or adapted is known
        lacking = may_change and any(s.limited for s in view.shortages)
        return Decision(tuple(actions), adapted, adapted.since + self.adapt if lacking else None)

    def _adapted(self, view: DeviceView, known: QuotaMemo) -> QuotaMemo:
        """Return the present quotas, or new ones if it is time."""
        if view.now < known.since + self.adapt:
            return known
        total = sum(known.first.values())
        models = [m for m in view.models if m.name in known.division.pages]
        wishes = {m.name: wish(view, m, known.first[m.name]) for m in models}
        if sum(w.least for w in wishes.values()) > total:
            # Present requests have precedence over expected ones.
            wishes = {m.name: wish(view, m, 0) for m in models}
        if self.steps:
            pages = next_quotas(_uses(view, models, known.division.pages, wishes))
        else:
            pages = divide(total, wishes)
        division = replace(known.division, pages=pages)
        return replace(known, division=division, since=view.now)


def transfers(view: DeviceView, quotas: Mapping[str, int], total: int) -> list[Action]:
    """Bring models' limits as near to their quotas as the pages in use allow: no limit is less than
    what its model holds, and all limits together are at most `total`."""
    actions: list[Action] = []
    spare = total
    wanting: list[tuple[ModelView, int]] = []
    for m in view.models:
        if m.name not in quotas:
            continue
        limit, quota = _quota(m), quotas[m.name]
        if limit < quota:
            wanting.append((m, quota - limit))
        elif (less := max(quota, m.kv_pages - m.cached_pages)) < limit:
            if m.kv_pages > less:
                why = "other models use more of their quotas"
                actions.append(DropCache(m.name, m.kv_pages - less, why))
            actions.append(Limit(m.name, less, "its quota has shrunk"))
            limit = less
        spare -= limit
    needed = sum(lack for _, lack in wanting)
    for m, lack in wanting:
        more = lack * max(0, spare) // needed if needed > spare else lack
        if more:
            actions.append(Limit(m.name, _quota(m) + more, "its quota has grown"))
    return actions


def wish(view: DeviceView, m: ModelView, first: int) -> Wish:
    """Return the bounds and weight of a model's part of the KV pages.

    `first`: its fixed share, of which at most one request of full context is reserved for it.
    """
    here = (*m.running, *m.waiting)
    needs = [pages_of(m, [r.tokens + max(0, r.left - 1)]) for r in here]
    least = max(min(first, pages_of(m, [m.spec.max_model_len])), *needs, 0)
    return Wish(least, max(least, m.derived(wanted)), weight(view, m))


def weight(view: DeviceView, m: ModelView) -> float:
    """Return a model's weight in dividing KV memory: `share` x requests per second x mean tokens of
    a request x bytes of KV per token.

    MuxServe, section 3.3: R is normalised by request rates, and counts blocks, of which large
    models need more.
    """
    traffic = m.traffic
    tokens = traffic.prompts.mean + traffic.outputs.mean
    if not traffic.outputs.n:
        here = [r.tokens + r.left for r in (*m.running, *m.waiting)]
        tokens = sum(here) / len(here) if here else 0.0
    return m.spec.share * m.arrival_rate(view.now) * tokens * m.spec.kv_bytes_per_token


def wanted(m: ModelView) -> int:
    """Return the KV pages that a model could use: those that its running requests, and the waiting
    ones that may run beside them, are expected to hold when they end."""
    beside = max(0, m.spec.max_running - len(m.running))
    here = (*m.running, *m.waiting[:beside])
    return pages_of(m, [r.tokens + m.expected_outputs(r) for r in here])


def pages_of(m: ModelView, lengths: Sequence[int]) -> int:
    """Return the pages for KV of sequences of the given lengths in tokens, none of it shared."""
    blocks = sum(m.spec.blocks_of(tokens) for tokens in lengths)
    return ceil_div(blocks, m.slab_blocks) * m.slab_pages


def divide(total: int, wishes: Mapping[str, Wish]) -> dict[str, int]:
    """Divide `total` pages max-min fair by weight: each model gets at least its `least`, and more
    than its `most` only if no other can use it.

    What is left is divided by weight, or equally if all weights are 0. If `total` is less than the
    sum of all `least`, each gets its `least`.
    """
    capped = sum(w.most for w in wishes.values())
    weights = {name: w.weight for name, w in wishes.items()}
    if not any(weights.values()):
        weights = dict.fromkeys(wishes, 1.0)
    if capped <= total:
        rest, of = total - capped, sum(weights.values())
        return {n: int(w.most + rest * weights[n] / of) for n, w in wishes.items()}

    def at(level: float) -> dict[str, float]:
        return {n: min(w.most, max(w.least, level * weights[n])) for n, w in wishes.items()}

    low, high = 0.0, max(w.most / weights[n] for n, w in wishes.items() if weights[n] > 0)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle).values()) <= total else (low, middle)
    return {n: math.floor(pages) for n, pages in at(low).items()}


def _uses(
    view: DeviceView,
    models: Sequence[ModelView],
    quotas: Mapping[str, int],
    wishes: Mapping[str, Wish],
) -> dict[str, Use]:
    """Return each model's use of its quota."""
    lacking = {s.model for s in view.shortages if s.limited}
    return {
        m.name: Use(
            quotas[m.name],
            m.kv_pages - m.cached_pages,
            math.ceil(wishes[m.name].least),
            math.ceil(wishes[m.name].most),
            m.name in lacking,
        )
        for m in models
    }


_HALVINGS = 60
"""Bisection steps of the level: at least as many as a float has bits."""


def _quota(m: ModelView) -> int:
    return 0 if m.limit is None else m.limit
