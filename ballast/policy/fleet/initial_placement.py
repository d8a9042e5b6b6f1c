"""Place models on devices at the start, by the size of their weights and their expected work.

Used by all fleet policies, before any request has arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ballast.core.errors import ConfigError
from ballast.core.fleet import DeviceCapacity, ModelDemand
from ballast.core.units import format_bytes

BUSY = 0.7
"""Share of a device's time that one model may be expected to fill before it gets a further
device."""


def spread(
    needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity], *, by_work: bool = True
) -> dict[str, list[str]]:
    """Return the devices of each model: the busiest and largest models are placed first, each where
    it leaves the least crowded device.

    A device is as crowded as the greater of its expected work and of its models' weights over its
    memory (which may exceed 1: weights are loaded and evicted). Equally crowded devices are taken
    in their order. Once all models have a device, a model whose work at its peak would fill a
    device for more than `BUSY` gets as many further ones as that takes, where all weights still
    fit; models with the most work per device come first. Devices that are still empty then serve
    the busiest model for which they are no slower than its present devices. Unless `by_work`,
    expected work is ignored.

    Raises ConfigError, with the bytes that are missing, for a model that no device can serve.
    """
    if not by_work:
        needs = [replace(need, work={}, peak={}) for need in needs]
    order = sorted(needs, key=lambda n: (-max(n.work.values(), default=0), -n.weights, n.model))
    copies = {n.model: _copies(n, fitting(n, rooms)) for n in order}
    placing = _Placing(rooms, copies)
    for need in order:
        placing.add_device(need, fitting(need, rooms))
    placing.replicate(order)
    placing.use_empty_devices(order)
    return placing.homes


class _Placing:
    """Placement under construction: the devices of each model, and the load of each device so
    far."""

    def __init__(self, rooms: Sequence[DeviceCapacity], copies: Mapping[str, int]) -> None:
        """`copies`: by model, the number of devices among which its work is divided."""
        self.homes: dict[str, list[str]] = {}
        """By model, the names of its devices."""
        self._rooms = rooms
        self._copies = copies
        self._weights = dict.fromkeys((r.device for r in rooms), 0)
        """By device, bytes."""
        self._work = dict.fromkeys((r.device for r in rooms), 0.0)
        """By device, share of its time."""
        self._kinds = {r.device: r.kind for r in rooms}

    def add_device(self, need: ModelDemand, among: Sequence[DeviceCapacity]) -> None:
        """Give a model one more device of `among`: the one that is least crowded with it."""
        self._add(need, min(among, key=lambda room: self._crowding(need, room)))

    def replicate(self, order: Sequence[ModelDemand]) -> None:
        """Give models whose work is divided among several devices the ones that they lack."""
        wanting = [n for n in order if self._copies[n.model] > 1]
        while wanting:
            need = max(wanting, key=self._busiest_share)
            free = self._further(need)
            if free:
                self.add_device(need, free)
            if not free or len(self.homes[need.model]) == self._copies[need.model]:
                wanting.remove(need)

    def use_empty_devices(self, order: Sequence[ModelDemand]) -> None:
        """Give each device without a model the busiest one that it serves no slower than present
        devices do."""
        requested = [n for n in order if any(n.busiest.values())]
        for room in self._rooms:
            if self._weights[room.device] == 0:
                fits = [
                    n for n in requested if room in self._further(n) and not self._slower(n, room)
                ]
                if fits:
                    self._add(max(fits, key=self._busiest_share), room)

    def _add(self, need: ModelDemand, room: DeviceCapacity) -> None:
        self.homes.setdefault(need.model, []).append(room.device)
        self._weights[room.device] += need.weights
        self._work[room.device] += self._work_of_copy(need, room)

    def _work_of_copy(self, need: ModelDemand, room: DeviceCapacity) -> float:
        return need.work.get(room.kind, 0.0) / self._copies[need.model]

    def _crowding(self, need: ModelDemand, room: DeviceCapacity) -> float:
        """Return how crowded a device would be with one more model."""
        weights = self._weights[room.device] + need.weights
        work = self._work[room.device] + self._work_of_copy(need, room)
        return max(weights / room.bytes, work)

    def _busiest_share(self, need: ModelDemand) -> float:
        """Return a model's work at its peak, per device that it has."""
        return max(need.busiest.values()) / len(self.homes[need.model])

    def _further(self, need: ModelDemand) -> list[DeviceCapacity]:
        """Return the devices that can serve a model besides its own."""
        return [
            r
            for r in fitting(need, self._rooms)
            if r.device not in self.homes[need.model]
            and self._weights[r.device] + need.least <= r.bytes
        ]

    def _slower(self, need: ModelDemand, room: DeviceCapacity) -> bool:
        """Return whether a model's work takes longer on a device than on each of its present
        ones."""
        own = (need.busiest.get(self._kinds[device], 0.0) for device in self.homes[need.model])
        return need.busiest.get(room.kind, 0.0) > max(own)


def fitting(need: ModelDemand, rooms: Sequence[DeviceCapacity]) -> list[DeviceCapacity]:
    """Return the devices that can serve a model. Raises ConfigError where there is none."""
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


def _copies(need: ModelDemand, fitting: Sequence[DeviceCapacity]) -> int:
    """Return the number of devices, of those that can serve the model, fastest first, that its work
    at its peak takes if each is filled to `BUSY`."""
    left, copies = 1.0, 0
    for busy in sorted(need.busiest.get(r.kind, 0.0) for r in fitting):
        copies += 1
        left -= BUSY / busy if busy else left
        if left <= 1e-9:
            break
    return copies
