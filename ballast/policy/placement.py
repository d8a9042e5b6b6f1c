"""Which devices serve which models, decided before anything arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ballast.core.errors import ConfigError
from ballast.core.fleet import Need, Room
from ballast.core.units import format_bytes

BUSY = 0.7
"""Share of a device's time that one model is expected to fill before it gets another device."""


def spread(
    needs: Sequence[Need], rooms: Sequence[Room], *, by_work: bool = True
) -> dict[str, list[str]]:
    """By model, its devices: the busiest and largest first, each to where it leaves the least
    crowded device.

    How crowded a device is: the greater of its work and of its models' weights over its memory
    (which may exceed 1: weights come and go). Devices that are equally crowded are taken in their
    order. When all have one, a model whose work in its busiest seconds would fill a device for more
    than `BUSY` gets more, as many as that takes, where all weights still fit, those first that have
    most of it for each of theirs. Devices that then have no model serve the busiest as well, of
    those to which they are no slower than the devices that these have. Unless `by_work`, no work
    counts as expected.
    Raises ConfigError, with the bytes that are missing, for a model that no device can serve.
    """
    if not by_work:
        needs = [replace(need, work={}, peak={}) for need in needs]
    homes: dict[str, list[str]] = {}
    weights = dict.fromkeys((r.device for r in rooms), 0)
    work = dict.fromkeys((r.device for r in rooms), 0.0)
    order = sorted(needs, key=lambda n: (-max(n.work.values(), default=0), -n.weights, n.model))
    copies = {n.model: _copies(n, _fitting(n, rooms)) for n in order}

    def part(need: Need, room: Room) -> float:
        return need.work.get(room.kind, 0.0) / copies[need.model]

    def crowd(need: Need, room: Room) -> float:
        bytes_then = weights[room.device] + need.weights
        return max(bytes_then / room.bytes, work[room.device] + part(need, room))

    def give(need: Need, room: Room) -> None:
        homes.setdefault(need.model, []).append(room.device)
        weights[room.device] += need.weights
        work[room.device] += part(need, room)

    for need in order:
        give(need, min(_fitting(need, rooms), key=lambda r: crowd(need, r)))

    def each(need: Need) -> float:
        """What one of its devices has to keep up with."""
        return max(need.busiest.values()) / len(homes[need.model])

    def further(need: Need) -> list[Room]:
        """Devices that can serve it as well."""
        return [
            r
            for r in _fitting(need, rooms)
            if r.device not in homes[need.model] and weights[r.device] + need.least <= r.bytes
        ]

    wanting = [n for n in order if copies[n.model] > 1]
    while wanting:
        need = max(wanting, key=each)
        free = further(need)
        if free:
            give(need, min(free, key=lambda r: crowd(need, r)))
        if not free or len(homes[need.model]) == copies[need.model]:
            wanting.remove(need)
    kinds = {r.device: r.kind for r in rooms}

    def slower(need: Need, room: Room) -> bool:
        """Whether its work takes longer there than on each of its devices."""
        seen = (need.busiest.get(kinds[device], 0.0) for device in homes[need.model])
        return need.busiest.get(room.kind, 0.0) > max(seen)

    asked = [n for n in order if any(n.busiest.values())]
    for room in rooms:
        if weights[room.device] == 0:
            fits = [n for n in asked if room in further(n) and not slower(n, room)]
            if fits:
                give(max(fits, key=each), room)
    return homes


def _fitting(need: Need, rooms: Sequence[Room]) -> list[Room]:
    fitting = [r for r in rooms if r.bytes >= need.least]
    if not fitting:
        largest = max((r.bytes for r in rooms), default=0)
        raise ConfigError(
            "devices",
            need.model,
            f"it needs at least {format_bytes(need.least)}, the largest device has "
            f"{format_bytes(largest)}: {format_bytes(need.least - largest)} are missing",
        )
    return fitting


def _copies(need: Need, fitting: Sequence[Room]) -> int:
    """On how many of the devices that can serve it, fastest first, its work takes its share while
    it is asked most."""
    left, copies = 1.0, 0
    for busy in sorted(need.busiest.get(r.kind, 0.0) for r in fitting):
        copies += 1
        left -= BUSY / busy if busy else left
        if left <= 1e-9:
            break
    return copies
