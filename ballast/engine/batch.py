"""Hold the running requests of one model (`Batch`) and the paused ones (`Paused`).

Both are parts of `ModelState`. The fields of these requests that policies see must be changed by
the methods here only: these count changes in `version`, by which stale snapshots are found, and in
`news` where a policy should decide again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import overload

from ballast.core.change_counter import ChangeCounter
from ballast.core.request import Request


class Batch(Sequence[Request]):
    """The running requests, sorted by `Request.order`."""

    def __init__(self) -> None:
        self.version = ChangeCounter()
        """Counts all changes."""
        self.news = ChangeCounter()
        """Counts requests that end, or are preempted or paused."""
        self._requests: list[Request] = []
        self._leaving: list[Request] = []
        self._fetching = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._requests[index]

    @property
    def leaving(self) -> Sequence[Request]:
        """Requests in flight that will be preempted when their job ends."""
        return self._leaving

    @property
    def can_run(self) -> bool:
        """Whether any request may be in a job: not while its KV is being fetched."""
        return len(self._requests) > self._fetching

    def add(self, request: Request) -> None:
        """Insert a request in order of `Request.order`."""
        requests, at = self._requests, len(self._requests)
        while at > 0 and requests[at - 1].order > request.order:
            at -= 1
        requests.insert(at, request)
        self.version.n += 1

    def remove(self, request: Request) -> None:
        """Remove a request. Raises ValueError if it is not in the batch."""
        self._requests.remove(request)
        if request.fetching:
            self.end_fetch(request)
        self.version.n += 1
        self.news.n += 1

    def begin(self, requests: Iterable[Request]) -> None:
        """Mark requests as in flight: a job that contains them has begun."""
        for r in requests:
            r.in_flight = True
        self.version.n += 1

    def end(self, requests: Iterable[Request]) -> None:
        """Mark requests as no longer in flight: their job has ended."""
        for r in requests:
            r.in_flight = False
        self.version.n += 1

    def begin_fetch(self, request: Request) -> None:
        """Keep a request out of jobs: its KV is being fetched."""
        request.fetching = True
        self._fetching += 1
        self.version.n += 1

    def end_fetch(self, request: Request) -> None:
        """Undo `begin_fetch`."""
        request.fetching = False
        self._fetching -= 1
        self.version.n += 1

    def compute(self, request: Request, n: int) -> None:
        """Record that KV of a request's first `n` tokens has been computed."""
        request.computed = n
        self.version.n += 1

    def extend(self, request: Request, token: int, at: float) -> None:
        """Append a generated token to a request; `at`: seconds on the device's clock."""
        request.tokens.append(token)
        request.last_token_at = at
        if request.first_token_at is None:
            request.first_token_at = at
        self.version.n += 1

    def leave(self, request: Request) -> None:
        """Mark a request in flight to be preempted when its job ends."""
        if request not in self._leaving:
            self._leaving.append(request)
            self.version.n += 1

    def take_leaving(self) -> list[Request]:
        """Return the requests marked by `leave`, and remove the marks."""
        leaving, self._leaving = self._leaving, []
        self.version.n += 1
        return leaving


class Paused(Mapping[str, Request]):
    """The paused requests, by id."""

    def __init__(self) -> None:
        self.version = ChangeCounter()
        """Counts all changes, like `news`."""
        self.news = ChangeCounter()
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __getitem__(self, id: str) -> Request:
        return self._requests[id]

    def add(self, request: Request) -> None:
        """Add a request that has just been paused."""
        self._requests[request.id] = request
        self.version.n += 1
        self.news.n += 1

    def remove(self, request: Request) -> None:
        """Remove a request. Raises KeyError if it is not paused."""
        del self._requests[request.id]
        self.version.n += 1
        self.news.n += 1
