"""Run one workload under several presets, one after the other, live or in virtual time.

Used by `ballast bench`. Also replays a workload against a running server (`replay_http`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ballast.bench.device_run import run_live, run_virtual
from ballast.bench.host_loading import load_as_served
from ballast.bench.http import HttpTarget
from ballast.bench.progress import Progress, quiet
from ballast.bench.record import Prompts, prompts_of, vocabularies_of
from ballast.bench.replay import PATIENCE, WorkloadReplay, replay
from ballast.bench.report import Report
from ballast.bench.run_options import options_of, slos_of
from ballast.bench.servers import run_servers
from ballast.bench.stories import fresh, stories
from ballast.core.errors import BallastError
from ballast.core.model import ModelSpec
from ballast.core.settings import FleetSettings, Slo
from ballast.engine.sizing import check_room
from ballast.live.inbox import MonotonicClock
from ballast.policy.presets import resolve
from ballast.sim.calibrate import calibrate
from ballast.sim.profile import DeviceProfile
from ballast.workload.workload import Workload


def specs_of(fleet: FleetSettings, progress: Progress = quiet) -> list[ModelSpec]:
    """Sizes of the fleet's models as they are served on this machine, in its order; each checkpoint
    is loaded, its jobs are measured, and it is let go."""
    specs = []
    for i, settings in enumerate(fleet.models):
        progress("loading models", i, len(fleet.models), settings.name)
        host = load_as_served(settings, fleet)
        specs.append(host.spec)
        host.close()
    progress("loading models", len(specs), len(specs))
    return specs


def compare_live(
    fleet: FleetSettings,
    workload: Workload,
    presets: Sequence[str],
    story: Path | None = None,
    progress: Progress = quiet,
) -> Iterator[Report]:
    """Each preset in turn, on this machine; `story`: as `stories.fresh`.

    A single device runs in this process, several as a server runs them: a worker process each.
    """
    for preset in presets:
        file = fresh(story, preset, presets)
        chosen = replace(fleet, preset=preset, options=options_of(fleet, preset))
        chosen = replace(chosen, story_path=None if file is None else str(file))
        slos = slos_of(fleet)
        with _empty_disk(chosen) as chosen:
            if fleet.others:
                running = run_servers([chosen], workload, slos, name=preset, progress=progress)
                yield asyncio.run(running).report
            else:
                yield run_live(chosen, workload, slos, progress=progress).report


@contextmanager
def _empty_disk(fleet: FleetSettings) -> Iterator[FleetSettings]:
    """Give a run a disk tier of its own, beside the fleet's, so that it finds no other's KV."""
    if not fleet.kv.disk_bytes:
        yield fleet
        return
    beside = Path(fleet.kv.disk_path).parent
    with TemporaryDirectory(dir=beside, prefix="bench-kv-") as path:
        yield replace(fleet, kv=replace(fleet.kv, disk_path=path))


def compare_virtual(
    fleet: FleetSettings,
    workload: Workload,
    presets: Sequence[str],
    device: DeviceProfile | None = None,
    story: Path | None = None,
    progress: Progress = quiet,
) -> Iterator[Report]:
    """Each preset in virtual time, on `device`; None: on this machine, measured now.

    `story`: as `stories.fresh`. Raises ConfigError where the device could not serve a model.
    """
    specs = specs_of(fleet, progress)
    profile = calibrate(fleet, progress=progress) if device is None else device.of(specs)
    for preset in presets:
        chosen = replace(fleet, preset=preset, options=options_of(fleet, preset))
        needs = resolve(preset, chosen.options).requires
        for i, spec in enumerate(specs):
            check_room(spec, specs[:i], fleet.device, in_place=needs.in_place)
        with stories(fresh(story, preset, presets)) as sink_of:
            sink = sink_of(fleet.device.name)
            slos = slos_of(fleet)
            ran = run_virtual(chosen, specs, workload, slos, profile, sink=sink, progress=progress)
        yield ran.report


def replay_http(
    url: str,
    fleet: FleetSettings,
    workload: Workload,
    name: str = "http",
    key: str | None = None,
    progress: Progress = quiet,
) -> Report:
    """Against a server that runs already. Prompts are token ids of the fleet's vocabularies."""
    prompts = prompts_of(vocabularies_of(specs_of(fleet, progress)))
    slos = slos_of(fleet)
    return report_http(url, workload, prompts, slos, name=name, key=key, progress=progress)


def report_http(
    url: str,
    workload: Workload,
    prompts: Prompts,
    slos: Mapping[str, Slo],
    *,
    name: str,
    key: str | None = None,
    timeout: float = PATIENCE,
    progress: Progress = quiet,
) -> Report:
    """Replay as `replay_http`, with given prompts and service levels.

    A request that is not answered within `timeout` seconds fails.
    """

    async def run() -> WorkloadReplay:
        async with HttpTarget(url, MonotonicClock(), key) as target:
            return await replay(
                workload, target, prompts, timeout=timeout, progress=progress, name=name
            )

    done = asyncio.run(run())
    if not done.records:
        raise BallastError("the workload has no requests")
    return Report.of(
        done.records,
        slos,
        done.wall_seconds,
        done.memory,
        done.decisions,
        name=name,
        workload=workload.describe(),
    )
