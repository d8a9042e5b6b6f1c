"""Charge the time of calls that map and unmap pages to a simulated loop.

Weights, borrowed pages, and KV in ranges of its own take calls; KV in the device's window takes
none. Blocks that leave borrowed pages, or come to them, are copied by the loop too.

Live, the loop makes these calls itself, between jobs: jobs in flight continue, but the next job,
and the copy of a model's weights, begin only when the calls have returned. Used by `sim.device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from ballast.core.clock import Clock
from ballast.memory.vm import Range
from ballast.memory.vm_null import NullVm


@dataclass(frozen=True, slots=True, kw_only=True)
class PageCosts:
    """Seconds per page of mapping and unmapping."""

    map: float
    """Seconds of the loop to map a page and make it accessible."""
    unmap: float
    """Seconds of the loop to unmap a page."""
    beside: float = 0.0
    """Further seconds per page of an activation, beyond mapping and copying; the loop continues
    meanwhile."""
    borrow: float | None = None
    """Seconds of the loop to map a borrowed page; None: as `map`."""
    give_back: float | None = None
    """Seconds of the loop to unmap a borrowed page; None: as `unmap`."""
    kv: bool = True
    """Whether pages of KV that lies in a range of its own cost the same. False: job costs include
    it."""


class LoopTime:
    """The time until which a loop is busy with calls."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.until = 0.0
        """Virtual seconds; a past moment while it is free."""

    def spend(self, seconds: float) -> None:
        """Add a call made now, queued behind those that have not returned."""
        self.until = max(self.until, self._clock.now()) + seconds


class HomeCopies:
    """Copies of KV blocks on one device: those from or to borrowed pages take the loop's time."""

    def __init__(self, vm: NullVm, loop: LoopTime) -> None:
        self.bytes_per_second = inf
        """Rate at which borrowed pages are read."""
        self._borrowed, self._loop = vm.window.address(vm.n_pages), loop

    def __call__(self, dst: int, src: int, n_bytes: int) -> None:
        if max(dst, src) >= self._borrowed:
            self._loop.spend(n_bytes / self.bytes_per_second)


class TimedVm(NullVm):
    """Virtual memory without bytes whose calls take the loop's time."""

    def __init__(self, page_bytes: int, n_pages: int, costs: PageCosts, loop: LoopTime) -> None:
        super().__init__(page_bytes, n_pages)
        self._costs, self._loop = costs, loop
        self.owner_of: Callable[[int], str | None] = lambda page: None
        """Returns the owner of a page in the pool's ledger, by which ranges of KV are
        recognised."""
        self._is_kv: dict[int, bool] = {}
        """By the base of a range in which anything was mapped."""

    def map(
        self,
        range: Range,
        at: int,
        pages: Sequence[int],
        *,
        alias: bool = False,
        prefault: bool = False,
    ) -> None:
        super().map(range, at, pages, alias=alias, prefault=prefault)
        if pages and range.base not in self._is_kv:
            self._is_kv[range.base] = (self.owner_of(pages[0]) or "").startswith("kv:")
        self._spend(range, len(pages) * self._costs.map)

    def unmap(self, range: Range, at: int, n: int) -> None:
        super().unmap(range, at, n)
        self._spend(range, n * self._costs.unmap)

    def enter(self, pages: Sequence[int]) -> None:
        super().enter(pages)
        costs = self._costs
        self._loop.spend(len(pages) * (costs.map if costs.borrow is None else costs.borrow))

    def leave(self, pages: Sequence[int]) -> None:
        super().leave(pages)
        costs = self._costs
        each = costs.unmap if costs.give_back is None else costs.give_back
        self._loop.spend(len(pages) * each)

    def _spend(self, range: Range, seconds: float) -> None:
        if seconds and (self._costs.kv or not self._is_kv[range.base]):
            self._loop.spend(seconds)
