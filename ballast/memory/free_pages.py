"""Keep the free pages of a pool, and know which pages have physical memory.

Used by `Pool`, and by `PopulatedReserve` from its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ballast.core.actions import Short
from ballast.core.errors import BrokenPromise
from ballast.memory.runs import Runs
from ballast.memory.vm import Vm


class FreePages:
    """Free pages, *populated* (they have physical memory) or *bare*.

    While a step of `populate_some` or `discard_some` runs, its pages are in neither set.
    """

    def __init__(self, vm: Vm, n_pages: int, lock: threading.Lock) -> None:
        """`lock`: held by the caller of `pop` and `add`, since both sets change under it."""
        self.vm = vm
        self.has_memory = bytearray(n_pages)
        """Whether each page, free or not, has memory."""
        self.step_lock = threading.Lock()
        """Held during a step; to be acquired before `lock`."""
        self._lock = lock
        self._populated = Runs()
        self._bare = Runs(range(n_pages))

    @property
    def populated(self) -> int:
        """Free pages that have physical memory already."""
        return len(self._populated)

    def pop(self, n: int, near: int | None, *, bare: bool) -> list[int] | None:
        """Remove `n` pages, preferably those that follow `near`, and bare or populated as asked;
        None where a step has some of them."""
        if len(self._populated) + len(self._bare) < n:
            return None
        first, second = self._populated, self._bare
        if bare:
            first, second = second, first
        pages = first.pop(n, near)
        return pages + second.pop(n - len(pages), near)

    def add(self, pages: Sequence[int]) -> None:
        """Add pages that have become free."""
        has_memory = self.has_memory
        self._populated.add(page for page in pages if has_memory[page])
        self._bare.add(page for page in pages if not has_memory[page])

    def fill(self, pages: Sequence[int]) -> Short | None:
        """Give memory to those of the pages, just popped, that have none: to all or to none."""
        bare = [page for page in pages if not self.has_memory[page]]
        return self._populate(bare) if bare else None

    def strip(self, pages: Sequence[int]) -> None:
        """Give the memory of pages, just popped, back to the machine."""
        full = [page for page in pages if self.has_memory[page]]
        if full:
            self.vm.discard(full)
            self._mark(full, False)

    def populate_some(self, n: int) -> int | Short:
        """Populate up to `n` bare pages; returns how many (0: none was bare)."""
        with self.step_lock:
            with self._lock:
                pages = self._bare.pop(n)
            try:
                short = self._populate(pages)
            finally:
                with self._lock:
                    self.add(pages)
            return len(pages) if short is None else short

    def discard_some(self, n: int) -> int:
        """Give the memory of up to `n` populated pages back to the machine; returns how many.
        Raises DeviceError, with the pages populated as before."""
        with self.step_lock:
            with self._lock:
                pages = self._populated.pop(n)
            try:
                self.strip(pages)
            finally:
                with self._lock:
                    self.add(pages)
            return len(pages)

    def validate(self, free: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        """Raises BrokenPromise unless just the pages in the mask are here, each in the right set.
        No step may run."""
        populated, bare = self._populated.mask(len(free)), self._bare.mask(len(free))
        has_memory = np.frombuffer(self.has_memory, dtype=np.bool_)
        if (populated & bare).any() or ((populated | bare) != free).any():
            raise BrokenPromise("the free pages are not those the ledger calls free")
        if (populated & ~has_memory).any() or (bare & has_memory).any():
            raise BrokenPromise("a free page is in the wrong set")

    def _populate(self, bare: Sequence[int]) -> Short | None:
        """Populate all of the pages or none: discard those populated before memory ran out."""
        short = self.vm.populate(bare)
        if short is None:
            self._mark(bare, True)
        else:
            self.vm.discard(bare)
        return short

    def _mark(self, pages: Sequence[int], has_memory: bool) -> None:
        for page in pages:
            self.has_memory[page] = has_memory
