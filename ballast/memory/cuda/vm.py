"""Implement `Vm` on a GPU by CUDA virtual memory management: pages are driver handles.

Used by the pool and ranges of a live GPU, through the `Vm` protocol; `vm_memfd` is its counterpart
on CPU.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise, DeviceError, DeviceLost
from ballast.core.units import ceil_div
from ballast.memory.cuda.calls import Attribute, Driver
from ballast.memory.cuda.fences import EventFence, EventPool
from ballast.memory.cuda.pages import CudaImport, CudaPages
from ballast.memory.mapping_table import MappingTable
from ballast.memory.runs import runs_of
from ballast.memory.vm import Exported, Range, check_attach, window_pages


class CudaVm:
    """Implements `Vm`; one thread may populate, and any may `export` and `open`, beside the one
    that calls all else.

    Unmapping takes effect at once, whatever kernels are running: give pages back with a `fence()`
    handles after the last job that uses them was launched. Nothing here waits for the device.
    """

    table_pages = 1

    def __init__(self, driver: Driver, ordinal: int, page_bytes: int, n_pages: int) -> None:
        """`page_bytes`: a power of two and a multiple of the driver's granularity.

        Raises DeviceError, also where the device cannot map or export memory.
        """
        self.page_bytes = page_bytes
        self.n_pages = n_pages
        self.maps_host = True
        """Whether kernels may read weights in host memory; its machine sets it."""
        self.device = driver.device(ordinal)
        for need in (Attribute.MAPS_MEMORY, Attribute.EXPORTS_FDS):
            if not driver.attribute(self.device, need):
                raise DeviceError("cuDeviceGetAttribute", f"device {ordinal}: no {need.value}")
        least = driver.granularity(self.device)
        if page_bytes < least or page_bytes & (page_bytes - 1) or page_bytes % least or n_pages < 1:
            raise DeviceError(
                "cuMemGetAllocationGranularity",
                f"{n_pages} pages of {page_bytes} bytes: need powers of two from {least} bytes",
            )
        self.driver = driver
        self._mappings = MappingTable(n_pages)
        self._memory = CudaPages(driver, self.device, page_bytes)
        self._attached: dict[tuple[int, int], tuple[int, int]] = {}
        """Attached devices: identity -> number of its page 0 here, and its number of pages."""
        self._identity = (secrets.randbits(62), secrets.randbits(62))
        self._events = EventPool(driver)
        self._lanes: list[int] = []
        self._open = True
        self._entered = threading.local()
        self._context = driver.retain_context(self.device)
        self._enter()
        most = window_pages(n_pages)
        self.window = Range(driver.reserve(most * page_bytes, page_bytes), most, page_bytes)

    def enter(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_enter(pages)
        if missing := [page for page in pages if page not in self._memory]:
            raise DeviceError("cuMemMap", f"pages {missing} of another device are not exported")
        self._enter()
        self._map_window(pages)
        self._mappings.uses.enter(pages)

    def leave(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_leave(pages)
        self._enter()
        self._unmap_window(pages)
        self._mappings.uses.leave(pages)

    def prefault(self, pages: Sequence[int]) -> None:
        """Do nothing: mapping enters the device's page tables."""

    def reserve(self, n_bytes: int) -> Range:
        if n_bytes <= 0:
            raise BrokenPromise(f"reserved {n_bytes} bytes")
        self._enter()
        n_pages = ceil_div(n_bytes, self.page_bytes)
        base = self.driver.reserve(n_pages * self.page_bytes, self.page_bytes)
        range = Range(base, n_pages, self.page_bytes)
        self._mappings.open(range)
        return range

    def release(self, range: Range) -> None:
        self._mappings.check_close(range)
        self._enter()
        self.driver.free(range.base, range.n_bytes)
        self._mappings.close(range)

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        """Map pages; `prefault` has no effect, since mapping enters the device's page tables."""
        self._mappings.check_map(range, at, pages, alias)
        for page in pages:
            if page not in self._memory and page < self.n_pages:
                raise BrokenPromise(f"page {page} has no memory that could be mapped")
            if page not in self._memory:
                raise DeviceError("cuMemMap", f"page {page} of another device is not exported")
        self._enter()
        self._memory.map(range.address(at), pages)
        self._mappings.map(range, at, pages)

    def unmap(self, range: Range, at: int, n: int) -> None:
        pages = self._mappings.check_unmap(range, at, n)
        self._enter()
        self._memory.unmap(range.address(at), pages)
        self._mappings.unmap(range, at, n)

    def map_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        """Record that passes read host memory in place of what would be mapped here. The driver
        maps page-locked memory at addresses of its own, which executors use (`device_pointer`): it
        cannot be mapped into a reserved range. Raises DeviceError where it is not page-locked."""
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_map_host(range, at, n)
        self._enter()
        self.driver.device_pointer(source)
        self._mappings.map_host(range, at, n)

    def unmap_host(self, range: Range, at: int, source: int, n_bytes: int) -> None:
        n = ceil_div(n_bytes, self.page_bytes)
        self._mappings.check_unmap_host(range, at, n)
        self._mappings.unmap_host(range, at, n)

    def populate(self, pages: Sequence[int]) -> Short | None:
        self._mappings.uses.check(pages)
        self._enter()
        bare = [page for page in pages if page not in self._memory]
        try:
            return self._memory.create(bare)
        finally:
            self._show([page for page in bare if page in self._memory])

    def discard(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_unused(pages)
        self._enter()
        full = [page for page in pages if page in self._memory]
        self._unmap_window(full)
        try:
            self._memory.release(full)
        except DeviceError:
            if self.driver.lost is None:
                self._map_window(full)
            raise

    def open(self, exported: Exported) -> Exported:
        """The same pages, ready to be attached without a call of the driver; closes the
        descriptors. Raises DeviceError, also where this device cannot use them in place."""
        check_attach(exported, self.page_bytes, self._identity)
        if exported.page_fds is None or len(exported.page_fds) != len(exported.pages):
            raise DeviceError("attach", "these pages are no GPU's")
        self._enter()
        imported = self._memory.import_handles(exported.page_fds)
        exported.close()
        return replace(exported, page_fds=None, imported=imported)

    def attach(self, exported: Exported) -> int:
        """Raises DeviceError where memory of that device cannot be used in place on this one.

        What a borrower was lent before may have other memory by now: with each lease, pages are
        attached again, and memory of theirs that is mapped nowhere is let go of.
        """
        opened = exported if exported.imported is not None else self.open(exported)
        assert isinstance(opened.imported, CudaImport)
        self._enter()
        if exported.device not in self._attached:
            start = self._mappings.uses.attach(exported.n_pages)
            self._attached[exported.device] = (start, exported.n_pages)
        first, _ = self._attached[exported.device]
        handles = {
            first + page: handle
            for page, handle in zip(exported.pages, opened.imported.release_handles(), strict=True)
        }
        # One that is mapped is lent still, so its memory is the same.
        again = [page for page in handles if self._mappings.uses.is_mapped(page)]
        self._memory.drop_handles([handles.pop(page) for page in again])
        self._memory.replace(handles)
        return first

    def detach(self, first: int) -> None:
        self._mappings.uses.check_detach(first)
        self._enter()
        for device, (start, n) in list(self._attached.items()):
            if start == first:
                self._memory.drop(self._memory.within(start, n))
                del self._attached[device]
        self._mappings.uses.detach(first)

    def forget(self, pages: Sequence[int]) -> None:
        self._mappings.uses.check_away(pages)
        self._enter()
        self._memory.drop([page for page in pages if page in self._memory])

    def os_pages(self, range: Range) -> dict[int, int]:
        """Return the mapped pages by index, found by two driver calls for each page."""
        self._enter()
        found: dict[int, int] = {}
        for at in self._in_window() if range is self.window else _indices(0, range.n_pages):
            handle = self.driver.retain_handle(range.address(at))
            if handle is None:
                continue
            self.driver.release(handle)
            page = self._memory.page_of(handle)
            if page is None:
                raise BrokenPromise(f"memory that is no page's is mapped in {range}")
            found[at] = page
        return found

    def physical_bytes(self) -> int:
        """Memory that the device's own pages have now: what counts against the budget."""
        return len(self._memory.within(0, self.n_pages)) * self.page_bytes

    @property
    def imported(self) -> int:
        """Pages of other devices whose memory this process keeps."""
        return sum(len(self._memory.within(*at)) for at in self._attached.values())

    def export(self, pages: Sequence[int]) -> Exported:
        """To the driver each page is memory of its own, so each has a descriptor."""
        self._mappings.uses.check(pages)
        self._enter()
        fds: list[int] = []
        try:
            for page in pages:
                fd = self._memory.export(page)
                if fd is None:
                    raise BrokenPromise(f"page {page} has no memory to export")
                fds.append(fd)
        except (BrokenPromise, DeviceError):
            for fd in fds:
                os.close(fd)
            raise
        size, n = self.page_bytes, self.n_pages
        return Exported(self._identity, size, n, tuple(pages), None, tuple(fds))

    def watch(self, stream: int) -> None:
        """Include a lane's stream in fences from now on."""
        self._lanes.append(stream)

    def unwatch(self, stream: int) -> None:
        """Exclude a stream from fences; all of its work must have ended."""
        self._lanes.remove(stream)

    def fence(self) -> EventFence:
        """Return a fence for all work that the watched streams have now."""
        self._enter()
        return self._events.after(self._lanes)

    def close(self) -> None:
        """Goes on where the driver fails, and raises its first error at the end. A device that is
        lost is left to the driver, which takes everything back when the process ends."""
        if not self._open:
            return
        if self.driver.lost is not None:
            self._open = False
            return
        self._enter()
        self._open = False
        failed: list[DeviceError] = []

        def attempt(call: Callable[..., object], *arguments: object) -> None:
            try:
                call(*arguments)
            except DeviceError as error:
                failed.append(error)

        for range in self._mappings.ranges():
            for at in self._mappings.pages(range):
                attempt(self.driver.unmap, range.address(at), self.page_bytes)
            attempt(self.driver.free, range.base, range.n_bytes)
        for page in self._in_window():
            attempt(self.driver.unmap, self.window.address(page), self.page_bytes)
        attempt(self.driver.free, self.window.base, self.window.n_bytes)
        for start, n in [(0, self.n_pages), *self._attached.values()]:
            for page in self._memory.within(start, n):
                attempt(self.driver.release, self._memory.handle(page))
        attempt(self._events.close)
        attempt(self.driver.release_context, self.device)
        if failed:
            raise failed[0]

    def _in_window(self) -> list[int]:
        """Pages mapped in the window."""
        return [*self._memory.within(0, self.n_pages), *self._mappings.uses.entered()]

    def _show(self, created: Sequence[int]) -> None:
        """Map pages in the window that have just been created; where that fails, none is left."""
        if self.driver.lost is not None:
            return
        try:
            self._map_window(created)
        except DeviceError:
            if self.driver.lost is None:
                self._memory.release(created)
            raise

    def _map_window(self, pages: Sequence[int]) -> None:
        """Map pages in the window: all or none."""
        done: list[int] = []
        try:
            for first, n in runs_of(pages):
                self._memory.map(self.window.address(first), _indices(first, n))
                done += _indices(first, n)
        except DeviceError:
            if self.driver.lost is None:
                self._unmap_window(done)
            raise

    def _unmap_window(self, pages: Sequence[int]) -> None:
        """Unmap pages from the window: all or none, unless mapping fails as well."""
        done: list[int] = []
        try:
            for first, n in runs_of(pages):
                self._memory.unmap(self.window.address(first), _indices(first, n))
                done += _indices(first, n)
        except DeviceError:
            if self.driver.lost is None:
                self._map_window(done)
            raise

    def _enter(self) -> None:
        """Make the context current in this thread. Raises DeviceLost for a device that is lost."""
        if not self._open:
            raise BrokenPromise("this device is closed")
        if self.driver.lost is not None:
            raise DeviceLost("device", f"it is lost since {self.driver.lost}")
        if not getattr(self._entered, "yes", False):
            self.driver.set_current(self._context)
            self._entered.yes = True


def _indices(first: int, n: int) -> range:
    return range(first, first + n)
