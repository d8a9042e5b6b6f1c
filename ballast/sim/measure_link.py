"""Measure what this machine's link carries: to the device, to the host, and both at once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from ballast.core.errors import DeviceError
from ballast.core.event import TransferDone
from ballast.core.link import Direction, LinkRates
from ballast.engine.device import LiveDevice
from ballast.engine.model import ModelState
from ballast.memory.copies import Copy
from ballast.memory.transfer import Link


class LinkMeter:
    """Collects transfers, and says what they show. The loop of the device must not run."""

    def __init__(self) -> None:
        self._alone: dict[Direction, list[TransferDone]] = {d: [] for d in Direction}
        self._mixed: list[float] = []
        """Bytes per second of both directions together."""

    def activated(self, done: TransferDone) -> None:
        """A model was brought in, alone, onto pages that had just been mapped."""
        self._alone[Direction.TO_DEVICE].append(done)

    def measure(self, device: LiveDevice, m: ModelState) -> None:
        """Copy the weights of `m`, which are on the device, to the host; then both ways at once."""
        there = [s.copy for s in m.weights.segments]
        landing = np.zeros(sum(copy.n_bytes for copy in there), dtype=np.uint8)
        back, at = [], landing.ctypes.data
        for copy in there:
            back.append(Copy(at, copy.dst, copy.n_bytes))
            at += copy.n_bytes
        self._alone[Direction.TO_HOST] += _carry(device, [(back, Direction.TO_HOST)])
        both = [(there, Direction.TO_DEVICE), (back, Direction.TO_HOST)]
        ends = _carry(device, both)
        self._mixed.append(sum(e.n_bytes for e in ends) / max(e.seconds for e in ends))

    def rates(self) -> LinkRates:
        """Half of what both directions carry together is each one's."""
        alone = {
            d: sum(e.n_bytes for e in ends) / sum(e.seconds for e in ends)
            for d, ends in self._alone.items()
        }
        to_device, to_host = alone[Direction.TO_DEVICE], alone[Direction.TO_HOST]
        half = statistics.median(self._mixed) / 2
        return LinkRates(to_device, to_host, min(to_device, half), min(to_host, half))


def _carry(
    device: LiveDevice, wanted: Sequence[tuple[Sequence[Copy], Direction]]
) -> list[TransferDone]:
    link: Link = device.state.link
    for copies, direction in wanted:
        link.start(device.state.next_transfer(), copies, direction=direction)
    ends: list[TransferDone] = []
    while len(ends) < len(wanted):
        for event in device.inbox.take(None):
            if not isinstance(event, TransferDone) or event.error is not None:
                raise DeviceError("calibrate", f"a copy did not end well: {event}")
            ends.append(event)
    return ends
