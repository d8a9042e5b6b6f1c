"""Profile a device's engine in its worker process, while the other devices of its server work too.

Workers, server and client share the machine's cores, so that jobs take longer than alone in a
process, and answers pass through the server; there is no HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ballast.bench.http_profile import BurstClient, behind_server
from ballast.bench.servers import ServersTarget, serving_fleets
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings
from ballast.sim.calibrate import PRESET
from ballast.sim.machine_profile import MachineProfile
from ballast.sim.story_reader import read_device_stories


def calibrate_in_worker(
    fleet: FleetSettings, specs: Sequence[ModelSpec], measured: MachineProfile, rounds: int
) -> MachineProfile:
    """Return `measured` with the costs of the engine on the first of the fleet's devices.

    Every device serves copies of all models and gets the bursts of a calibration; those of the
    first are read from its story. Raises DeviceError where a request fails.
    """
    first = next(iter(fleet.devices))
    clients = [
        BurstClient(
            [replace(spec, name=name_on(device, spec.name)) for spec in specs],
            # The others have work for as long as the first.
            rounds if device == first else 2 * rounds,
            seed,
            name=f"{device} ",
        )
        for seed, device in enumerate(fleet.devices)
    ]
    with tempfile.TemporaryDirectory() as folder:
        story = Path(folder) / "story.jsonl"
        asyncio.run(_send(copied(fleet, story), clients))
        (life,) = (life for life in read_device_stories(story) if life.device == first)
    names = {name_on(first, spec.name): spec.name for spec in specs}
    found = behind_server(measured, life.entries, clients[0])
    return replace(found, costs={names[name]: costs for name, costs in found.costs.items()})


def name_on(device: str, model: str) -> str:
    """Name of a model's copy on a device."""
    return f"{model}-{device.replace(':', '-')}"


def copied(fleet: FleetSettings, story: Path) -> FleetSettings:
    """The fleet with a copy of every model on each of its devices."""
    models = tuple(
        replace(m, name=name_on(device, m.name), devices=(device,))
        for device in fleet.devices
        for m in fleet.models
    )
    return replace(fleet, models=models, preset=PRESET, options={}, story_path=str(story))


async def _send(fleet: FleetSettings, clients: Sequence[BurstClient]) -> None:
    """Have all clients send their bursts until the first has sent all of its own."""
    async with serving_fleets([fleet]) as servers:
        first, *others = (
            asyncio.ensure_future(client.send_bursts(ServersTarget(servers, client.clock)))
            for client in clients
        )
        try:
            await first
        finally:
            for task in others:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
