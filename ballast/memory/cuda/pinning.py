"""Page-lock (pin) host memory so that a GPU copies from it at the link's full rate.

Used for host-tier segments, which kernels can then read where they lie, and for host copies of
swapped KV. If pinning is not possible, copies still work, at the rate of pageable memory.
"""

from __future__ import annotations

import logging
import threading

from ballast.core.errors import BrokenPromise, DeviceError, DeviceLost
from ballast.memory import syscalls
from ballast.memory.cuda.calls import Attribute, Driver

log = logging.getLogger(__name__)


class PinnedMemory:
    """Page-locks mappings of this process, for all its devices.

    Pin a mapping once it is filled, and unpin it before it is unmapped or replaced: the driver
    holds on to the memory, not to the addresses. Safe to use from several threads.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self._driver, self._device = driver, driver.device(ordinal)
        self._context = driver.retain_context(self._device)
        self.reads_only = bool(driver.attribute(self._device, Attribute.PINS_READ_ONLY))
        """Whether it pins what is mapped to be read only, of a file that may not be written. Else
        the file has to be one that may: such a mapping is made writable while it is pinned."""
        self._warned = False
        self._pinned: dict[int, int] = {}
        self._lock = threading.Lock()

    @property
    def n_bytes(self) -> int:
        """Bytes pinned now."""
        return sum(self._pinned.values())

    def pin(self, address: int, n_bytes: int, *, read_only: bool = True) -> bool:
        """Pin memory, if the machine can; return whether it is pinned. A failure is logged.

        The memory must be whole OS pages of one mapping, read-only if `read_only`. Raises
        BrokenPromise if it is pinned already."""
        with self._lock:
            if address in self._pinned:
                raise BrokenPromise(f"{address:#x} is pinned already")
            self._driver.set_current(self._context)
            try:
                if read_only and not self.reads_only:
                    self._pin_as_writable(address, n_bytes)
                else:
                    self._driver.pin(address, n_bytes, read_only)
            except (DeviceError, OSError) as error:
                if not self._warned:
                    self._warned = True
                    log.warning("copies to the GPU are slow: not page-locked: %s", error)
                return False
            self._pinned[address] = n_bytes
        return True

    def _pin_as_writable(self, address: int, n_bytes: int) -> None:
        """Make a read-only mapping writable, pin it, and make it read-only again."""
        syscalls.mprotect(address, n_bytes, syscalls.PROT_READ | syscalls.PROT_WRITE)
        try:
            self._driver.pin(address, n_bytes, False)
        finally:
            syscalls.mprotect(address, n_bytes, syscalls.PROT_READ)

    def device_address(self, address: int) -> int | None:
        """Return where kernels find memory that was pinned at `address`; None: they cannot read it,
        as it is not pinned, or not mapped."""
        with self._lock:
            if address not in self._pinned:
                return None
            self._driver.set_current(self._context)
            try:
                return self._driver.device_pointer(address)
            except DeviceLost:
                raise
            except DeviceError as error:
                log.warning("pinned memory is not mapped into the device: %s", error)
                return None

    def unpin(self, address: int) -> None:
        """Unpin memory, if it is pinned. No copy from it may be in flight."""
        with self._lock:
            if address in self._pinned:
                self._driver.set_current(self._context)
                self._driver.unpin(address)
                del self._pinned[address]

    def close(self) -> None:
        for address in list(self._pinned):
            self.unpin(address)
        self._driver.release_context(self._device)
