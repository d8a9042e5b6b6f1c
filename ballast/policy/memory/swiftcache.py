"""Stage KV of running requests on the host, read layer by layer, before undoing work (SwiftCache).

The memory policy of preset `swiftcache`. Its layer stream cache and regular cache are not of fixed
sizes (3.2): blocks are staged as pages are needed, slots take as much as is staged, and blocks come
home when pages are free. What is lent between devices is a matter of the fleet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from ballast.core.actions import Action, Decision
from ballast.core.view import DeviceView
from ballast.policy.market.claim_and_offer import Source
from ballast.policy.market.claims import activation_claims, shortage_claims
from ballast.policy.market.cover import cover
from ballast.policy.market.offers import cached_prefixes
from ballast.policy.market.staged_blocks import bring_home, staged_blocks
from ballast.policy.memory.balloon import AT_ONCE, Balloon
from ballast.policy.memory.defaults import LendAnswer, caches_in_order
from ballast.policy.requirements import Requirements


@dataclass(frozen=True, slots=True)
class SwiftCache(Balloon):
    """As `Balloon`; but before work is undone, KV blocks of running requests go to the host.

    They are staged as long as a decode step hides their copies, but for `slack` of its time, and
    come home while nobody waits and `reserve` of the pages stay free. A request whose context is
    longer than the device's KV streams: of its full blocks none stays.
    """

    slack: float = 0.02

    @property
    def requires(self) -> Requirements:
        return Requirements(kv_staging=True)

    def sources(self, before: Sequence[Source], undoing: Sequence[Source]) -> list[Source]:
        return [*before, staged_blocks(self.slack), *undoing]

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Stage whatever can be before work is undone, however long steps become."""
        absent, _ = activation_claims(view, AT_ONCE)
        short, _ = shortage_claims(view, AT_ONCE)
        found = cover(view, [*absent, *short], [cached_prefixes, staged_blocks(inf)]).actions
        return found or Balloon.when_stuck(self, view)

    def lend(self, view: DeviceView, to: str, pages: int) -> LendAnswer:
        """Cached prefixes make way for what is lent."""
        return LendAnswer(
            caches_in_order(view, pages - view.free + view.promised, f"{to} borrows pages")
        )

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        decision = Balloon.__call__(self, view, memo)
        if view.shortages or decision.actions:
            return decision
        spare = view.free - view.promised - round(self.reserve * (view.total - view.arena))
        return replace(decision, actions=tuple(bring_home(view, max(0, spare))))
