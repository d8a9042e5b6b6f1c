"""Which requests a worker gets next, where several API keys want a model: each has a fair share.

A worker admits what it has in the order in which it came. So it gets as many requests of a model as
can run, and a few to choose from; the others wait here, where what comes next is chosen anew each
time: of the keys with the most important requests, the one that has the fewest at the worker.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Protocol, TypeVar

from ballast.core.request import Submission

AHEAD = 8
"""Requests of a model that a worker has beyond those that can run: what ends is followed at once,
and a newcomer waits for no more than these."""


class Keyed(Protocol):
    """A request of a key; `ballast.cluster.output_stream.OpenRequest` is one."""

    @property
    def key(self) -> str: ...

    @property
    def submission(self) -> Submission: ...


R = TypeVar("R", bound=Keyed)


def chosen(waiting: Sequence[R], at_worker: Counter[str], most_running: int) -> list[R]:
    """Requests of one model that are to be sent now, in this order.

    `waiting` are in order of arrival; `at_worker` counts those of each key that were sent and have
    not ended. A key that has less than its share of the worker gets it though others have more.
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
