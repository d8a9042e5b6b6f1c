"""Define samples of devices during a run: memory by owner, queues, and decisions of policies.

Taken by targets and simulations, summarised by `bench.report`, drawn by plots and pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ballast.core.report import ModelReport

USES = ("weights", "kv", "cached", "activations", "lent", "reclaiming", "free")
"""Uses of a device's memory. `kv` is KV that open requests need, `cached` that of prefixes without
such a request, which may be dropped at any time. They add up to the budget."""
_USE_OF_KIND = {"arena": "activations", "shared": "weights", "slots": "weights"}


class ReportedDevice(Protocol):
    """Fields that a `DeviceReport` and the server's `DeviceNow` have in common."""

    @property
    def page_bytes(self) -> int: ...
    @property
    def free(self) -> int: ...
    @property
    def reclaiming(self) -> int: ...
    @property
    def owners(self) -> Mapping[str, int]: ...
    @property
    def models(self) -> Sequence[ModelReport]: ...


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device at one moment."""

    owners: dict[str, int]
    """Bytes by owner, as in `DeviceReport`; cached prefixes as `cached:NAME` apart from `kv:NAME`,
    and `free` and `reclaiming` included, so that they add up to the device's budget."""
    waiting: dict[str, int] = field(default_factory=dict)
    """Requests that wait to be admitted, by model; models without any are left out."""
    running: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, report: ReportedDevice) -> DeviceSample:
        """Read a report, whose numbers may be of slightly different moments."""
        pages = {**report.owners, "reclaiming": report.reclaiming, "free": report.free}
        for m in report.models:
            cached = min(m.cached_pages, pages.get(f"kv:{m.name}", 0))
            if cached:
                pages[f"cached:{m.name}"] = cached
                pages[f"kv:{m.name}"] -= cached
        return cls(
            {owner: n * report.page_bytes for owner, n in pages.items()},
            {m.name: m.waiting for m in report.models if m.waiting},
            {m.name: m.running for m in report.models if m.running},
        )


@dataclass(frozen=True, slots=True)
class MemorySample:
    """All devices at one moment."""

    at: float
    """Seconds from the start of the workload."""
    devices: dict[str, DeviceSample]

    @property
    def owners(self) -> dict[str, int]:
        """Bytes by owner, over all devices."""
        return _sums(d.owners for d in self.devices.values())

    @property
    def uses(self) -> dict[str, int]:
        """Bytes by each of `USES`, over all devices."""
        return bytes_by_use(self.owners)

    @property
    def waiting(self) -> dict[str, int]:
        """Requests that wait to be admitted, by model, over all devices."""
        return _sums(d.waiting for d in self.devices.values())


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """An action that a policy, or an operator, requested of a device, and its refusal."""

    at: float
    """Seconds from the start of the workload."""
    device: str
    action: str
    """Name of a class of `core.actions`, or of the fleet's `Place` and `Withdraw`."""
    model: str
    """Empty where the action is about no single model."""
    why: str
    refused: str | None = None
    """Why it was not done; None: it was."""


def use_of(owner: str) -> str:
    """The one of `USES` that an owner's bytes count as."""
    kind = owner.partition(":")[0]
    return _USE_OF_KIND.get(kind, kind)


def bytes_by_use(owners: Mapping[str, int]) -> dict[str, int]:
    """Sums by each of `USES`, in their order."""
    uses = dict.fromkeys(USES, 0)
    for owner, n in owners.items():
        uses[use_of(owner)] += n
    return uses


def decisions_of(
    entries: Iterable[Mapping[str, Any]], device: str = "", origin: float = 0.0
) -> tuple[DecisionRecord, ...]:
    """The decisions among a story's entries, with times counted from `origin` on its clock.

    `device`: of entries that name none.
    """
    return tuple(
        DecisionRecord(
            entry["at"] - origin,
            entry.get("device", device),
            entry["action"],
            entry.get("model") or "",
            entry.get("why") or "",
            entry.get("refused"),
        )
        for entry in entries
        if "action" in entry
    )


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
