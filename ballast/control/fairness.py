"""Choose the requests to send to a worker next, so that each API key has a fair share of a model.

Used by `OpenRequests.dispatch`. A worker admits requests in order of arrival, so fairness is
decided before they are sent: the server sends a model's `max_running` requests and AHEAD more, and
keeps the others. Whenever there is room, the request of highest priority is sent; among equals,
that of the key with the fewest requests at the worker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from ballast.core.request import Submission

AHEAD = 8
"""Requests of a model sent to a worker beyond those that can run: enough that the next one starts
at once when one ends, and few, since a new request of another key waits for all of them."""


class KeyedRequest(Protocol):
    """A request and its API key; `control.open_request.OpenRequest` is one."""

    @property
    def key(self) -> str: ...

    @property
    def submission(self) -> Submission: ...

    @property
    def sent(self) -> bool:
        """Whether the worker has it."""

    @property
    def paused(self) -> bool:
        """Whether it is paused because its client does not read."""


R = TypeVar("R", bound=KeyedRequest)


def counted(requests: Iterable[KeyedRequest], most_running: int) -> Counter[str]:
    """Count, by key, the requests of one model that count against the key's share of the worker.

    The first `most_running` paused requests of a key do not count. Further ones do: they could all
    resume at once, ahead of other keys' requests.
    """
    active: Counter[str] = Counter()
    paused: Counter[str] = Counter()
    for request in requests:
        if request.sent:
            (paused if request.paused else active)[request.key] += 1
    for key, n in paused.items():
        active[key] += max(0, n - most_running)
    return active


def chosen(waiting: Sequence[R], at_worker: Counter[str], most_running: int) -> list[R]:
    """Return the requests of one model that are to be sent to the worker now, in order.

    `waiting`: in order of arrival; `at_worker`: by key, requests that were sent and have not ended;
    `most_running`: how many can run. A key with less than its share of the worker gets it even
    where the other keys have filled the worker.
    """
    if not waiting:
        return []
    queues: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for i, request in enumerate(waiting):
        queues[request.key].append((-request.submission.priority, i))
    for queue in queues.values():
        queue.sort(reverse=True)  # the first comes last, to be taken off
    have = Counter(at_worker)
    window = most_running + AHEAD
    share = max(1, window // len({*queues, *(key for key, n in have.items() if n)}))
    total = have.total()
    found: list[R] = []

    def rank(key: str) -> tuple[int, int, int]:
        importance, i = queues[key][-1]
        return importance, have[key], i

    while queues:
        able = [key for key in queues if total < window or have[key] < share]
        if not able:
            break
        key = min(able, key=rank)
        _, i = queues[key].pop()
        if not queues[key]:
            del queues[key]
        found.append(waiting[i])
        have[key] += 1
        total += 1
    return found
