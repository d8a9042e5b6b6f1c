"""Leave weights in host memory, where passes read them; the device holds KV (C2CServe, 4).

Pages that KV leaves free hold weights of models that are hot, segment by segment, until KV needs
them (decision 110).

The memory policy of preset `c2cserve`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.actions import Action, Decision
from ballast.core.view import DeviceView
from ballast.policy.base import PlacedModels
from ballast.policy.market.claims import kv_claims
from ballast.policy.market.cover import cover
from ballast.policy.market.host_weights import (
    copies_to_pages,
    idle_weights_to_host,
    served,
    weights_home,
    weights_to_host,
)
from ballast.policy.market.offers import (
    cached_prefixes,
    lent_pages,
    loose_blocks,
    own_prefix,
    younger_requests,
)
from ballast.policy.memory.defaults import last_resort, unservable
from ballast.policy.requirements import Requirements

_SOURCES = (
    copies_to_pages,
    idle_weights_to_host,
    cached_prefixes,
    loose_blocks,
    lent_pages,
    weights_to_host,
    younger_requests,
    own_prefix,
)
_AT_ONCE = -1.0
"""Patience that makes every claim overdue at once, whatever the model's service level."""


@dataclass(frozen=True, slots=True)
class HostDirect(PlacedModels):
    """Read every model's weights in place; share all pages of the device among the models' KV.

    A model is mapped when it is first asked for, and stays: while it is idle, its cached prefixes
    and its weights on pages make way for others. For requests that cannot go on, or have
    waited for `patience` of their TTFT service level, younger requests are preempted.
    """

    patience: float = 0.5
    reserve_link: float = 1
    """1: passes have W / TPOT of a link that devices share, in the mean (C2CServe, 6.2); 0: equal
    parts."""
    knob: float = 1
    """0: `os_share` stays as it is. On CPUs neither means anything."""
    os_share: float = 0
    """Share of output-stationary columns at the start (C2CServe, 6.4)."""
    promote: float = 1
    """1: weights of hot models come onto pages that are free; 0: all stay in host memory, as the
    paper has it. Nothing comes where host memory is the device's."""

    @property
    def requires(self) -> Requirements:
        return Requirements(in_place=True)

    def __call__(self, view: DeviceView, memo: object) -> Decision:
        claims, wake = kv_claims(view, waiting=True, patience=self.patience)
        free, pages = view.free - view.promised, bool(self.promote and not claims)
        actions = served(view, free, pages=pages)
        covered = cover(view, claims, _SOURCES)
        if pages and not actions:
            actions += weights_home(view, free)
        return Decision((*actions, *covered.actions), None, wake, covered.promises)

    def when_stuck(self, view: DeviceView) -> Sequence[Action]:
        """Undo younger work at once, of any model; use the common last resort if there is none, or
        if the device could not serve some request alone."""
        if unservable(view) is not None:
            return last_resort(view)
        if absent := served(view, 0, pages=False):
            return absent
        claims, _ = kv_claims(view, waiting=True, patience=_AT_ONCE)
        return cover(view, claims, _SOURCES).actions or last_resort(view)
