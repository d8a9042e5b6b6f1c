"""Lend idle KV memory of devices to those that lack it: SwiftCache's elastic cache (3.4, 3.5).

The fleet policy of placement `swiftcache`. Only asks: lenders lend free pages alone, and the
controller refuses what devices cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetAction,
    FleetDecision,
    FleetView,
    LendPages,
    ModelDemand,
    RecallPages,
)
from ballast.core.units import ceil_div
from ballast.policy.base import FleetPolicy
from ballast.policy.fleet.elastic_cache import ElasticUnits, scale_down, scale_up
from ballast.policy.fleet.initial_placement import spread

_PAGES = ElasticUnits(1, 1)
"""Pages need no common multiple of block sizes."""
_Sample = tuple[float, int, int, int]


@dataclass(frozen=True, slots=True)
class UseSamples:
    """Memo: by device, (time, pages that its requests used or lacked, pages with KV of any use,
    pages of prefixes that it missed)."""

    used: Mapping[str, tuple[_Sample, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ElasticLending(FleetPolicy):
    """Every `every` seconds, have devices take pages back that their requests lack, and lend pages
    that they do not need to devices whose requests lack some.

    Any device may borrow and any may lend, as demand goes; with `master` (a device's number,
    counted from 1) that one alone borrows, and all others lend, as in the paper.

    A device that lacks pages recalls them (ScaleUp); those that lack none lend what they can spare
    (ScaleDown) to devices that lack some, or that miss cached prefixes: that computed again what
    they had forgotten to make room. First what requests lack, then as much as was missed and one
    more request takes. Lacking compares all waiting requests with free pages, unused borrowed ones
    and cached prefixes. A device spares what is beyond its models' weights, the most pages that
    were needed at once in the last `window` seconds and one more request of mean length: free
    pages, and those of its own cached prefixes, the coldest first, unless it has missed some in
    that time; what it misses then it recalls. Pages without which their borrower has had room for
    all of its KV for `window` seconds are recalled.

    `published`: Algorithm 1 as it is in the paper. One request (of mean length, of those waiting)
    is compared with all of the device's pages, used or not; all free pages beyond the longest
    request of the last minute or two are lent to the master, or to the device that lacks most.
    """

    every: float = 1.0
    window: float = 60.0
    master: float = 0
    published: float = 0

    options: ClassVar = ("window", "master", "published")

    @property
    def lends(self) -> bool:
        return True

    @property
    def replicates(self) -> bool:
        return True

    def place(
        self, needs: Sequence[ModelDemand], rooms: Sequence[DeviceCapacity]
    ) -> dict[str, list[str]]:
        return spread(needs, rooms, by_work=True)

    def __call__(self, view: FleetView, memo: object) -> FleetDecision:
        before = memo.used if isinstance(memo, UseSamples) else {}
        needs, samples = {need.model: need for need in view.needs}, {}
        books: dict[str, _Book] = {}
        for device in view.devices:
            kept = (s for s in before.get(device.name, ()) if s[0] > view.now - self.window)
            missed = _missed(device, needs)
            used = (*kept, (view.now, _used(device, needs), _held(device, missed), missed))
            samples[device.name] = used
            books[device.name] = _Book(device, view, needs, used, bool(self.published))
        actions: list[FleetAction] = [*self._recalls(view, books), *self._lends(view, books)]
        return FleetDecision(tuple(actions), UseSamples(samples), view.now + self.every)

    def _recalls(self, view: FleetView, books: Mapping[str, _Book]) -> list[RecallPages]:
        """Return recalls of pages that lenders lack, and of those that borrowers need no more."""
        found = []
        lacking = {name: b.lack + b.missed - b.coming for name, b in books.items()}
        for lease in sorted(view.leases, key=lambda v: (v.lender, -v.pages, v.borrower)):
            standing = lease.pages - lease.recalled
            if (lease.lender, lease.borrower) not in view.pairs or lease.lender not in lacking:
                continue
            pages = min(standing, max(0, lacking[lease.lender]))
            lacking[lease.lender] -= pages
            why = f"{lease.lender} lacks {pages} pages"
            borrower = books.get(lease.borrower)
            if pages < standing and borrower is not None and borrower.needs_none(self.window):
                pages, why = standing, f"{lease.borrower} has needed none for {self.window:g} s"
            if pages:
                found.append(RecallPages(lease.lender, lease.borrower, pages, why=why))
        return found

    def _lends(self, view: FleetView, books: Mapping[str, _Book]) -> list[LendPages]:
        """Return what devices lend that neither lack pages nor borrow any."""
        if self.master:
            names = [n for i, n in enumerate(books, 1) if i == self.master]
        else:
            wanting = [n for n, b in books.items() if b.wants > 0]
            names = sorted(wanting, key=lambda n: (-books[n].lack, -books[n].wants, n))
        if not names:
            return []
        able = {n: b for n, b in books.items() if b.lack <= 0 and not (b.borrowed or b.missed)}
        spare = {n: b.spare() for n, b in able.items()}
        found = []
        for name in names[:1] if self.published else names:
            book = books[name]
            wanted = sum(spare.values()) if self.published else book.wants
            for lender in sorted(spare, key=lambda n: (-spare[n], n)):
                pages = min(wanted, spare[lender])
                if pages > 0 and (lender, name) in view.pairs:
                    why = f"{book.reason}, {lender} can spare {spare[lender]}"
                    found.append(LendPages(lender, name, pages, why))
                    spare[lender] -= pages
                    wanted -= pages
        return found


class _Book:
    """Pages that one device lacks, can spare, lends and borrows."""

    def __init__(
        self,
        device: DeviceLoad,
        view: FleetView,
        needs: Mapping[str, ModelDemand],
        samples: Sequence[_Sample],
        published: bool,
    ) -> None:
        self._device, self._samples, self._published = device, samples, published
        self._since = view.now - samples[0][0]
        self._served = [(h, needs[h.model]) for h in device.hosting if h.model in needs]
        self.coming = sum(v.recalled for v in view.leases if v.lender == device.name)
        """Pages that are recalled and on their way."""
        self.borrowed = sum(v.pages - v.recalled for v in view.leases if v.borrower == device.name)
        coming = (max(0, n.weights - h.weights) for h, n in self._served if not h.leaving)
        kv = sum(h.kv_pages for h in device.hosting)
        self._own = max(0, device.free + kv - ceil_div(sum(coming), device.page_bytes))
        """Pages that back KV, or could, beside the weights of all its models."""
        self.missed = 0 if published else samples[-1][3]
        """Pages of cached prefixes that it has missed since the previous view."""
        self.lack = self._lack()
        """Pages that waiting requests need beyond those that they could have."""

    @cached_property
    def wants(self) -> int:
        """Pages to borrow: those lacking, and as many as prefixes have lost. Only KV whose blocks
        fit into a page can lie there."""
        page = self._device.page_bytes
        usable = (
            (h.lacking or h.missed_blocks) and n.kv_bytes_per_token * n.block_tokens <= page
            for h, n in self._served
        )
        ahead = self._one_more() if self.missed else 0  # else the next one misses some again
        return self.lack + self.missed + ahead if any(usable) else 0

    @property
    def reason(self) -> str:
        """Why pages are lent to it."""
        name = self._device.name
        if self.lack or not self.missed:
            return f"{name} lacks {self.lack} pages"
        return f"{name} misses prefixes of {self.missed} pages"

    def spare(self) -> int:
        """Return the pages that the device can lend."""
        if self._published:
            longest = [h.longest_tokens * need.kv_bytes_per_token for h, need in self._served]
            spare, _ = scale_down(self._own, self._device.page_bytes, _PAGES, longest)
        else:
            spare = self._own - self._peak - self._one_more()
            # Nobody has come back for its prefixes: the coldest make way.
            idle = sum(h.cached_pages for h in self._device.hosting) if self._misses_none else 0
            return max(0, min(spare, self._device.free + idle))
        return max(0, min(spare, self._device.free))

    @property
    def _misses_none(self) -> bool:
        return not any(missed for *_, missed in self._samples)

    def needs_none(self, window: float) -> bool:
        """Return whether its own pages would have sufficed for the last `window` seconds, cached
        prefixes included."""
        held = max(held for _, _, held, _ in self._samples)
        most = max(self._peak, held)
        return not self._published and self._since >= 0.9 * window and most <= self._own

    @property
    def _peak(self) -> int:
        return max(used for _, used, _, _ in self._samples)

    def _lack(self) -> int:
        waits = [(h, need) for h, need in self._served if h.lacking]
        page = self._device.page_bytes
        if not self._published:
            unused = self.borrowed - sum(h.borrowed_pages for h in self._device.hosting)
            cached = sum(h.cached_pages for h in self._device.hosting)
            free = self._device.free + cached + max(0, unused)
            wanted = sum(_pages(h.lacking_tokens, h.lacking, need, page) for h, need in waits)
            return max(0, wanted - free)
        mean = (ceil_div(h.lacking_tokens, h.lacking) * n.kv_bytes_per_token for h, n in waits)
        return max((scale_up(self._own, page, _PAGES, n_bytes)[0] for n_bytes in mean), default=0)

    def _one_more(self) -> int:
        """Return the pages of a request of mean length, of the model whose requests have most."""
        page = self._device.page_bytes
        tokens = ((h.traffic.prompt_tokens + h.traffic.output_tokens, n) for h, n in self._served)
        return max((_pages(n_tokens, 1, need, page) for n_tokens, need in tokens), default=0)


def _used(device: DeviceLoad, needs: Mapping[str, ModelDemand]) -> int:
    """Return the pages whose KV requests of a device use, or wait for, wherever these are."""
    found = 0
    for h in device.hosting:
        found += h.kv_pages - h.cached_pages + h.borrowed_pages
        if h.model in needs and h.lacking:
            found += _pages(h.lacking_tokens, h.lacking, needs[h.model], device.page_bytes)
    return found


def _held(device: DeviceLoad, missed: int) -> int:
    """Return the pages of the KV that a device has, wherever it is, or misses."""
    return missed + sum(h.kv_pages + h.borrowed_pages for h in device.hosting)


def _missed(device: DeviceLoad, needs: Mapping[str, ModelDemand]) -> int:
    """Return the pages of cached prefixes that were missed since the previous view."""
    missing = [h for h in device.hosting if h.missed_blocks and h.model in needs]
    found = ((h.missed_blocks, needs[h.model]) for h in missing)
    return sum(_pages(n * m.block_tokens, 1, m, device.page_bytes) for n, m in found)


def _pages(tokens: float, requests: int, need: ModelDemand, page_bytes: int) -> int:
    """Return the pages of the KV of some requests that have `tokens` in all, in whole blocks."""
    blocks = ceil_div(int(tokens), need.block_tokens) + (requests - 1)
    return ceil_div(blocks * need.block_tokens * need.kv_bytes_per_token, page_bytes)
