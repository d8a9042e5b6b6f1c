"""Learn how long models with requests are absent, and keep those that came back for a while."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ballast.core.actions import Reside
from ballast.core.cost import copy_seconds
from ballast.core.view import DeviceView, ModelView, Residency
from ballast.policy.market.clearing import MarketResult
from ballast.policy.market.coming_pages import FOREVER
from ballast.policy.market.work_ahead import work_of
from ballast.policy.memory.reactivation import evicted
from ballast.policy.plans import is_activation, is_eviction

ABSENCE_WEIGHT = 0.2
"""Weight of the latest absence of a model in what is learned of them."""
STAY = 2.0
"""Copies of its weights that a model which has come back stays for: another may not have the pages
sooner, unless it must, so that weights are in use for longer than they are on their way."""


@dataclass(frozen=True, slots=True)
class Absences:
    """How long models with requests have been absent, and what their returns displaced: learned, as
    both depend on how much there is to do. Absences count as long as requests that wait for their
    end can be in time: after that nobody is in a hurry to end them."""

    since: Mapping[str, float] = field(default_factory=dict)
    """Models that wait for others, or made way for them, and since when."""
    mean: float | None = None
    """Seconds of such absences that have ended; None: none has."""
    displacing: float = 0.0
    """Part of the returns for which other models with requests had to make way."""
    until: Mapping[str, float] = field(default_factory=dict)
    """Models that have come back, and until when they stay."""
    gone: frozenset[str] = frozenset()
    """Models that made way for others, and have not been back since."""

    def updated(self, view: DeviceView) -> Absences:
        """Return these as of a view: those that have ended are counted."""
        if not self.since and not self.gone and not self.until:
            return self
        since: dict[str, float] = {}
        mean, until = self.mean, {n: at for n, at in self.until.items() if at > view.now}
        for m in view.models:
            at = self.since.get(m.name)
            if at is None:
                continue
            if m.residency is Residency.RESIDENT:
                seconds = view.now - at
                mean = seconds if mean is None else mean + ABSENCE_WEIGHT * (seconds - mean)
                copy = copy_seconds(m.own_pages * view.page_bytes, view.weights_bytes_per_second)
                until[m.name] = view.now + STAY * copy
            elif m.waiting and not _is_lost(view, m):
                since[m.name] = at
        gone = evicted(view, self.gone, ()) if self.gone else self.gone
        return replace(self, since=since, mean=mean, gone=gone, until=until)

    def begun(self, view: DeviceView, cleared: MarketResult) -> Absences:
        """Return these with those that a decision begins."""
        taken = [a.model for a in cleared.actions if isinstance(a, Reside) and is_eviction(a)]
        parked = [name for name in taken if not view.model(name).idle]
        waits = [claim.model for claim in cleared.uncovered if claim.weights]
        waits = [name for name in waits if not _is_lost(view, view.model(name))]
        if not (taken or waits or self.since or self.gone):
            return self
        displacing = self.displacing
        for a in cleared.actions:
            if isinstance(a, Reside) and a.model in self.since and is_activation(view, a):
                displacing += ABSENCE_WEIGHT * (bool(parked) - displacing)
        begun = dict.fromkeys([*parked, *waits], view.now)
        gone = evicted(view, self.gone, cleared.actions) if taken or self.gone else self.gone
        return replace(self, since=begun | dict(self.since), displacing=displacing, gone=gone)

    def turn(self, view: DeviceView) -> float | None:
        """Return the seconds that a model which is absent is expected to be so still; None: nothing
        is known yet. Those that find no way to come make it long: they say nothing of how long one
        that makes way now would be absent (`mean`)."""
        ages = [view.now - at for at in self.since.values()]
        age = sum(ages) / len(ages) if ages else 0.0
        return None if self.mean is None else min(FOREVER, max(self.mean, age))


def _is_lost(view: DeviceView, m: ModelView) -> bool:
    """Whether all waiting requests of a model will miss their levels whatever is done."""
    work = m.derived(work_of)
    return bool((work.lost[: work.waiting] < view.now).all())
