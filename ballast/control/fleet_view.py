"""Build the fleet policy's view of all devices, from their reports and the book of leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Protocol

from ballast.core.fleet import DeviceLoad, FleetView, Hosting, LeaseView, Need, Room
from ballast.core.order import Fleet
from ballast.core.report import DeviceReport


class FleetBook(Protocol):
    """What fleet policies see that is not in the devices' records."""

    def rooms(self) -> Sequence[Room]:
        """Return the devices with their budgets."""

    def needs(self) -> Sequence[Need]:
        """Return the memory that models need of a device."""

    def leases(self) -> Sequence[LeaseView]:
        """Return all that is lent."""

    def pairs(self) -> Sequence[tuple[str, str]]:
        """Return (lender, borrower) of all that can lend, and whose lending is up to policies."""


class FleetViews:
    """The views of one policy; of what devices count, each has what came since the one before."""

    def __init__(self, fleet: Fleet, book: FleetBook) -> None:
        self._fleet, self._book = fleet, book
        self._rooms = tuple(book.rooms())
        self._seen: dict[tuple[str, str], float] = {}
        """By (device, model): lane seconds up to the last view."""
        self._missed: dict[tuple[str, str], int] = {}
        """By (device, model): `missed_blocks` up to the last view."""
        self._copied: dict[str, float] = {}
        """By device: seconds of copies of layers up to the last view."""
        self._seen_at = 0.0

    def view(self, now: float) -> FleetView:
        """Return the view at `now`; each model's work is averaged since the last one."""
        seconds = max(now - self._seen_at, 1e-9)
        self._seen_at = now
        reports = {name: device.last_report() for name, device in self._fleet.able.items()}
        placements = self._fleet.placements()
        homes = {(model, device) for model, on in placements.items() for device in on}
        known = {model for model, on in placements.items() if on}
        loads = []
        for room in self._rooms:
            report = reports.get(room.device)
            if report is None:
                continue
            copied = sum(m.copy_seconds for m in report.models)
            before = self._copied.get(room.device, 0.0)
            self._copied[room.device] = copied
            loads.append(
                DeviceLoad(
                    room,
                    tuple(self._hosting(report, room.device, homes, known, seconds)),
                    report.page_bytes,
                    report.total,
                    report.free + report.reclaiming,
                    max(copied - before, 0.0) / seconds,
                    report.prices,
                )
            )
        book = self._book
        leases, pairs = tuple(book.leases()), tuple(book.pairs())
        return FleetView(now, tuple(loads), tuple(book.needs()), leases, pairs)

    def _hosting(
        self,
        report: DeviceReport,
        device: str,
        homes: Set[tuple[str, str]],
        known: Set[str],
        seconds: float,
    ) -> Iterable[Hosting]:
        for m in report.models:
            before = self._seen.get((device, m.name), 0.0)
            self._seen[device, m.name] = m.lane_seconds
            missed = self._missed.get((device, m.name), 0)
            self._missed[device, m.name] = m.missed_blocks
            homed = (m.name, device) in homes
            yield Hosting(
                m.name,
                max(m.lane_seconds - before, 0.0) / seconds,
                m.waiting + m.running + m.paused,
                m.late,
                m.weight_pages * report.page_bytes,
                homed,
                m.traffic,
                kv_pages=m.kv_pages,
                cached_pages=m.cached_pages,
                borrowed_pages=m.borrowed_pages,
                waiting=m.waiting,
                leaving=not homed and m.name in known,
                missed_blocks=max(0, m.missed_blocks - missed),
                lacking=m.lacking,
                lacking_tokens=m.lacking_tokens,
                longest_tokens=m.longest_tokens,
            )
