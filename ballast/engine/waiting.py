"""Hold the waiting queue of one model, and the snapshot of it that policies see.

Part of `ModelState`. Admission is decided elsewhere (`plan`); this is the ordered queue only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from ballast.core.change_counter import ChangeCounter
from ballast.core.errors import BrokenPromise
from ballast.core.model import ModelSpec
from ballast.core.request import Precedence, Request
from ballast.core.view import RequestView


class Waiting:
    """Waiting requests, sorted by priority, place in the queue, turn of the tenant and order of
    arrival.

    The view of each request is made once and kept while it waits, so that the cost in Python of
    adding or removing a request does not grow with the queue.
    """

    def __init__(self) -> None:
        self.version = ChangeCounter()
        """Counts all changes."""
        self.news = ChangeCounter()
        """Counts requests that are added, and those removed other than by admission."""
        self._turns = _TenantTurns()
        self._requests: list[Request] = []
        self._spec: ModelSpec | None = None
        """Spec by which the views were made; None: there are none."""
        self._views: list[RequestView] = []
        self._snapshot: tuple[RequestView, ...] | None = ()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The request that is admitted next; there must be one."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Insert a request in order; preempted ones come before later arrivals of their place and
        tenant."""
        self._turns.give(request, self._requests)
        self._insert(request)
        self.news.n += 1

    def remove(self, request: Request) -> None:
        """Remove a request that ends or is paused. Raises BrokenPromise if it is not queued."""
        self._take(request)
        self.news.n += 1

    def admit(self, request: Request) -> None:
        """Remove a request that will run. Raises as `remove`."""
        self._take(request)
        self._turns.admitted(request)

    def _take(self, request: Request) -> None:
        at = self._index(request)
        if self._requests[at : at + 1] != [request]:
            raise BrokenPromise(f"{request.id} is not waiting")
        del self._requests[at], self._views[at : at + 1]
        self._snapshot = None
        self.version.n += 1

    def snapshot(self, spec: ModelSpec) -> tuple[RequestView, ...]:
        """Return views of the requests in order, with the service levels of `spec`.

        The same tuple is returned until the queue or the spec changes."""
        if self._spec is not spec:
            self._spec, self._snapshot = spec, None
            self._views = [_view(r, spec) for r in self._requests]
        if self._snapshot is None:
            self._snapshot = tuple(self._views)
        return self._snapshot

    def move(self, request: Request, place: int) -> None:
        """Change a queued request's place. Raises as `remove`."""
        self._take(request)
        request.place = place
        self._insert(request)

    def _insert(self, request: Request) -> None:
        at = self._index(request)
        self._requests.insert(at, request)
        if self._spec is not None:
            self._views.insert(at, _view(request, self._spec))
        self._snapshot = None
        self.version.n += 1

    def _index(self, request: Request) -> int:
        return bisect_left(self._requests, _key(request), key=_key)


class _TenantTurns:
    """Give the tenants whose requests wait in one queue turns, so that one tenant's many requests
    hold up no other's.

    Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with requests of equal size:
    within a priority, the n-th waiting request of a tenant has the n-th turn after the one that was
    admitted last. The requests of one tenant keep their order.
    """

    def __init__(self) -> None:
        self._admitted: dict[int, int] = {}
        """Highest turn of the requests that were admitted, by rank."""
        self._newest: dict[tuple[int, str], tuple[Precedence, int]] = {}
        """Of each rank and tenant, the last request in order so far, and its turn."""

    def give(self, request: Request, queue: Iterable[Request]) -> None:
        """Set the turn of a request that joins `queue`, unless it has one from before."""
        if request.turn:
            return
        rank, kind = request.order.rank, (request.order.rank, request.submission.tenant)
        order, turn = self._newest.get(kind, (None, 0))
        if order is not None and request.order < order:  # it has been elsewhere meanwhile
            later = [r.turn for r in queue if _kind(r) == kind and r.order > request.order]
            request.turn = min(later, default=turn)
            return
        request.turn = max(self._admitted.get(rank, 1), turn + 1)
        self._newest[kind] = request.order, request.turn

    def admitted(self, request: Request) -> None:
        """Note that a request runs: those who join from now on take turns after it."""
        rank = request.order.rank
        self._admitted[rank] = max(self._admitted.get(rank, 1), request.turn)


def _kind(request: Request) -> tuple[int, str]:
    return request.order.rank, request.submission.tenant


def _view(r: Request, spec: ModelSpec) -> RequestView:
    slo = spec.slo_of(r.adapter)
    return RequestView(
        r.id,
        r.order,
        len(r.tokens),
        computed=0,
        pages=0,
        in_flight=False,
        blocks=0,
        generated=r.generated,
        max_tokens=r.submission.max_tokens,
        streams=r.streams,
        due=r.submission.arrival + slo.ttft,
        pace=slo.tpot,
        first=r.first_token_at,
        last=r.last_at,
        place=r.place,
        turn=r.turn,
        undone=r.undone,
    )


def _key(request: Request) -> tuple[int, int, int, Precedence]:
    return request.order.rank, request.place, request.turn, request.order
