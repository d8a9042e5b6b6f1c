"""Compute the turns of models that are served one at a time while the others' requests wait.

Used by the memory policies with option `temporal` (`recompute`, `mirage`, `kvswap`), and in part by
`swap` and by first come first served (`ballast.policy.compute.basic_orders`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from ballast.core.actions import Action, Hold
from ballast.core.view import DeviceView, ModelView, Residency


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """The model that has the turn, and since when."""

    model: str
    since: float
    """Seconds; infinite while its weights are loading."""
    past: tuple[str, ...] = ()
    """Models that had turns before, the latest last."""

    def then(self, model: str, now: float) -> ModelTurn:
        """Return the turn of `model`, which follows this one."""
        past = (*(name for name in self.past if name != self.model), self.model)
        return ModelTurn(model, now, past)


class TurnPhase(enum.Enum):
    """Phase of a turn while other models wait for its end."""

    LASTS = enum.auto()
    DRAINS = enum.auto()
    """The model admits no more requests; those that run finish."""
    OVER = enum.auto()


def phase(
    turn: ModelTurn, current: ModelView, now: float, quantum: float, preemptive: bool = False
) -> TurnPhase:
    """Return the phase of `current`'s turn.

    `quantum`: seconds in which it may admit requests; even if it is 0, those that wait when the
    turn begins are admitted.
    """
    up = now >= turn.since + quantum and now > turn.since
    if current.idle or (up and (preemptive or not current.running)):
        return TurnPhase.OVER
    return TurnPhase.DRAINS if up else TurnPhase.LASTS


@dataclass(frozen=True, slots=True)
class RoundRobinTurns:
    """Turns of `quantum` seconds, in the fleet's order, of resident models that have requests.

    A turn whose time is up drains: it ends when its running requests have finished. A `preemptive`
    turn ends at once instead: running requests pause, keep their KV, and go on in the model's next
    turn; it also ends early, when the model can form no job for want of pages and another model can
    (`yielded`).

    A policy calls `current`, then frees pages for the view that `served` returns, and at last sets
    the `holds`.
    """

    quantum: float
    preemptive: bool = False

    def current(self, view: DeviceView, turn: ModelTurn | None) -> ModelTurn | None:
        """Return the turn that holds from now on."""
        heir = self._following(view, turn)
        if heir is None or self._phase(view, turn) is not TurnPhase.OVER:
            return turn
        return ModelTurn(heir, view.now) if turn is None else turn.then(heir, view.now)

    def served(self, view: DeviceView, turn: ModelTurn | None) -> DeviceView:
        """Return the view as it is once the `holds` are set, without shortages of frozen models,
        whose requests claim no pages."""
        wanted = self._wanted(view, turn)
        models = tuple(
            m
            if (m.held, m.frozen) == wanted[m.name]
            else replace(m, held=wanted[m.name][0], frozen=wanted[m.name][1])
            for m in view.models
        )
        lack = tuple(s for s in view.shortages if not wanted[s.model][1])
        return replace(view, models=models, shortages=lack)

    def yielded(self, view: DeviceView, turn: ModelTurn | None) -> ModelTurn | None:
        """Return the turn from now on where a decision frees no pages.

        It is that of the next model that can run, if the present one cannot and no pages are on
        their way to it.
        """
        if not self.preemptive or turn is None or view.coming > view.free - view.promised:
            return turn
        current = _resident(view, turn.model)
        if current is None or not starved(view, current):
            return turn
        heir = self._following(view, turn, able=True)
        return turn if heir is None else turn.then(heir, view.now)

    def holds(self, view: DeviceView, turn: ModelTurn | None) -> list[Action]:
        """Hold every model that does not have the turn, or whose turn drains, and release the
        others."""
        wanted = self._wanted(view, turn)
        actions: list[Action] = []
        for m in view.models:
            held, frozen = wanted[m.name]
            if (held, frozen) != (m.held, m.frozen):
                its_turn = turn is not None and m.name == turn.model
                why = "its turn is over" if its_turn and held else "its turn"
                why = why if its_turn else "another model's turn"
                actions.append(Hold(m.name, held, why, frozen))
        return actions

    def up_at(self, view: DeviceView, turn: ModelTurn | None) -> float | None:
        """Return when the turn's time is up; None if no model waits for that, or if all wait for
        pages that no turn will bring (the loop then finds itself stuck)."""
        if turn is None or self._phase(view, turn) is not TurnPhase.LASTS or _helpless(view):
            return None
        return None if self._following(view, turn) is None else turn.since + self.quantum

    def _wanted(self, view: DeviceView, turn: ModelTurn | None) -> dict[str, tuple[bool, bool]]:
        """Return, by model, whether it is to be held, and whether frozen."""
        drains = (
            self._phase(view, turn) is TurnPhase.DRAINS and self._following(view, turn) is not None
        )
        rest = True, self.preemptive
        wanted = dict.fromkeys((m.name for m in view.models), rest)
        if turn is not None and turn.model in wanted:
            wanted[turn.model] = drains, False
        return wanted

    def _phase(self, view: DeviceView, turn: ModelTurn | None) -> TurnPhase:
        current = None if turn is None else _resident(view, turn.model)
        if turn is None or current is None:
            return TurnPhase.OVER
        return phase(turn, current, view.now, self.quantum, self.preemptive)

    def _following(
        self, view: DeviceView, turn: ModelTurn | None, able: bool = False
    ) -> str | None:
        """Return the model that has the next turn; None if no other one has work. `able`: consider
        only models that do not lack pages."""
        names = [m.name for m in view.models]
        last = turn.model if turn is not None else None
        first = names.index(last) + 1 if last in names else 0
        for m in view.models[first:] + view.models[:first]:
            works = bool(m.waiting) or (self.preemptive and bool(m.running))
            if not works or m.residency is not Residency.RESIDENT or m.name == last:
                continue
            if not (able and starved(view, m)):
                return m.name
        return None


def starved(view: DeviceView, m: ModelView) -> bool:
    """Whether a model has requests, and each that could run next lacks more pages than are free."""
    free = max(0, view.free - view.promised) + view.borrowable(m) + m.cached_pages
    return not m.busy and not m.idle and _lack_more(view, m, free)


def _helpless(view: DeviceView) -> bool:
    """Whether nothing runs, and every request that could run next lacks more pages than can be
    freed from caches."""
    if any(m.busy for m in view.models):
        return False
    room = view.coming + sum(pages for _, pages in view.lent)
    room += sum(m.cached_pages for m in view.models)
    here = (m for m in view.models if not m.idle and m.residency is Residency.RESIDENT)
    return all(_lack_more(view, m, room + view.borrowable(m)) for m in here)


def _lack_more(view: DeviceView, m: ModelView, pages: int) -> bool:
    """Whether each request of a model that could run next lacks more than `pages`, or than the
    model's limit leaves."""
    room = pages if m.limit is None else min(pages, m.limit - m.kv_pages + m.cached_pages)
    lack = {s.request_id for s in view.shortages if s.model == m.name and s.pages > room}
    first = m.waiting[: int(len(m.running) < m.spec.max_running)]
    return all(r.id in lack for r in (*m.running, *first))


def _resident(view: DeviceView, name: str) -> ModelView | None:
    found = next((m for m in view.models if m.name == name), None)
    return found if found is not None and found.residency is Residency.RESIDENT else None
