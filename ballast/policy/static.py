"""Fixed shares: every model has its own part of the device for ever (the classical baseline)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ballast.core.actions import Action, Activate, Decision, Limit, Refuse
from ballast.core.view import DeviceView, ModelView
from ballast.policy.cover import cover
from ballast.policy.offers import Claim, own_younger_requests


def shares(view: DeviceView) -> dict[str, int]:
    """KV pages of each model that has a place, by name.

    Models are placed in descending order of their configured share while the weights fit with at
    least one page of KV for each (segments that several contain need room once); what the weights
    leave is divided in proportion to the shares.
    """
    room = view.total - view.arena
    placed: list[ModelView] = []
    there: set[str] = set()
    for m in sorted(view.models, key=lambda m: -m.spec.share):
        pages = m.own_pages + sum(s.pages for s in m.shared if s.owner not in there)
        if pages + 1 <= room:
            placed.append(m)
            room -= pages + 1
            there.update(s.owner for s in m.shared)
    room += len(placed)
    total = sum(m.spec.share for m in placed)
    return {m.name: int(room * m.spec.share / total) for m in placed}


@dataclass(frozen=True, slots=True)
class FixedShares:
    """Activates what has a place, bounds its KV, refuses requests of models without one.

    Within its share a model serves first come first served; when its running requests need more
    than the share, its own youngest is preempted.
    """

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        actions: list[Action] = []
        if memo is None:
            memo = shares(view)
            for name, pages in memo.items():
                actions.append(Limit(name, pages, why="fixed share"))
                actions.append(Activate(name, why="fixed share"))
        assert isinstance(memo, dict)
        for m in view.models:
            if m.name not in memo:
                why = f"{m.name} has no place: the fixed shares of the others fill the device"
                actions += [Refuse(m.name, r.id, why) for r in m.waiting]
        for s in view.shortages:
            m = view.model(s.model)
            for r in m.running:
                if r.id == s.request_id:
                    claim = Claim(m.name, r.order, s.pages, may_preempt=True, blocks=s.blocks)
                    alone = _within(view, m)
                    actions += cover(alone, [claim], [own_younger_requests])
        return Decision(tuple(actions), memo)


def _within(view: DeviceView, m: ModelView) -> DeviceView:
    """The device as a model with a fixed share sees it: nothing is free beyond its limit."""
    limit = m.limit if m.limit is not None else view.total
    return replace(view, free=max(0, limit - m.kv_pages + m.cached_pages), reclaiming=0, promised=0)
