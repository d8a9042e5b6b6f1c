"""The requests of one model that run, and those that are paused.

What policies see of these requests changes by the methods here, which count their changes in
`version`, so that a snapshot knows whether it is stale. Those that a policy should be asked about
count in `news` as well.
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
        """Grows with every change."""
        self.news = ChangeCounter()
        """Grows with every request that ends, or is preempted or paused."""
        self._requests: list[Request] = []
        self._leaving: list[Request] = []

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
        """Requests in flight that are to be preempted when the job ends."""
        return self._leaving

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        requests, at = self._requests, len(self._requests)
        while at > 0 and requests[at - 1].order > request.order:
            at -= 1
        requests.insert(at, request)
        self.version.n += 1

    def remove(self, request: Request) -> None:
        """Take a request out. Raises ValueError if it is not in the batch."""
        self._requests.remove(request)
        self.version.n += 1
        self.news.n += 1

    def begin(self, requests: Iterable[Request]) -> None:
        """These requests are in flight."""
        for r in requests:
            r.in_flight = True
        self.version.n += 1

    def end(self, requests: Iterable[Request]) -> None:
        """These requests are in flight no more."""
        for r in requests:
            r.in_flight = False
        self.version.n += 1

    def compute(self, request: Request, n: int) -> None:
        """There is KV of a request's first `n` tokens."""
        request.computed = n
        self.version.n += 1

    def extend(self, request: Request, token: int, at: float) -> None:
        """A request has generated one more token, at a time on the device's clock."""
        request.tokens.append(token)
        request.last_token_at = at
        if request.first_token_at is None:
            request.first_token_at = at
        self.version.n += 1

    def leave(self, request: Request) -> None:
        """Preempt a request in flight when its job ends."""
        if request not in self._leaving:
            self._leaving.append(request)
            self.version.n += 1

    def left(self) -> list[Request]:
        """Returns those that were to be preempted, and forgets that they were."""
        leaving, self._leaving = self._leaving, []
        self.version.n += 1
        return leaving


class Paused(Mapping[str, Request]):
    """The paused requests, by id."""

    def __init__(self) -> None:
        self.version = ChangeCounter()
        """Grows with every change, like `news`."""
        self.news = ChangeCounter()
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __getitem__(self, id: str) -> Request:
        return self._requests[id]

    def add(self, request: Request) -> None:
        """Keep a request that has just been paused."""
        self._requests[request.id] = request
        self.version.n += 1
        self.news.n += 1

    def remove(self, request: Request) -> None:
        """Let a request go. Raises KeyError if it is not paused."""
        del self._requests[request.id]
        self.version.n += 1
        self.news.n += 1
