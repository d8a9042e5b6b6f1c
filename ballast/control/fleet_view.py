"""Build the fleet policy's view of all devices, from their reports and the book of leases."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from ballast.core.fleet import (
    DeviceCapacity,
    DeviceLoad,
    FleetView,
    LeaseView,
    ModelDemand,
    ModelLoad,
)
from ballast.core.order import Fleet
from ballast.core.report import DeviceReport, ModelReport


class FleetBook(Protocol):
    """What fleet policies see that is not in the devices' records."""

    def rooms(self) -> Sequence[DeviceCapacity]:
        """Return the devices with their budgets and hosts."""

    def network(self) -> float:
        """Return the bytes per second at which a host receives weights."""

    def needs(self) -> Sequence[ModelDemand]:
        """Return the memory that models need of a device."""

    def leases(self) -> Sequence[LeaseView]:
        """Return all that is lent."""

    def pairs(self) -> Sequence[tuple[str, str]]:
        """Return (lender, borrower) of all that can lend, and whose lending is up to policies."""


class FleetViews:
    """The views of one policy; of what devices count, each has what came since the one before."""

    def __init__(self, fleet: Fleet, book: FleetBook) -> None:
        self._fleet, self._book = fleet, book
        self._seen: dict[str, dict[str, ModelReport]] = {}
        """By device and model, its report in the last view."""
        self._copied: dict[str, float] = {}
        """By device: seconds of copies of layers up to the last view."""
        self._seen_at = 0.0

    def view(self, now: float) -> FleetView:
        """Return the view at `now`; each model's work is averaged since the last one."""
        seconds = max(now - self._seen_at, 1e-9)
        self._seen_at = now
        reports = {name: device.last_report() for name, device in self._fleet.able.items()}
        placements = self._fleet.placements()
        loads = []
        for room in self._book.rooms():
            report = reports.get(room.device)
            if report is None:
                continue
            copied = sum(m.copy_seconds for m in report.models)
            before = self._copied.get(room.device, 0.0)
            self._copied[room.device] = copied
            loads.append(
                DeviceLoad(
                    room,
                    tuple(self._hosting(report, room.device, placements, seconds)),
                    report.page_bytes,
                    report.total,
                    report.free + report.reclaiming,
                    max(copied - before, 0.0) / seconds,
                    report.prices,
                )
            )
        book = self._book
        leases, pairs = tuple(book.leases()), tuple(book.pairs())
        needs = tuple(book.needs())
        return FleetView(now, tuple(loads), needs, leases, pairs, book.network())

    def _hosting(
        self,
        report: DeviceReport,
        device: str,
        placements: Mapping[str, Collection[str]],
        seconds: float,
    ) -> Iterable[ModelLoad]:
        seen, page_bytes = self._seen.setdefault(device, {}), report.page_bytes
        for m in report.models:
            before = seen.get(m.name)
            seen[m.name] = m
            lane_seconds, missed = m.lane_seconds, m.missed_blocks
            if before is not None:
                lane_seconds = max(lane_seconds - before.lane_seconds, 0.0)
                missed = max(missed - before.missed_blocks, 0)
            homes = placements.get(m.name, ())
            homed = device in homes
            yield ModelLoad(
                m.name,
                lane_seconds / seconds,
                m.waiting + m.running + m.paused,
                m.late,
                m.weight_pages * page_bytes,
                homed,
                m.traffic,
                m.kv_pages,
                m.cached_pages,
                m.borrowed_pages,
                m.waiting,
                missed,
                m.lacking,
                m.lacking_tokens,
                leaving=bool(homes) and not homed,
                longest_tokens=m.longest_tokens,
            )
