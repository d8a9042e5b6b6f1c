"""Keep what devices' memory was used for over the last day, for the page, in bounded memory.

`serve` has it sampled; `/admin/history` returns it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from ballast.core.report import DeviceReport

SAMPLE_SECONDS = 2.0
_RINGS = ((SAMPLE_SECONDS, 150), (20.0, 180), (180.0, 480))
"""Seconds between samples, and how many are kept: five minutes, an hour, a day."""
_LEAST = 0.01
"""Share of a device's pages below which an owner is counted among the others of its use."""


class DeviceMemory(msgspec.Struct, frozen=True):
    """One device at one moment, in pages."""

    device: str
    page_bytes: int
    total: int
    free: int
    reclaiming: int
    owners: dict[str, int]
    """As in `DeviceReport`; small ones are together, without a name after the colon."""


class MemoryMoment(msgspec.Struct, frozen=True):
    """All devices at one moment."""

    time: float
    """Seconds since 1970."""
    open: int
    """Open requests of models."""
    devices: list[DeviceMemory]


class History(msgspec.Struct, frozen=True):
    """The answer of `/admin/history`."""

    every: float
    """Seconds between samples."""
    samples: list[msgspec.Raw]
    """Each a `MemoryMoment`, the oldest first."""


class MemoryHistory:
    """Samples of the last five minutes, hour and day, the older the fewer."""

    def __init__(self) -> None:
        self._rings = [(every, deque[tuple[float, bytes]](maxlen=n)) for every, n in _RINGS]

    def add(self, now: float, reports: Iterable[DeviceReport], open_requests: int) -> None:
        """Add a sample at `now` (seconds since 1970), where one is due."""
        due = [
            ring for every, ring in self._rings if not ring or not 0 <= now - ring[-1][0] < every
        ]
        if due:
            sample = MemoryMoment(now, open_requests, [_memory(report) for report in reports])
            encoded = msgspec.json.encode(sample)
            for ring in due:
                ring.append((now, encoded))

    def last(self, seconds: float, now: float) -> History:
        """Return samples of the last `seconds`, at the finest pace that reaches so far."""
        reaching = [(e, ring) for e, ring in self._rings if e * (ring.maxlen or 0) >= seconds]
        every, ring = reaching[0] if reaching else self._rings[-1]
        found = [msgspec.Raw(sample) for at, sample in ring if at >= now - seconds]
        return History(every, found)


def _memory(report: DeviceReport) -> DeviceMemory:
    owners: dict[str, int] = {}
    for owner, pages in report.owners.items():
        small = pages < _LEAST * report.total
        name = f"{owner.partition(':')[0]}:" if small else owner
        owners[name] = owners.get(name, 0) + pages
    return DeviceMemory(
        report.device, report.page_bytes, report.total, report.free, report.reclaiming, owners
    )
