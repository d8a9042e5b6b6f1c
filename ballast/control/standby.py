"""Decide when devices on standby serve, and when they do not any more; a pure state machine.

Run by `cluster.standby_devices`. A device on standby has no host: on Ray its wish is a placement
group only once load asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WANT_SECONDS = 10.0
"""Time for which requests have been late before one more device is asked for."""
LEAVE_SECONDS = 300.0
"""Time for which one device fewer would have been enough before the last one leaves."""
ENOUGH = 0.5
"""Part of their time in which the devices that are left would compute, at most."""


@dataclass(frozen=True, slots=True)
class Utilisation:
    """What a device has done lately."""

    late: int
    """Its late requests, as of `ModelReport`."""
    busy: float
    """Part of the time, since the last look, in which it has computed."""


@dataclass(frozen=True, slots=True)
class BeginServing:
    """A device on standby is to serve, as soon as a host has room."""

    device: str


@dataclass(frozen=True, slots=True)
class EndServing:
    """A device is to be emptied, and to be on standby again; `Standby.ended` follows."""

    device: str


class Standby:
    """The devices of a fleet that serve only when load asks for them. `look` has to be called every
    second or so."""

    def __init__(self, devices: Sequence[str]) -> None:
        """`devices`: in the order in which they are to serve; all are on standby."""
        self._devices = tuple(devices)
        self._asked: list[str] = []
        """Those that serve, or wait for a host, in the order in which they were asked for."""
        self._leaving: str | None = None
        self._late_since: float | None = None
        self._calm_since: float | None = None

    def look(
        self, now: float, serving: Mapping[str, Utilisation]
    ) -> BeginServing | EndServing | None:
        """Return what is to be done at `now`, seconds. `serving`: all devices that serve, those
        that always do as well."""
        if self._leaving is not None:
            return None
        coming = any(name not in serving for name in self._asked)
        late = any(use.late for use in serving.values())
        busy = sum(use.busy for use in serving.values())
        left = len(serving) - (not coming)
        calm = bool(self._asked) and not late and busy <= ENOUGH * left
        self._late_since = _since(self._late_since, now, late and not coming)
        self._calm_since = _since(self._calm_since, now, calm)
        if self._late_since is not None and now - self._late_since >= WANT_SECONDS:
            device = next((name for name in self._devices if name not in self._asked), None)
            if device is not None:
                self._asked.append(device)
                self._late_since = None
                return BeginServing(device)
        if self._calm_since is not None and now - self._calm_since >= LEAVE_SECONDS:
            self._leaving, self._calm_since = self._asked[-1], None
            return EndServing(self._leaving)
        return None

    def ended(self, *, empty: bool) -> None:
        """Note how an `EndServing` has ended. `empty`: whether the device could be emptied; else it
        serves on."""
        assert self._leaving is not None
        if empty:
            self._asked.remove(self._leaving)
        self._leaving = None


def _since(before: float | None, now: float, holds: bool) -> float | None:
    """Return since when something holds; None: it does not."""
    if not holds:
        return None
    return now if before is None else before
