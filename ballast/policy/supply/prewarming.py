"""Bring weights of models without requests onto pages that nobody claims (as WarmServe does).

They cede at once: weights of idle models are a source like any other, the less likely a request is
the cheaper (`policy.supply.weights`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ballast.core.actions import Action
from ballast.core.view import ModelView, Residency
from ballast.policy.market.harm import TIE
from ballast.policy.market.outlook import Outlook
from ballast.policy.plans import activation
from ballast.policy.supply.weights import STAY, absences

RESERVE = 0.1
"""Part of the pages that stays free beside the KV to be expected."""
LIKELY = 0.1
"""Least probability of a request for which a model comes whose absence makes nobody late."""
LOOK_SECONDS = 1.0
"""Interval at which models are looked at again while there is room for one."""


def prewarmed(
    ahead: Outlook, free: int, gone: Collection[str]
) -> tuple[list[Action], float | None]:
    """Return the activation of the absent model whose absence is expected to harm most, for its
    pages, of those `gone` for which `free` pages suffice; and when to look again (None: with the
    next event).

    One at a time, and none while weights come that requests wait for: they would share the link.
    """
    view = ahead.view
    if any(m.residency is Residency.ACTIVATING for m in view.models):
        return [], None
    spare = free - round(RESERVE * (view.total - view.arena))
    absent = [m for m in view.models if m.name in gone and 0 < m.missing_pages <= spare]
    absent = [m for m in absent if m.idle and m.residency is Residency.ABSENT]
    if not absent:
        return [], None
    spare -= ahead.reserve
    found = [(gain / m.missing_pages, m) for gain, m in _gains(ahead, absent, spare)]
    if not found:
        quiet = not any(m.waiting for m in view.models)
        return [], view.now + LOOK_SECONDS if quiet else None
    _, best = max(found, key=lambda pair: (pair[0], pair[1].name))
    chance = best.traffic.chance(view.now, STAY)
    why = f"a request is expected in {STAY:g} s with {100 * chance:.0f} %, and pages are free"
    return [activation(view, best, why)], None


def _gains(
    ahead: Outlook, absent: list[ModelView], spare: int
) -> Iterator[tuple[float, ModelView]]:
    """Yield models for which so many pages suffice with the harm of their absence, if that is more
    than of one request's waiting for the copy, times `LIKELY`."""
    now = ahead.now
    for m in absent:
        if m.missing_pages <= spare:
            (away,) = absences(ahead, m, [m.missing_pages])
            gain = m.traffic.chance(now, STAY) * away
            if gain > LIKELY * TIE * ahead.copy_seconds(m.missing_pages):
                yield gain, m
