"""Run `ballast simulate`: serve a workload on simulated devices under each preset.

Needs neither these devices nor checkpoints of catalogue models; equal input gives equal JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ballast.bench.cluster_run import ClusterRun, run_cluster
from ballast.bench.run_options import options_of, slos_of
from ballast.bench.stories import fresh, stories
from ballast.core.errors import ConfigError
from ballast.core.model import ModelSpec, weight_bytes
from ballast.core.settings import FleetSettings
from ballast.policy.presets import resolve, shared_options
from ballast.sim.cluster import Kind
from ballast.sim.cluster_files import NO_FILES, ClusterFiles
from ballast.sim.cost_switches import ALL
from ballast.workload.workload import Workload

Progress = Callable[[str, int], None]
"""(what runs, how many of its requests have arrived)."""


def simulate_presets(
    fleet: FleetSettings,
    specs: Sequence[ModelSpec],
    kinds: Sequence[Kind],
    workload: Workload,
    presets: Sequence[str],
    placement: str | None = None,
    progress: Progress = lambda what, sent: None,
    missed: Callable[[str], None] | None = None,
    story: Path | None = None,
    files: ClusterFiles = NO_FILES,
) -> Iterator[ClusterRun]:
    """Each preset in turn. `placement` names a fleet policy in place of the fleet's own (None);
    `missed`, `files`: see `run_cluster`; `story`: see `stories.fresh`.

    Raises ConfigError; for an unknown preset, before any has run.
    """
    if not workload.requests:
        raise ConfigError("workload", workload.name, "it must have requests: ask for more seconds")
    placement = placement or fleet.placement
    chosen = [resolve(name, _options(fleet, name, kinds), placement=placement) for name in presets]
    for preset in chosen:

        def arrived(sent: int, name: str = preset.name) -> None:
            progress(name, sent)

        slos = slos_of(fleet)
        with stories(fresh(story, preset.name, presets)) as sink_of:
            run = run_cluster(
                preset,
                kinds,
                specs,
                workload,
                slos,
                progress=arrived,
                missed=missed,
                sink_of=sink_of,
                files=files.of(fleet),
            )
        yield run


def _options(fleet: FleetSettings, name: str, kinds: Sequence[Kind]) -> dict[str, float]:
    """The options of a preset: the fleet's, and the order of jobs of the engine that serves."""
    first = any(kind.profile.serving.prefill_first for kind in kinds)
    order = shared_options(name, {"separate": 1.0}) if first else {}
    return {**order, **options_of(fleet, name)}


def simulation_json(
    kinds: Sequence[Kind],
    specs: Sequence[ModelSpec],
    workload: Workload,
    runs: Sequence[ClusterRun],
) -> dict[str, Any]:
    """Plain data; equal simulations give equal documents, for no time of this machine is in it."""
    return {
        "devices": [_kind_json(kind) for kind in kinds],
        "workload": workload.describe(),
        "requests": len(workload.requests),
        "weights_bytes": weight_bytes(specs),
        "presets": [run.to_json() for run in runs],
    }


def _kind_json(kind: Kind) -> dict[str, Any]:
    described: dict[str, Any] = {
        "device": kind.profile.device,
        "engine": kind.profile.engine,
        "number": kind.number,
        "lanes": kind.lanes,
    }
    if kind.ranks > 1:
        described["ranks"] = kind.ranks
    if kind.slices:
        described["slices"] = [part.name for part in kind.slices]
    if kind.modelled != replace(ALL, seed=kind.modelled.seed):
        described["modelled"] = asdict(kind.modelled)
    return described
