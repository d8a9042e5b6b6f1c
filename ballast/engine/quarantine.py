"""Set a model or adapter aside whose requests fail, one after the other, with non-finite numbers.

Part of `ModelState`. Such a model answers nobody: its requests would take the device's time, and
each would wait for its turn only to fail. A model that is set aside refuses requests with a reason;
its weights are evicted like those of any idle model. A success of any request in between begins
the count anew, and an operator's `activate` lifts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ballast.core.errors import NonFiniteOutput
from ballast.core.event import FailedOutput, JobResult

MOST_FAILURES = 5
"""Requests of a model that fail in succession before it is set aside."""


class Quarantine:
    """Which names of one model (its own, and those of its adapters) are set aside, and why."""

    def __init__(self) -> None:
        self.reasons: Mapping[str, str] = {}
        """Reason of each name that is set aside. Replaced, never changed: other threads read it."""
        self._failures: Counter[str] = Counter()

    def judge(self, name: str, result: JobResult) -> bool:
        """Count a result of a request for `name`; return whether this sets it aside."""
        if not isinstance(result, FailedOutput):
            self.succeeded(name)
        elif result.code == NonFiniteOutput.code:
            return self.failed(name, result.reason) is not None
        return False

    def succeeded(self, name: str) -> None:
        """Note that a job of a request for `name` gave a finite result."""
        if self._failures:
            del self._failures[name]

    def failed(self, name: str, reason: str) -> str | None:
        """Note that a request for `name` has failed; return the reason if this sets it aside."""
        self._failures[name] += 1
        if self._failures[name] < MOST_FAILURES or name in self.reasons:
            return None
        why = f"{name!r} is set aside after {MOST_FAILURES} failures in succession: {reason}"
        self.reasons = {**self.reasons, name: why}
        return why

    def lift(self, names: Iterable[str]) -> None:
        """Serve names again."""
        lifted = set(names)
        for name in lifted:
            del self._failures[name]
        self.reasons = {n: why for n, why in self.reasons.items() if n not in lifted}
