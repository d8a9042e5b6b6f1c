"""Measure this machine's link bandwidth: to the device, to the host, and both at once.

Used by `sim.calibrate`. The loop of the device must not run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from mmap import PAGESIZE

import numpy as np

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDoneEvent
from ballast.core.link import Direction, LinkRates
from ballast.core.units import ceil_div
from ballast.engine.model import ModelState
from ballast.live.cuda_machine import CudaMachine
from ballast.live.device import LiveDevice
from ballast.live.machine import Machine
from ballast.memory.copies import Copy
from ballast.memory.transfer import Link


class LinkMeter:
    """Collect transfers and derive the link's bandwidths. The loop of the device must not run.

    Weights are loaded onto pages that have just been mapped, which costs page faults; the loss by
    opposite traffic is measured on pages without them, and taken for the same share.
    """

    def __init__(self) -> None:
        self._activations: list[TransferDoneEvent] = []
        self.alone: dict[Direction, list[TransferDoneEvent]] = {d: [] for d in Direction}
        """On pages that are there."""
        self._mixed: list[tuple[int, float]] = []

    def activated(self, done: TransferDoneEvent) -> None:
        """A model was brought in, alone."""
        self._activations.append(done)

    def measure(self, device: LiveDevice, m: ModelState) -> None:
        """Copy the weights of `m`, which are there, once more each way; then both ways at once."""
        there = [s.copy for s in m.weights.segments]
        n_bytes = sum(copy.n_bytes for copy in there)
        with landing(device.machine, n_bytes) as at:
            back = []
            for copy in there:
                back.append(Copy(at, copy.dst, copy.n_bytes))
                at += copy.n_bytes
            ways = [(there, Direction.TO_DEVICE), (back, Direction.TO_HOST)]
            for way in ways:
                self.alone[way[1]] += _carry(device, [way])
            began = device.clock.now()
            _carry(device, ways)
            self._mixed.append((n_bytes, device.clock.now() - began))

    def rates(self) -> LinkRates:
        return rates_of(self._activations, self.alone, self._mixed)


def rates_of(
    activations: Sequence[TransferDoneEvent],
    alone: Mapping[Direction, Sequence[TransferDoneEvent]],
    mixed: Sequence[tuple[int, float]],
) -> LinkRates:
    """Fit a link's rates to measured transfers.

    `mixed`: bytes each way, and seconds until both ways were done.
    """
    beside = sum(n for n, _ in mixed) / sum(seconds for _, seconds in mixed)
    kept = {direction: min(1.0, beside / _rate(ends)) for direction, ends in alone.items()}
    to_device, to_host = _rate(activations), _rate(alone[Direction.TO_HOST])
    return LinkRates(
        to_device,
        to_host,
        to_device * kept[Direction.TO_DEVICE],
        to_host * kept[Direction.TO_HOST],
    )


@contextmanager
def landing(machine: Machine, n_bytes: int) -> Iterator[int]:
    """The address of room on the host, touched; page-locked where a GPU copies there."""
    room = np.ones(ceil_div(n_bytes, PAGESIZE) * PAGESIZE + PAGESIZE, dtype=np.uint8)
    address = ceil_div(room.ctypes.data, PAGESIZE) * PAGESIZE
    pins = machine.pins if isinstance(machine, CudaMachine) else None
    if pins is not None:
        pins.pin(address, ceil_div(n_bytes, PAGESIZE) * PAGESIZE, read_only=False)
    try:
        yield address
    finally:
        if pins is not None:
            pins.unpin(address)


def _rate(ends: Sequence[TransferDoneEvent]) -> float:
    return sum(e.n_bytes for e in ends) / sum(e.seconds for e in ends)


def _carry(
    device: LiveDevice, wanted: Sequence[tuple[Sequence[Copy], Direction]]
) -> list[TransferDoneEvent]:
    link: Link = device.state.link
    for copies, direction in wanted:
        link.start(device.state.next_transfer(), copies, direction=direction)
    ends: list[TransferDoneEvent] = []
    while len(ends) < len(wanted):
        for event in device.inbox.take(None):
            if not isinstance(event, TransferDoneEvent) or event.error is not None:
                raise DeviceError("calibrate", f"a copy did not end well: {event}")
            ends.append(event)
    return ends
