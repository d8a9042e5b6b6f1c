"""Bring weights of models without requests onto pages that nobody claims (as WarmServe does).

Prewarmed weights are the first to go when pages are needed: weights of idle models are offered like
any other pages, the cheaper the less likely a request is (`policy.supply.weights`).
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
"""Share of the pages that stays free beside the expected KV."""
LIKELY = 0.1
"""Least probability of a request within `STAY` seconds at which a model is prewarmed though no
request would be late without it."""
LOOK_SECONDS = 1.0
"""Seconds until the next look while there is room for a model."""


def choose_prewarm(
    ahead: Outlook, free: int, gone: Collection[str]
) -> tuple[list[Action], float | None]:
    """Choose the absent model whose absence is expected to harm most per page, and activate it.

    `free`: free pages; `gone`: names of models whose weights are absent. Returns the activation, if
    any, and when to look again (None: at the next event). One model at a time, and none while
    another is activated: both would share the link.
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
    """Yield (expected harm of its absence, model) for each that fits into `spare` pages.

    Left out: those whose expected harm is below `LIKELY` times that of one request that waits for
    the copy.
    """
    now = ahead.now
    for m in absent:
        if m.missing_pages <= spare:
            (away,) = absences(ahead, m, [m.missing_pages])
            gain = m.traffic.chance(now, STAY) * away
            if gain > LIKELY * TIE * ahead.copy_seconds(m.missing_pages):
                yield gain, m
