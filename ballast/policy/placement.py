"""Which devices serve which models, decided before anything arrives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast.core.errors import ConfigError
from ballast.core.units import format_bytes


@dataclass(frozen=True, slots=True)
class Need:
    """What a model asks of the device that serves it."""

    model: str
    least: int
    """Bytes without which a device cannot serve it at all: weights, activations, one request."""
    weights: int
    """Bytes."""
    work: float = 0.0
    """Expected seconds of compute per second; 0 where nothing is known."""


@dataclass(frozen=True, slots=True)
class Room:
    """A device that may serve models."""

    device: str
    bytes: int


def spread(needs: Sequence[Need], rooms: Sequence[Room]) -> dict[str, str]:
    """By model, its device: the largest first, each to where it leaves the least crowded device.

    How crowded a device is: the greater of its work and of its models' weights over its memory
    (which may exceed 1: weights come and go). Devices that are equally crowded are taken in their
    order. Raises ConfigError, with the bytes that are missing, for a model that no device can
    serve.
    """
    homes: dict[str, str] = {}
    weights = dict.fromkeys((r.device for r in rooms), 0)
    work = dict.fromkeys((r.device for r in rooms), 0.0)
    largest = max((r.bytes for r in rooms), default=0)
    for need in sorted(needs, key=lambda n: (-n.work, -n.weights, n.model)):
        fitting = [r for r in rooms if r.bytes >= need.least]
        if not fitting:
            raise ConfigError(
                "devices",
                need.model,
                f"it needs at least {format_bytes(need.least)}, the largest device has "
                f"{format_bytes(largest)}: {format_bytes(need.least - largest)} are missing",
            )

        def crowd(room: Room, need: Need = need) -> float:
            bytes_then = weights[room.device] + need.weights
            return max(bytes_then / room.bytes, work[room.device] + need.work)

        chosen = min(fitting, key=crowd).device
        homes[need.model] = chosen
        weights[chosen] += need.weights
        work[chosen] += need.work
    return homes
