"""Find the request that crashes workers: one in flight at two crashes is suspect and runs alone.

One object for all devices of a server, owned by the controller and used by each `OpenRequests`.
"""

from __future__ import annotations

from collections.abc import Iterable

CRASHES = 2
"""Crashes after which a request runs alone."""


class Suspicions:
    """Tracks unexplained crashes, each as the set of open requests that were in flight."""

    def __init__(self) -> None:
        self._crashes: list[set[str]] = []

    def crashed(self, in_flight: Iterable[str]) -> None:
        """Note that a worker died with these requests in flight."""
        self._crashes.append(set(in_flight))
        self._prune()

    @property
    def has_any(self) -> bool:
        """Whether any request may have to run alone."""
        return len(self._crashes) >= CRASHES

    def suspect(self, request_id: str) -> bool:
        """Return whether a request has to run alone."""
        return sum(request_id in crash for crash in self._crashes) >= CRASHES

    def forget(self, request_id: str) -> None:
        """Note that a request has ended."""
        for crash in self._crashes:
            crash.discard(request_id)
        self._prune()

    def convict(self, request_id: str) -> None:
        """Note that a request has killed a worker while it ran alone: other requests are cleared of
        the crashes at which it was in flight."""
        self._crashes = [c for c in self._crashes if request_id not in c]

    def _prune(self) -> None:
        self._crashes = [c for c in self._crashes if c]
