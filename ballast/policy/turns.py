"""Turns: one model at a time is served, the others' requests wait."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ballast.core.actions import Hold
from ballast.core.view import DeviceView, ModelView, Residency


@dataclass(frozen=True, slots=True)
class Turn:
    """The model that is served, and since when."""

    model: str
    since: float
    past: tuple[str, ...] = ()
    """Models that had turns before, the latest last."""

    def then(self, model: str, now: float) -> Turn:
        """The turn that follows this one."""
        past = (*(name for name in self.past if name != self.model), self.model)
        return Turn(model, now, past)


class Phase(enum.Enum):
    """Of a turn for whose end others wait."""

    LASTS = enum.auto()
    RUNS_OUT = enum.auto()
    """It admits no more, and ends what it runs."""
    OVER = enum.auto()


def phase(turn: Turn, current: ModelView, now: float, quantum: float) -> Phase:
    """Where the turn of `current` is, `quantum` being the seconds that it may admit requests."""
    over = now >= turn.since + quantum
    if current.idle or (over and not current.running):
        return Phase.OVER
    return Phase.RUNS_OUT if over else Phase.LASTS


def round_robin(
    view: DeviceView, turn: Turn | None, quantum: float
) -> tuple[Turn | None, list[Hold], float | None]:
    """The turn from now on, what holds the others back, and when the turn's time is over.

    Resident models with waiting requests come one after another, in the fleet's order.
    """
    models = {m.name: m for m in view.models}
    current = models.get(turn.model) if turn is not None else None
    heir = _following(view, turn)
    runs_out, wake = False, None
    if heir is not None:
        at = Phase.OVER
        if turn is not None and current is not None and current.residency is Residency.RESIDENT:
            at = phase(turn, current, view.now, quantum)
        if at is Phase.OVER:
            turn = turn.then(heir, view.now) if turn is not None else Turn(heir, view.now)
        elif at is Phase.LASTS and turn is not None:
            wake = turn.since + quantum
        runs_out = at is Phase.RUNS_OUT
    holds = []
    for m in view.models:
        its_turn = turn is not None and m.name == turn.model
        held = runs_out or not its_turn
        if held != m.held:
            why = "its turn is over" if its_turn and held else "its turn"
            holds.append(Hold(m.name, held, why if its_turn else "another model's turn"))
    return turn, holds, wake


def _following(view: DeviceView, turn: Turn | None) -> str | None:
    """Who comes after the turn, if anybody else waits."""
    names = [m.name for m in view.models]
    last = turn.model if turn is not None else None
    first = names.index(last) + 1 if last in names else 0
    for m in view.models[first:] + view.models[:first]:
        if m.waiting and m.residency is Residency.RESIDENT and m.name != last:
            return m.name
    return None
