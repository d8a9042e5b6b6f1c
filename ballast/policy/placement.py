"""Which devices serve which models, decided before anything arrives."""

from __future__ import annotations

from collections.abc import Sequence

from ballast.core.errors import ConfigError
from ballast.core.fleet import Need, Room
from ballast.core.units import format_bytes

BUSY = 0.7
"""Share of a device's time that one model is expected to fill before it gets another device."""


def spread(needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, list[str]]:
    """By model, its devices: the busiest and largest first, each to where it leaves the least
    crowded device.

    A model whose expected work would fill a device for more than `BUSY` gets as many as that takes,
    and shares its work among them. How crowded a device is: the greater of its work and of its
    models' weights over its memory (which may exceed 1: weights come and go). Devices that are
    equally crowded are taken in their order. Raises ConfigError, with the bytes that are missing,
    for a model that no device can serve.
    """
    homes: dict[str, list[str]] = {}
    weights = dict.fromkeys((r.device for r in rooms), 0)
    work = dict.fromkeys((r.device for r in rooms), 0.0)
    for need in sorted(
        needs, key=lambda n: (-max(n.work.values(), default=0), -n.weights, n.model)
    ):
        fitting = _fitting(need, rooms)
        copies = _copies(need, fitting)

        def crowd(room: Room, need: Need = need, copies: int = copies) -> float:
            bytes_then = weights[room.device] + need.weights
            work_then = work[room.device] + need.work.get(room.kind, 0.0) / copies
            return max(bytes_then / room.bytes, work_then)

        chosen = sorted(fitting, key=crowd)[:copies]
        homes[need.model] = [r.device for r in chosen]
        for room in chosen:
            weights[room.device] += need.weights
            work[room.device] += need.work.get(room.kind, 0.0) / copies
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
    """On how many of the devices that can serve it, fastest first, its work takes its share."""
    left, copies = 1.0, 0
    for busy in sorted(need.work.get(r.kind, 0.0) for r in fitting):
        copies += 1
        left -= BUSY / busy if busy else left
        if left <= 1e-9:
            break
    return copies
