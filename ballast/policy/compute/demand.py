"""Compute how much of a lane's time is due by when, and the headroom left before a task is late.

Used by `ballast.policy.compute.deadline` alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_NOTHING = 1e-12
"""Seconds of work that count as none: a remainder of rounding."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work in `steps` pieces of `seconds` each: the first is due in `due` seconds, each other one
    `pace` seconds after the one before."""

    due: float
    seconds: float
    pace: float = math.inf
    steps: int = 1

    @property
    def last_due(self) -> float:
        return self.due if self.steps == 1 else self.due + (self.steps - 1) * self.pace


class Demand:
    """The demand bound of earliest-deadline-first scheduling on one lane (Baruah, Rosier, Howell
    1990): work that is due by a time `t`, in seconds, must not exceed `t`.

    Between two steps a task's demand is taken as a line, which is never below it, so that it
    suffices to check the times where lines begin and end.
    """

    def __init__(
        self, tasks: Sequence[Task], more: Sequence[Task] = (), *, all_of_them: bool = False
    ) -> None:
        """`tasks` count at once; `more`: tasks that may be added later, or at once if
        `all_of_them`."""
        known = (*tasks, *more)
        self._times: NDArray[np.float64] = np.array(
            [t for task in known for t in (task.due, task.last_due)], dtype=np.float64
        )
        counted = known if all_of_them else tasks
        self._each = [self._due(task) for task in counted]
        self._demand: NDArray[np.float64] = sum(self._each, np.zeros_like(self._times))

    def add(self, *tasks: Task) -> bool:
        """Count tasks that were given as `more`, if all can then still be done in time; returns
        whether so."""
        demand = sum(map(self._due, tasks), self._demand)
        if (self._times < demand).any():
            return False
        self._demand = demand
        return True

    def headroom(self, *without: int) -> float:
        """Return the seconds that can be spent on other work before one of the tasks, except those
        numbered in `without`, is late; infinite if there is none."""
        demand = self._demand
        for i in without:
            demand = demand - self._each[i]
        due = demand > _NOTHING  # before that no task can be late
        return float((self._times - demand)[due].min(initial=math.inf))

    def _due(self, task: Task) -> NDArray[np.float64]:
        """Return the seconds of a task that are due by each time."""
        times = self._times
        if task.steps == 1:
            return np.where(times >= task.due, task.seconds, 0.0)
        steps = np.minimum(task.steps, 1 + (times - task.due) / task.pace)
        return np.where(times >= task.due, task.seconds * steps, 0.0)
