"""Create, map, export and release the physical memory of a GPU's pages, by CUDA VMM handles.

Used by `CudaVm` only, which checks calls first. Each operation affects all of its pages or none.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from ballast.core.actions import Short
from ballast.core.errors import DeviceError, DeviceLost, OutOfMemory
from ballast.memory.cuda.calls import Driver

log = logging.getLogger(__name__)


class CudaImport:
    """Implements `Imported`: handles to memory that another process exported, one a page."""

    def __init__(self, driver: Driver, handles: list[int]) -> None:
        self._driver, self._handles = driver, handles

    def release_handles(self) -> list[int]:
        """Return the handles, which are the caller's from now on."""
        handles, self._handles = self._handles, []
        return handles

    def close(self) -> None:
        while self._handles:
            self._driver.release(self._handles[-1])
            self._handles.pop()


class CudaPages:
    """Driver handles of the pages that have memory. After a driver error nothing has changed.

    If restoring fails too, the device is lost (`Driver.lose`): its mappings are unknown.
    """

    def __init__(self, driver: Driver, device: int, page_bytes: int) -> None:
        self._driver, self._device, self._size = driver, device, page_bytes
        self._handles: dict[int, int] = {}
        self._page_of: dict[int, int] = {}
        self._stretches = True
        """Whether one call unmaps several pages, as far as is known."""
        self._exporting = threading.Lock()
        """Held while a page of this device is exported, or its memory given back."""

    def __contains__(self, page: int) -> bool:
        return page in self._handles

    def handle(self, page: int) -> int:
        return self._handles[page]

    def export(self, page: int) -> int | None:
        """A descriptor, the caller's; None: the page has no memory. From any thread."""
        with self._exporting:
            handle = self._handles.get(page)
            return None if handle is None else self._driver.export_fd(handle)

    def page_of(self, handle: int) -> int | None:
        return self._page_of.get(handle)

    def within(self, first: int, n: int) -> list[int]:
        """Pages `first .. first + n` that have memory."""
        # A copy in one step: another thread may be populating.
        return [page for page in list(self._handles) if first <= page < first + n]

    def create(self, pages: Sequence[int]) -> Short | None:
        """Create memory for pages that have none; if it runs out, pages that got memory keep it."""
        missing = [page for page in pages if page not in self._handles]
        for i, page in enumerate(missing):
            try:
                self._keep(page, self._driver.create(self._device, self._size))
            except OutOfMemory:
                return Short(len(missing) - i)
        return None

    def release(self, pages: Sequence[int]) -> None:
        """Where it fails, the contents of `pages` are lost, and who has memory is as before."""
        done: list[int] = []
        try:
            for page in pages:
                with self._exporting:
                    self._driver.release(self._handles[page])
                    self._forget(page)
                done.append(page)
        except DeviceError as error:
            self._undo(error, lambda: self._create_again(done))
            raise

    def import_handles(self, fds: Sequence[int]) -> CudaImport:
        """Import memory of another process that this device can use in place. From any thread."""
        imported: list[int] = []
        try:
            for fd in fds:
                imported.append(self._driver.import_fd(fd))
                self._check_reach(imported[-1])
        except DeviceError as error:
            self._undo(error, lambda: self._release_all(imported))
            raise
        return CudaImport(self._driver, imported)

    def replace(self, handles: dict[int, int]) -> None:
        """Set the imported handles of these pages, which must not be mapped anywhere."""
        before = [self._forget(page) for page in handles if page in self._handles]
        for page, handle in handles.items():
            self._keep(page, handle)
        self._release_all(before)

    def drop(self, pages: Sequence[int]) -> None:
        """Release imported memory of pages. After a failure, some of it has been released."""
        for page in pages:
            self._driver.release(self._handles[page])
            self._forget(page)

    def drop_handles(self, handles: Sequence[int]) -> None:
        """Release handles of `import_handles` that are not needed."""
        self._release_all(handles)

    def map(self, address: int, pages: Sequence[int]) -> None:
        """Map pages in order from `address`, readable and writable by the device."""
        done = 0
        try:
            for page in pages:
                self._driver.map(address + done * self._size, self._size, self._handles[page])
                done += 1
            if pages:
                self._driver.set_access(address, done * self._size, self._device)
        except DeviceError as error:
            self._undo(error, lambda: self._unmap_all(address, done))
            raise

    def unmap(self, address: int, pages: Sequence[int]) -> None:
        """Take away `pages`, which are mapped side by side from `address`: by one call, or by one
        each where the driver takes no more than one call mapped."""
        refused: DeviceError | None = None
        if len(pages) > 1 and self._stretches:
            try:
                self._driver.unmap(address, len(pages) * self._size)
                return
            except DeviceLost:
                raise
            except DeviceError as error:
                refused = error
        done = 0
        try:
            for _ in pages:
                self._driver.unmap(address + done * self._size, self._size)
                done += 1
        except DeviceError as error:
            self._undo(error, lambda: self.map(address, pages[:done]))
            raise
        if refused is not None:
            self._stretches = False
            log.warning(
                "pages are unmapped one by one, as several at once are refused: %s", refused
            )

    def _unmap_all(self, address: int, n: int) -> None:
        for i in range(n):
            self._driver.unmap(address + i * self._size, self._size)

    def _create_again(self, pages: Sequence[int]) -> None:
        if self.create(pages) is not None:
            raise DeviceError("cuMemCreate", f"no memory for {len(pages)} pages again")

    def _release_all(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self._driver.release(handle)

    def _check_reach(self, handle: int) -> None:
        owner = self._driver.handle_device(handle)
        if owner != self._device and not self._driver.can_access(self._device, owner):
            raise DeviceError(
                "cuDeviceCanAccessPeer", f"device {self._device} cannot use memory of {owner}"
            )

    def _undo(self, error: DeviceError, undo: Callable[[], None]) -> None:
        try:
            undo()
        except DeviceError as second:
            self._driver.lose(DeviceLost(error.call, f"{error.reason}, and undoing that: {second}"))

    def _keep(self, page: int, handle: int) -> None:
        self._handles[page] = handle
        self._page_of[handle] = page

    def _forget(self, page: int) -> int:
        handle = self._handles.pop(page)
        del self._page_of[handle]
        return handle
