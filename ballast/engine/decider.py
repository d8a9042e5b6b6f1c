"""Call the memory and admission policies with a view of the device, and apply their decisions.

Used by the loop, the dispatcher and the command handler. Keeps the policies' memos; decides nothing
itself.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ballast.core.actions import Action, Refuse
from ballast.core.event import Output
from ballast.core.request import RequestState
from ballast.core.story import Story
from ballast.core.view import DeviceView
from ballast.engine.apply import carry_out
from ballast.engine.state import DeviceState
from ballast.engine.views import device_view
from ballast.policy.memory.defaults import last_resort, within_caps
from ballast.policy.presets import Preset

PUBLISH_SECONDS = 0.5
"""Shortest time between two curves of prices that a device with requests publishes."""


class MemoryDecider:
    """Asks the memory and admission policies; keeps their memos and the times of their timers."""

    def __init__(self, state: DeviceState, preset: Preset, story: Story) -> None:
        self._state, self._story = state, story
        self.preset = preset
        """The policies that decide for the device, its compute policy included. May be replaced."""
        self._memo: object = None
        """Memo of the memory policy."""
        self._admission_memo: object = None
        """Memo of the admission policy."""
        self.wake_at: float | None = None
        """Time at which the memory policy wants to decide again."""
        self.reorder_at: float | None = None
        """Time at which the admission policy wants to decide again; not a remedy if `stuck`."""
        self.expires_at: float | None = None
        """Time at which the next idle model's `ttl` ends."""
        self.while_short = False
        """Whether the memory policy wants to decide again when a shortage has ended."""
        self._published_at = -inf
        self._priced: Preset | None = None
        self._by_price = False
        """Whether the fleet policy of the preset `_priced` reads prices."""

    def decide(self, outputs: list[Output]) -> bool:
        """Ask the policies and apply their actions; returns whether anything has changed."""
        state = self._state
        view = device_view(state)
        expired = self._expire(view, outputs)
        if expired:
            view = device_view(state)
        reordered = self._reorder(view, outputs)
        if reordered:
            view = device_view(state)
        state.asked = state.news.n
        decision = self.preset.memory(view, self._memo)
        self._memo, self.while_short = decision.memo, decision.while_short
        later = decision.wake_at is not None and decision.wake_at > view.now
        self.wake_at = decision.wake_at if later else None
        state.promises.suspend()
        changed = expired or reordered
        for action in decision.actions:
            refusal = carry_out(state, self._story, action, outputs)
            changed = changed or refusal is None
        for action in within_caps(view):
            refusal = carry_out(state, self._story, action, outputs, by="limit")
            changed = changed or refusal is None
        if state.promises.make(decision.promises, state.models):
            self._story.record_promises(view.now, state.promises.stated)
            return True
        return changed

    def _expire(self, view: DeviceView, outputs: list[Output]) -> bool:
        """Evict models whose time to live is over; returns whether there were any."""
        expiry = self.preset.memory.expire(view)
        self.expires_at = expiry.wake_at
        for eviction in expiry.evictions:
            carry_out(self._state, self._story, eviction, outputs, by="ttl")
        return bool(expiry.evictions)

    def _reorder(self, view: DeviceView, outputs: list[Output]) -> bool:
        """Let the admission policy order the queues; returns whether it has changed any."""
        decision = self.preset.admission(view, self._admission_memo)
        self._admission_memo, self.reorder_at = decision.memo, decision.wake_at
        changed = False
        for action in decision.actions:
            refusal = carry_out(self._state, self._story, action, outputs, by="admission")
            changed = changed or refusal is None
        return changed

    def publish(self) -> None:
        """Renew the device's curve of marginal prices where the fleet policy reads it: every
        `PUBLISH_SECONDS`, and when nothing is left to do, as no turn may follow."""
        state, preset = self._state, self.preset
        if preset is not self._priced:
            self._priced, self._by_price = preset, preset.fleet.by_price
        if self._by_price:
            due = state.now >= self._published_at + PUBLISH_SECONDS
            if due or not (state.requests or state.in_flight):
                self._published_at = state.now
                state.prices = preset.memory.prices(device_view(state), self._memo)

    # -- where no decision helps ------------------------------------------------------------------

    @property
    def stuck(self) -> bool:
        """Whether requests could run, but nothing is in flight and no event or timer will come."""
        state = self._state
        if not state.requests or state.in_flight or state.lending.awaiting:
            return False
        if self.wake_at is not None:
            return False
        return any(r.state is not RequestState.PAUSED for r in state.requests.values())

    def resolve_stuck(self, outputs: list[Output], *, shared: bool) -> None:
        """Apply the policy's remedy for a device on which no request can go on.

        The remedy shared by all policies (`last_resort`) is applied if the policy's own one changes
        nothing, or if `shared`: no policy may keep requests waiting for ever.
        """
        if self._state.migration.forget_all():
            return
        view = device_view(self._state)
        changed = False
        if not shared:
            for action in self.preset.memory.when_stuck(view):
                changed = self._apply_remedy(action, outputs) or changed
        if not changed:
            for action in last_resort(view):
                self._apply_remedy(action, outputs)

    def _apply_remedy(self, action: Action, outputs: list[Output]) -> bool:
        """Apply one action of a remedy; returns whether it was done. A running request can be
        refused here as well as a waiting one."""
        state = self._state
        if isinstance(action, Refuse) and action.request_id in state.requests:
            reason = f"preset {self.preset.name!r} found no memory for this request"
            why = f"{reason}: {action.why}"
            self._story.record_decision(state.now, replace(action, why=why), None)
            request = state.requests[action.request_id]
            outputs.append(state.fail(request, "out_of_memory", why))
            return True
        return carry_out(state, self._story, action, outputs, by="shortage") is None
