"""Which request kills workers: those in flight at two crashes are suspects, to be run alone."""

from __future__ import annotations

from collections.abc import Iterable

CRASHES = 2
"""From so many on a request runs alone."""


class Suspicions:
    """The crashes so far, each as the open requests that were in flight at it."""

    def __init__(self) -> None:
        self._crashes: list[set[str]] = []

    def crashed(self, in_flight: Iterable[str]) -> None:
        """A worker died with these in flight."""
        self._crashes.append(set(in_flight))
        self._prune()

    def suspect(self, request_id: str) -> bool:
        """Whether it must run alone."""
        return sum(request_id in crash for crash in self._crashes) >= CRASHES

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for crash in self._crashes:
            crash.discard(request_id)
        self._prune()

    def convict(self, request_id: str) -> None:
        """It did it alone: whoever was in flight beside it is cleared of those crashes."""
        self._crashes = [c for c in self._crashes if request_id not in c]

    def _prune(self) -> None:
        self._crashes = [c for c in self._crashes if c]
