"""Carry out operators' commands within a device's loop, and report when each has ended.

Used by `Loop` only. Commands are activate, evict, join, leave, change, lend and recall; where
policies have the same action, `apply` carries it out. `ballast.live.command_executor` loads a model
into the host tier before, and gives memory back to the machine after the command to do so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ballast.core.actions import (
    ActivateCommand,
    Change,
    EvictCommand,
    Join,
    Leave,
    Lend,
    LoopCommand,
    Recall,
    ReleaseMemory,
    ScrubKv,
)
from ballast.core.errors import ConfigError
from ballast.core.event import CommandEvent, Output
from ballast.core.levels import at_levels
from ballast.core.model import ModelSpec
from ballast.core.story import Story
from ballast.core.units import ceil_div
from ballast.core.view import Residency
from ballast.engine import layer_remap
from ballast.engine.apply import apply, carry_out
from ballast.engine.decider import MemoryDecider
from ballast.engine.life_rules import Membership
from ballast.engine.model import ModelState
from ballast.engine.reside import Refusal, reside
from ballast.engine.sizing import check_room, largest_jobs
from ballast.engine.state import DeviceState
from ballast.engine.story_snapshot import model_entry
from ballast.engine.views import device_view
from ballast.weights.shared import SharedSegment

CommandEnded = Callable[[str, str | None], None]
"""Called with (id of the command, reason why it failed; None: it succeeded)."""
REMOVED = "the model is being removed from this server"


class CommandHandler:
    """Begins commands and keeps those that have not ended. All but `ready` is used by the loop's
    thread only."""

    def __init__(
        self,
        state: DeviceState,
        decider: MemoryDecider,
        story: Story,
        answered: CommandEnded | None,
    ) -> None:
        self._state = state
        self._decider = decider
        self._story = story
        self._answered = answered or (lambda id, refusal: None)
        self.pending: dict[str, LoopCommand] = {}
        """Commands that have begun and not ended, by id."""
        self.ready: dict[str, tuple[ModelState, dict[str, SharedSegment]]] = {}
        """Models that may join, by name, with the segments that they share with other models.

        Set by the command executor before it posts `Join`."""

    def begin(self, event: CommandEvent, outputs: list[Output]) -> None:
        """Carry a command out, or begin to. It takes precedence over pages promised to claims."""
        self._state.promises.withdraw()
        refused = self._try(event.command, outputs)
        self._story.record_decision(self._state.now, event.command, refused, by=event.by)
        lasting = (ActivateCommand, EvictCommand, Leave, Recall)
        if refused is None and isinstance(event.command, lasting):
            self.pending[event.id] = event.command
        else:
            self._answered(event.id, refused)

    def settle(self, outputs: list[Output]) -> None:
        """End pending commands that are complete or have failed; called after events."""
        # The last first: an earlier command may have waited for its end.
        for id, wanted in reversed(list(self.pending.items())):
            over, refusal = self._look(wanted, outputs)
            if over:
                del self.pending[id]
                self._answered(id, refusal)

    def give_up(self, why: str) -> None:
        """Fail all pending commands, because the loop ends."""
        for id in self.pending:
            self._answered(id, why)
        self.pending.clear()

    # -- what each begins with --------------------------------------------------------------------

    def _try(self, wanted: LoopCommand, outputs: list[Output]) -> Refusal:
        state = self._state
        if isinstance(wanted, Lend):
            return self._lend(wanted, outputs)
        if isinstance(wanted, Recall):
            return apply(state, wanted, outputs)
        if isinstance(wanted, ScrubKv):
            return self._scrub(wanted)
        if isinstance(wanted, ReleaseMemory):
            return None  # done beside the loop: free pages concern none of its models
        if isinstance(wanted, Join):
            return self._join(wanted.model, outputs)
        if isinstance(wanted, Leave) and wanted.at_once and wanted.model not in state.named:
            there = state.models.get(wanted.model)
            if there is not None and there.life.stay is Membership.LEAVING:
                return None
        if wanted.model not in state.named:
            return f"no model {wanted.model!r} on this device"
        m, adapter = state.named[wanted.model]
        if isinstance(wanted, Change):
            return self._change(m, adapter, wanted)
        if adapter is not None:
            return f"{wanted.model} is an adapter; ask for its base, {m.spec.name}"
        if isinstance(wanted, Leave):
            state.stop_accepting(m)
            return None
        if isinstance(wanted, ActivateCommand):
            m.quarantine.lift(s.name for s in m.spec.served)
            if m.residency in (Residency.RESIDENT, Residency.ACTIVATING):
                return None
            return reside(state, m, m.plan.completed(in_place=state.weights_in_place))
        absent = m.residency is Residency.ABSENT and m.weights.plan.empty
        if absent or m.residency is Residency.EVICTING:
            return None
        return reside(state, m, m.plan.without(wanted.pages))

    def _lend(self, wanted: Lend, outputs: list[Output]) -> Refusal:
        answer = self._decider.preset.memory.lend(device_view(self._state), wanted.to, wanted.pages)
        if answer.refusal is not None:
            return answer.refusal
        for action in answer.actions:
            carry_out(self._state, self._story, action, outputs)
        lease = self._state.lending.lend(wanted.to, wanted.pages)
        if isinstance(lease, str):
            return lease
        self._story.record_lease(lease)
        return None

    def _scrub(self, wanted: ScrubKv) -> Refusal:
        for m in self._state.models.values():
            if wanted.model in (None, m.spec.name):
                m.kv.prefixes.scrub(wanted.tenant)
        return None

    def _join(self, name: str, outputs: list[Output]) -> Refusal:
        """Add a prepared model to the device, or change nothing and return the reason.

        Needs room for its weights and KV, and pages for its largest jobs' activations."""
        state, settings = self._state, self._state.settings
        m, shared = self.ready.pop(name)
        self._story.record_join(model_entry(m))
        for known in (name, *(a.name for a in m.spec.adapters)):
            if known in state.named or known in state.models:
                return f"there is a model {known!r} already"
        for other in state.models.values():
            moving = other.weights.may_be_loading or other.life.remap_to is not None
            if moving and other.weights.may_rotate(shared):
                whose = other.spec.name
                return f"layers that it has in common with {whose} rotate now; evict {whose} first"
        present = [*state.models.values(), m]
        wanted = largest_jobs((o.spec for o in present), settings)
        arena = max(state.arena.pages, ceil_div(wanted, settings.page_bytes))
        too_small = self._too_small_for(m.spec)
        if too_small is not None:
            return too_small
        if not self._grow_arena(arena, outputs):
            return (
                f"its largest jobs take {arena - state.arena.pages} pages of activations more than "
                "are set aside, and they are not free; evict a model first"
            )
        for other in state.models.values():
            other.weights.share(shared)
        state.enrol(m)
        return None

    def _too_small_for(self, spec: ModelSpec) -> Refusal:
        """Return why not every model could be served with `spec` on the device; None: each could.

        It replaces the model's present spec, if it has one."""
        state = self._state
        others = [m.spec for m in state.models.values() if m.spec.name != spec.name]
        in_place, aside = state.weights_in_place, state.set_aside
        try:
            check_room(spec, others, state.settings, in_place=in_place, aside=aside)
        except ConfigError as error:
            return str(error)
        return None

    def _grow_arena(self, pages: int, outputs: list[Output]) -> bool:
        """Grow the arena to `pages`, from free pages and those that the policy frees; return
        whether it succeeded."""
        state = self._state

        def missing() -> int:
            return pages - state.arena.pages - state.pool.available(state.arena.owner)

        if missing() > 0:
            for action in self._decider.preset.memory.grow_activations(
                device_view(state), missing()
            ):
                carry_out(state, self._story, action, outputs)
                if missing() <= 0:
                    break
        return state.arena.resize(pages * state.settings.page_bytes) is None

    def _change(self, m: ModelState, adapter: int | None, c: Change) -> Refusal:
        """Replace the levels of a model or adapter, or change nothing and return the reason: a
        model is promised no memory without which another could never be served."""
        if adapter is None:
            spec = at_levels(m.spec, c)
            promised = (spec.pinned, spec.guarantee, spec.limit)
            if promised != (m.spec.pinned, m.spec.guarantee, m.spec.limit):
                too_small = self._too_small_for(spec)
                if too_small is not None:
                    return too_small
            m.spec = spec
            self._state.keep_promises(m)
        else:
            adapters = list(m.spec.adapters)
            adapters[adapter] = at_levels(adapters[adapter], c)
            m.spec = replace(m.spec, adapters=tuple(adapters))
        return None

    # -- what each ends with ----------------------------------------------------------------------

    def _look(self, wanted: LoopCommand, outputs: list[Output]) -> tuple[bool, Refusal]:
        """Return whether a command has ended, and the reason if it has failed."""
        state = self._state
        if isinstance(wanted, Recall):
            return not state.lending.awaits(wanted.to), None
        assert not isinstance(wanted, Lend | ReleaseMemory | ScrubKv)  # which end at once
        m = state.models.get(wanted.model)
        if m is None:
            return True, None if isinstance(wanted, Leave) else REMOVED
        if isinstance(wanted, Leave):
            return self._leave(m, wanted, outputs), None
        if isinstance(wanted, ActivateCommand):
            failed = m.residency is Residency.FAILED
            refusal = f"the weights of {wanted.model!r} could not be brought in" if failed else None
            return m.residency is not Residency.ACTIVATING, refusal
        return m.residency is not Residency.EVICTING, None

    def _leave(self, m: ModelState, wanted: Leave, outputs: list[Output]) -> bool:
        state = self._state
        if wanted.at_once:
            for request in [*m.running, *m.waiting, *m.paused.values()]:
                if not request.in_flight:
                    outputs.append(state.fail(request, "unavailable", REMOVED))
        if m.running or m.waiting or m.paused or m.job is not None:
            return False
        if m.residency in (Residency.ACTIVATING, Residency.EVICTING):
            return False  # bytes may still be on their way into its pages
        if m.weights.promotion.awaited:
            m.weights.promotion.cancel()
            m.version.n += 1
            return False
        if m.weights.may_be_loading:
            if m.residency is Residency.RESIDENT:
                layer_remap.request_eviction(state, m)
            return False
        if m.life.settling:
            return False
        state.remove_model(m)
        return True
