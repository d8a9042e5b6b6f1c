"""Swap KV blocks of running requests to the host instead of preempting requests, as Pie does.

The memory policy of preset `kvswap`: a baseline that MIRAGE is compared with. Passes read swapped
blocks layer by layer through slots, behind the work of other layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ballast.core.actions import Action, DropCache
from ballast.core.view import DeviceView, ModelView
from ballast.policy.market.claim_and_offer import Claim, Source
from ballast.policy.market.page_budget import PageBudget
from ballast.policy.market.staged_blocks import bring_home, pages_away, staged_blocks
from ballast.policy.memory.recompute import Recompute
from ballast.policy.memory.static import placed, unused
from ballast.policy.requirements import Requirements


@dataclass(frozen=True, slots=True)
class KvSwap(Recompute):
    """`Recompute`, except that KV blocks of running requests go to the host before any request is
    preempted.

    They go as long as a decode step hides their copies, but for `slack` of its time (`cap` 0: as
    long as there are any), each time enough for `ahead` times the model's present KV. They come
    home while `reserve` of the KV pages stay free and no request lacks any, in place of cached
    prefixes.
    """

    cap: float = 1
    slack: float = 0.02
    ahead: float = 0.1
    reserve: float = 0.1

    @property
    def requires(self) -> Requirements:
        return Requirements(kv_staging=True)

    def sparing(self) -> Sequence[Source]:
        return (staged_blocks(self.slack if self.cap else inf, self.ahead),)

    def unmet(self, view: DeviceView, claims: list[Claim]) -> list[Claim]:
        return [c for c in claims if not _moving(view.model(c.model))]

    def freed(self, view: DeviceView, actions: Sequence[Action]) -> bool:
        return bool(actions) or any(map(_moving, view.models))

    def when_free(self, view: DeviceView, budget: PageBudget | None) -> list[Action]:
        if budget is None:
            within = ((m, unused(view, m) - round(self.reserve * _share(m))) for m in view.models)
            return [action for m, spare in within for action in bring_home(view, spare, (m,))]
        spare = budget.free - round(self.reserve * placed(view, pooled=True)[1])
        actions, away = list[Action](), sum(map(pages_away, view.models))
        for m in view.models:
            pages = min(m.cached_pages, away - spare)
            if pages > 0:
                actions.append(DropCache(m.name, pages, "blocks on the host come home"))
                spare += pages
        home = bring_home(view, spare)
        return [*actions, *home] if home else []


def _moving(m: ModelView) -> bool:
    """Whether blocks of the model go to the host, or come home, with its next job."""
    return m.staging is not None and m.staging.moving


def _share(m: ModelView) -> int:
    return m.limit or 0
