"""Describe links between host and device: directions, and rates alone and with traffic both ways.

Used by live links, the simulator and the policies' estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Direction of a transfer over a link between host and device."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"

    @property
    def other(self) -> Direction:
        return Direction.TO_HOST if self is Direction.TO_DEVICE else Direction.TO_DEVICE


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Rates of a link in bytes per second, per direction, alone and mixed; all positive."""

    to_device: float
    """Rate to the device while there is no traffic to the host."""
    to_host: float
    """Rate to the host while there is no traffic to the device."""
    to_device_mixed: float
    """Rate to the device while both directions have traffic."""
    to_host_mixed: float
    """Rate to the host while both directions have traffic."""

    @classmethod
    def even(cls, alone: float, mixed: float | None = None) -> LinkRates:
        """Return equal rates for both directions: `alone` for one, `mixed` for the sum of both
        (None: the same as one alone)."""
        beside = min(alone, (alone if mixed is None else mixed) / 2)
        return cls(alone, alone, beside, beside)

    def of(self, direction: Direction, mixed: bool) -> float:
        """Return the total rate of transfers in `direction`; `mixed`: the other direction has
        traffic too."""
        if direction is Direction.TO_DEVICE:
            return self.to_device_mixed if mixed else self.to_device
        return self.to_host_mixed if mixed else self.to_host

    def times(self, n: int) -> LinkRates:
        """Return the rates of `n` such links together."""
        rates = (self.to_device, self.to_host, self.to_device_mixed, self.to_host_mixed)
        return LinkRates(*(n * rate for rate in rates))

    @property
    def mixed(self) -> float:
        """Sum of both directions' rates while both have traffic."""
        return self.to_device_mixed + self.to_host_mixed

    @property
    def positive(self) -> bool:
        return min(self.to_device, self.to_host, self.to_device_mixed, self.to_host_mixed) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Bandwidth of the link between host tier and device. Unpaced (None) by default on CPU."""

    device: str = "cpu:0"
    bytes_per_second: float | None = None
    """Rate of either direction while the other is idle; None: not paced."""
    mixed_bytes_per_second: float | None = None
    """Sum of both directions' rates while both have traffic; None: as of one direction alone."""
    shared: bool = False
    """Whether it is one link with those of other devices of the host that are shared."""
    memory: str = ""
    """Path of the memory by which their processes pace it together; set by the server."""
    peer_bytes_per_second: float | None = None
    """Rate, in either direction, of the one link by which all devices of the host reach the memory
    that they lend each other; None: it is as near as their own."""
    peer_memory: str = ""
    """As `memory`, of the link between devices."""
    peer_slot_bytes: int = 0
    """Bytes beside each device's budget, for each executor: two slots through which passes read
    copies of borrowed KV, layer by layer; 0: they read it in place. For comparisons
    (`benchmarks.swift_live --copied`); no key of the fleet file sets it."""

    @property
    def pace(self) -> LinkRates | None:
        if self.bytes_per_second is None:
            return None
        return LinkRates.even(self.bytes_per_second, self.mixed_bytes_per_second)

    @property
    def peer_pace(self) -> LinkRates | None:
        rate = self.peer_bytes_per_second
        return None if rate is None else LinkRates.even(rate, 2 * rate)
