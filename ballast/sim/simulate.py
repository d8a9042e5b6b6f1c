"""Serve a workload in virtual time: on one device, or on several behind a fleet policy.

Entry point for `bench.device_run` and benchmarks; `sim.cluster` builds on it for whole clusters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ballast.core.entries import Sink
from ballast.core.model import ModelSpec
from ballast.core.request import Submission
from ballast.core.settings import FleetSettings
from ballast.core.story import Story
from ballast.engine.state import DeviceState
from ballast.policy.presets import Preset, resolve
from ballast.sim.controller import SimController
from ballast.sim.device import OnDeviceTurn, SendOutput, SendTokens, SimDevice
from ballast.sim.kv_tiers import virtual_store
from ballast.sim.machine_profile import MachineProfile

AHEAD = 10.0
"""Virtual seconds of arrivals that are submitted to devices before these advance."""


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Result of a simulated run."""

    seconds: float
    """Virtual time at the end."""
    state: DeviceState
    story: Story


def simulate(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    arrivals: Iterable[Submission],
    profile: MachineProfile,
    said: SendOutput,
    sink: Sink | None = None,
    observe: OnDeviceTurn | None = None,
    leaps: bool = True,
    preset: Preset | None = None,
    steps: SendTokens | None = None,
) -> SimulatedRun:
    """Run `arrivals` (each at its `arrival` second) on one device, to the last answer.

    `said(now, output)` gets the outputs to clients; `observe(now, state)` gets the state when each
    turn, and the leap that follows it, have ended. Equal arguments give equal runs; with or without
    `leaps` (`sim/leap.py`) the answers, their times and the books are the same. `preset`: policies
    without a registered name; None: the fleet's. `steps`: see `SimDevice`.
    """
    device = SimDevice(
        fleet.of_one_device("this simulation"),
        specs,
        preset or resolve(fleet.preset, fleet.options),
        profile,
        said,
        sink,
        observe,
        leaps,
        steps=steps,
        kv_store=virtual_store(fleet.kv.host_bytes, fleet.kv.disk_bytes),
    )
    last = 0.0
    for submission in arrivals:
        device.submit(submission)
        last = max(last, submission.arrival)
    device.finish(last)
    return SimulatedRun(device.clock.now(), device.state, device.story)


def simulate_devices(
    controller: SimController,
    arrivals: Iterable[Submission],
    sent: Callable[[Submission, str], None] = lambda submission, device: None,
) -> float:
    """Run `arrivals`, in order of arrival, on the controller's devices to the last answer; returns
    that time.

    The controller routes each request by the state at its arrival; `sent` gets the choice. Arrivals
    are taken as they fall due: a long workload need not be in memory.
    """
    devices = controller.devices.values()
    last = done = 0.0
    for submission in arrivals:
        reached, last = last, max(last, submission.arrival)
        while controller.due <= last:
            done = max(done, reached, controller.due)
            controller.look(done)
        if last > done + AHEAD:
            done = last
            for device in devices:
                device.advance(done)
        chosen = controller.choose(submission)
        sent(submission, chosen)
        controller.devices[chosen].submit(submission)
    drained = controller.settle(last)
    for device in devices:
        device.drain(drained)
    for device in devices:
        device.end()
    return max(device.clock.now() for device in devices)
