"""Define the messages by which the server starts, watches and ends a worker.

Exchanged by `SupervisedWorker` and `RemoteDevice` in the server with `Worker` in the worker's
process.
"""

from __future__ import annotations

from typing import Any

from ballast import __version__
from ballast.core.capability import GpuReach
from ballast.core.model import ModelSpec
from ballast.core.report import DeviceReport
from ballast.core.settings import FleetSettings, ModelSettings
from ballast.transport.worker_messages.message import WorkerMessage

# -- to the worker ------------------------------------------------------------------------------


class ConfigureMsg(WorkerMessage, frozen=True):
    """First message: build this device and serve it."""

    fleet: FleetSettings
    log_level: int = 30
    """Level of the `logging` module; 30: warnings."""


class DrainMsg(WorkerMessage, frozen=True):
    """Finish the accepted requests, accept no others, then exit."""


class StopMsg(WorkerMessage, frozen=True):
    """Exit after the job in flight; open requests fail with `reason`."""

    reason: str


# -- to the server ------------------------------------------------------------------------------


class HelloMsg(WorkerMessage, frozen=True):
    """The process is up and waits for `ConfigureMsg`."""

    pid: int
    fleet: FleetSettings | None = None
    """Settings of the device that it serves since before this server; None: it has none."""
    version: str = __version__


class ReadyMsg(WorkerMessage, frozen=True):
    """The device serves `specs`; the models of `failed` could not be loaded, for these reasons."""

    specs: dict[str, ModelSpec]
    failed: dict[str, str]
    report: DeviceReport
    pages: str = ""
    """Address at which other workers get descriptors of its memory; empty: it lends none."""
    reach: GpuReach | None = None
    kept: tuple[ModelSettings, ...] = ()
    """Models that it serves since before this server."""
    epoch: int = 0
    """Last epoch in which it knew another device."""


class NotReadyMsg(WorkerMessage, frozen=True):
    """The device could not be built; the worker exits."""

    reason: str


class StatusMsg(WorkerMessage, frozen=True):
    """The device's state when the message was sent."""

    report: DeviceReport
    decisions: tuple[dict[str, Any], ...] = ()
    """Decisions since the last status, oldest first, as the story records them."""


class HeartbeatMsg(WorkerMessage, frozen=True):
    """The process is alive; sent while it loads as well."""

    turn_seconds: float = 0.0
    """Duration of the present turn of its loop so far; 0: it waits for events."""
    job_seconds: float = 0.0
    """Duration of the present job so far; 0: no job runs."""
    load_seconds: float = 0.0
    """Time since loading last made progress; 0: it serves."""


class DrainedMsg(WorkerMessage, frozen=True):
    """The device's loop has returned; the worker exits."""
