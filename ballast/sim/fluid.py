"""Compute transfer times over a graph of links: max-min fair bandwidth shares, exact end times.

A `Wire` is a full-duplex link, a `Side` one direction of it. A `Flow` crosses the sides of its
path at one rate. Rates are max-min fair (progressive filling): all flows speed up together, each in
proportion to its weight, until a side is full or a flow has reached its ceiling; those stay, the
others go on. Weights are equal but for reservations, as on a live shared link
(`memory.shared_pace`): who has reserved a part has it, the others divide the rest. Rates change
only when
a flow begins or ends; between such moments they are constant, so ends are known exactly. Used by
`sim.link` and `sim.layer_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ballast.core.link import Direction, LinkRates
from ballast.sim.change_queue import ChangeQueue, ScheduledChange


class Side:
    """One direction of a wire."""

    __slots__ = ("_alone", "_mixed", "flows", "other")

    def __init__(self, alone: float, mixed: float) -> None:
        self._alone, self._mixed = alone, mixed
        self.other = self
        """The opposite direction."""
        self.flows = 0
        """Number of flows that cross it now."""

    @property
    def capacity(self) -> float:
        """Bytes per second of all its flows together: less while the other direction carries."""
        return self._mixed if self.other.flows else self._alone


class Wire:
    """A full-duplex link of the graph."""

    def __init__(self, rates: LinkRates) -> None:
        self.rates = rates
        down, up = Direction.TO_DEVICE, Direction.TO_HOST
        self.down = Side(rates.of(down, mixed=False), rates.of(down, mixed=True))
        """Towards the device."""
        self.up = Side(rates.of(up, mixed=False), rates.of(up, mixed=True))
        self.down.other, self.up.other = self.up, self.down

    def side(self, direction: Direction) -> Side:
        return self.down if direction is Direction.TO_DEVICE else self.up


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that a flow does, in bytes per second, however much the sides of its path carry."""

    alone: float
    mixed: float
    """While the opposite direction of its path's first side carries."""


Ended = Callable[[float, float], None]
"""Called with the moment at which a flow ends, and with the seconds that it took."""


@dataclass(slots=True, eq=False)
class Flow:
    """Bytes on their way."""

    path: Sequence[Side]
    ceiling: Ceiling | None
    ended: Ended
    began: float
    left: float
    """Bytes that had not moved at `since`."""
    since: float
    reserved: float = 0.0
    """Bytes per second that it is to have at least of what it shares with others."""
    rate: float = 0.0
    """Bytes per second since then."""
    end: float = inf
    """When it ends at that rate."""

    @property
    def limit(self) -> float:
        """Bytes per second of its ceiling as things are."""
        if self.ceiling is None:
            return inf
        return self.ceiling.mixed if self.path[0].other.flows else self.ceiling.alone

    @property
    def alone(self) -> float:
        """Bytes per second while there is no other flow."""
        rate = self.limit
        for side in self.path:
            rate = min(rate, side.capacity)
        return rate


def max_min(
    paths: Sequence[Sequence[int]],
    capacities: Sequence[float],
    ceilings: Sequence[float],
    weights: Sequence[float] | None = None,
) -> list[float]:
    """Max-min fair rates of flows.

    `paths`: by flow, indices of the links that it crosses, each once; `capacities`: by link, above
    0; `ceilings`: by flow, above 0 or inf; `weights`: by flow, above 0; None: equal. A flow that
    crosses no link needs a ceiling.
    """
    if weights is not None and len(set(weights)) > 1:
        return _weighted(paths, capacities, ceilings, weights)
    rates = [0.0] * len(paths)
    left = list(capacities)
    crossing = [0] * len(capacities)
    for path in paths:
        for link in path:
            crossing[link] += 1
    growing = list(range(len(paths)))
    while growing:
        fair, full = inf, -1
        for link, n in enumerate(crossing):
            if n and left[link] / n < fair:
                fair, full = left[link] / n, link
        lowest = min(ceilings[i] for i in growing)
        if lowest <= fair:
            fair = lowest
            stop = [i for i in growing if ceilings[i] == lowest]
        else:
            stop = [i for i in growing if full in paths[i]]
        for i in stop:
            rates[i] = fair
            for link in paths[i]:
                left[link] = max(0.0, left[link] - fair)
                crossing[link] -= 1
        growing = [i for i in growing if not rates[i]]
    return rates


def _weighted(
    paths: Sequence[Sequence[int]],
    capacities: Sequence[float],
    ceilings: Sequence[float],
    weights: Sequence[float],
) -> list[float]:
    """As `max_min`, with unequal weights."""
    rates = [0.0] * len(paths)
    left = list(capacities)
    growing = list(range(len(paths)))
    while growing:
        crossing = [
            sum(weights[i] for i in growing if link in paths[i]) for link in range(len(left))
        ]
        full = {k: left[k] / w for k, w in enumerate(crossing) if w}
        speed = min([*full.values(), *(ceilings[i] / weights[i] for i in growing)])
        stop = [
            i
            for i in growing
            if ceilings[i] / weights[i] <= speed or any(full[k] <= speed for k in paths[i])
        ]
        for i in stop:
            at_ceiling = ceilings[i] / weights[i] <= speed
            rates[i] = ceilings[i] if at_ceiling else speed * weights[i]
            for link in paths[i]:
                left[link] = max(0.0, left[link] - rates[i])
        growing = [i for i in growing if i not in stop]
    return rates


class Fluid:
    """The flows of one world. Beginning or ending one costs O(flows x hops)."""

    def __init__(self, agenda: ChangeQueue) -> None:
        self._agenda = agenda
        self.flows: list[Flow] = []
        """Flows in transfer, in the order in which they began."""
        self._next: ScheduledChange | None = None
        """On the agenda: the next end."""
        self._ending = False
        """Flows that begin now get their rates when all have ended that end now."""

    def start(
        self,
        now: float,
        path: Sequence[Side],
        n_bytes: int,
        ended: Ended,
        ceiling: Ceiling | None = None,
        reserved: float = 0.0,
    ) -> Flow:
        """Let `n_bytes` move over `path` from `now` on; `ended` is called when they have.
        `reserved`: bytes per second that they have at least."""
        flow = Flow(path, ceiling, ended, now, float(n_bytes), now, reserved)
        self.flows.append(flow)
        for side in path:
            side.flows += 1
        if not self._ending:
            self._renew(now)
        return flow

    def stop(self, now: float, flow: Flow) -> None:
        """Stop a flow before its end; its `ended` is not called. Its bandwidth is shared among the
        others."""
        self.flows.remove(flow)
        for side in flow.path:
            side.flows -= 1
        if self.flows:
            self._renew(now)
        elif self._next is not None:
            self._agenda.drop(self._next)
            self._next = None

    def _end(self, now: float) -> None:
        """End the flows that are due, and share their bandwidth among the others."""
        self._next = None
        due = [flow for flow in self.flows if flow.end <= now]
        self.flows = [flow for flow in self.flows if flow.end > now]
        for flow in due:
            for side in flow.path:
                side.flows -= 1
        self._ending = True
        for flow in due:
            flow.ended(now, now - flow.began)
        self._ending = False
        if self.flows:
            self._renew(now)

    def _renew(self, now: float) -> None:
        """Recompute all rates. A flow whose rate stays keeps its end, to the last bit."""
        flows = self.flows
        first = inf
        rates = self._rates(flows) if len(flows) > 1 else (flows[0].alone,)
        for flow, rate in zip(flows, rates, strict=True):
            if rate != flow.rate:
                if flow.rate:
                    flow.left = max(0.0, flow.left - (now - flow.since) * flow.rate)
                flow.rate, flow.since = rate, now
                flow.end = now + flow.left / rate
            if flow.end < first:
                first = flow.end
        if self._next is not None:
            if first == self._next.at:
                return
            self._agenda.drop(self._next)
        self._next = self._agenda.schedule(first, self._end)

    @staticmethod
    def _rates(flows: Sequence[Flow]) -> list[float]:
        sides: dict[Side, int] = {}
        paths = [[sides.setdefault(side, len(sides)) for side in flow.path] for flow in flows]
        capacities, limits = [side.capacity for side in sides], [flow.limit for flow in flows]
        weights = _weights(flows) if any(flow.reserved for flow in flows) else None
        return max_min(paths, capacities, limits, weights)


LEAST_PART = 0.01
"""Least part of a side for flows without reservation, where all of it is reserved."""


def _weights(flows: Sequence[Flow]) -> list[float]:
    """Weigh flows by the parts of their path's first side that they have reserved; those without
    divide what the reservations of the side leave. Where more is reserved than there is, no
    reservation can be kept, and each of those without has a mean part."""
    on_side: dict[Side, list[Flow]] = {}
    for flow in flows:
        on_side.setdefault(flow.path[0], []).append(flow)
    rest = {}
    for side, here in on_side.items():
        reserved = sum(flow.reserved for flow in here) / side.capacity
        without = sum(not flow.reserved for flow in here)
        rest[side] = max(LEAST_PART, 1.0 - reserved) / max(1, without)
        if reserved > 1.0:
            rest[side] = reserved / (len(here) - without)
    return [flow.reserved / flow.path[0].capacity or rest[flow.path[0]] for flow in flows]
