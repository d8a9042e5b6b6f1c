"""Host memory that a GPU copies from at the link's full rate: page-locked where it is mapped."""

from __future__ import annotations

import threading

from ballast.core.errors import DeviceError
from ballast.memory.cuda_calls import Attribute, Driver


class Pins:
    """What is pinned of this process's mappings, for all its devices.

    Pin a mapping once it is filled, and unpin it before it is unmapped or replaced: the driver
    holds on to the memory, not to the addresses. Safe to use from several threads.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self._device = driver, driver.device(ordinal)
        self._context = driver.retain_context(self._device)
        self._reads_only = bool(driver.attribute(self._device, Attribute.PINS_READ_ONLY))
        self._pinned: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Pinned now."""
        return sum(self._pinned.values())

    def pin(self, address: int, n_bytes: int, *, read_only: bool = True) -> bool:
        """Whether it is pinned now: some devices cannot pin what is mapped to be read only, and
        copy from there at the rate of pageable memory. Whole OS pages. Raises DeviceError, where
        the machine has no more memory that could be locked, or it is pinned already."""
        if read_only and not self._reads_only:
            return False
        with self._lock:
            if address in self._pinned:
                raise DeviceError("cuMemHostRegister", f"{address:#x} is pinned already")
            self._driver.set_current(self._context)
            self._driver.pin(address, n_bytes, read_only)
            self._pinned[address] = n_bytes
        return True

    def unpin(self, address: int) -> None:
        """Nothing where it is not pinned. No copy may be under way."""
        with self._lock:
            if address in self._pinned:
                self._driver.set_current(self._context)
                self._driver.unpin(address)
                del self._pinned[address]

    def close(self) -> None:
        for address in list(self._pinned):
            self.unpin(address)
        self._driver.release_context(self._device)
