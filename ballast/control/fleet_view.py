"""Build the fleet policy's view of all devices, from their reports and the book of leases."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ballast.control.order_events import PolicyState
from ballast.core.fleet import DeviceLoad, FleetView, Hosting, Room
from ballast.core.report import DeviceReport


class FleetViews:
    """The views of one policy; of what devices count, each has what came since the one before."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        """`rooms`: budgets of the devices."""
        self._rooms = tuple(rooms)
        self._seen: dict[tuple[str, str], float] = {}
        """By (device, model): lane seconds up to the last view."""
        self._forgotten: dict[tuple[str, str], int] = {}
        """By (device, model): blocks forgotten up to the last view."""
        self._copied: dict[str, float] = {}
        """By device: seconds of copies of layers up to the last view."""
        self._seen_at = 0.0

    def view(self, now: float, fleet: PolicyState) -> FleetView:
        """Return the view at `now`; each model's work is averaged since the last one."""
        seconds = max(now - self._seen_at, 1e-9)
        self._seen_at = now
        reports = fleet.reports()
        homes = {(model, device) for model, on in fleet.homes().items() for device in on}
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
                    tuple(self._hosting(report, room.device, homes, seconds)),
                    report.page_bytes,
                    report.total,
                    report.free + report.reclaiming,
                    max(copied - before, 0.0) / seconds,
                )
            )
        leases, pairs = tuple(fleet.leases()), tuple(fleet.pairs())
        return FleetView(now, tuple(loads), tuple(fleet.needs()), leases, pairs)

    def _hosting(
        self, report: DeviceReport, device: str, homes: set[tuple[str, str]], seconds: float
    ) -> Iterable[Hosting]:
        known = {model for model, _ in homes}
        for m in report.models:
            before = self._seen.get((device, m.name), 0.0)
            self._seen[device, m.name] = m.lane_seconds
            forgotten = self._forgotten.get((device, m.name), 0)
            self._forgotten[device, m.name] = m.forgotten_blocks
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
                forgotten_blocks=max(0, m.forgotten_blocks - forgotten),
                lacking=m.lacking,
                lacking_tokens=m.lacking_tokens,
                longest_tokens=m.longest_tokens,
            )
