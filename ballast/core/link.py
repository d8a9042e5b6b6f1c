"""Links between host and device: which way bytes go, and how quickly beside others."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Which way bytes go over a link between host and device."""

    TO_DEVICE = "to_device"
    TO_HOST = "to_host"

    @property
    def other(self) -> Direction:
        return Direction.TO_HOST if self is Direction.TO_DEVICE else Direction.TO_DEVICE


@dataclass(frozen=True, slots=True)
class LinkRates:
    """What a link carries, in bytes per second; all positive, and less beside others than alone."""

    to_device: float
    """While nothing goes the other way."""
    to_host: float
    """The same, to the host."""
    to_device_mixed: float
    """While both directions carry."""
    to_host_mixed: float
    """The same, to the host."""

    @classmethod
    def even(cls, alone: float, mixed: float | None = None) -> LinkRates:
        """Either direction carries `alone`, both together `mixed`: if None, no more than one."""
        beside = min(alone, (alone if mixed is None else mixed) / 2)
        return cls(alone, alone, beside, beside)

    def of(self, direction: Direction, mixed: bool) -> float:
        """Of all transfers of `direction`; `mixed`: there are some of the other, too."""
        if direction is Direction.TO_DEVICE:
            return self.to_device_mixed if mixed else self.to_device
        return self.to_host_mixed if mixed else self.to_host

    def times(self, n: int) -> LinkRates:
        """The rates of `n` such links together."""
        rates = (self.to_device, self.to_host, self.to_device_mixed, self.to_host_mixed)
        return LinkRates(*(n * rate for rate in rates))

    @property
    def mixed(self) -> float:
        """Both directions together, while both carry."""
        return self.to_device_mixed + self.to_host_mixed

    @property
    def positive(self) -> bool:
        return min(self.to_device, self.to_host, self.to_device_mixed, self.to_host_mixed) > 0
